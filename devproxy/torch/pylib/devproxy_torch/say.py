# SPDX-License-Identifier: Apache-2.0
"""Warnings of devproxy, each line once."""

from __future__ import annotations

import ctypes

_said: set[str] = set()


def say_once(line: str) -> None:
    """On stderr as all of devproxy's warnings; not a Python warning, which a script may have made an error."""
    if line in _said:
        return
    _said.add(line)
    try:
        warn = ctypes.CDLL(None).devproxy_warn
    except AttributeError:  # a libcuda that is not ours
        return
    warn(line.encode())
