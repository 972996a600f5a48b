# SPDX-License-Identifier: Apache-2.0
"""The daemon's log: stderr, which is a file unless --foreground."""

from __future__ import annotations

import os
import sys
import time

from devproxy import log as log_module


def log(text: str) -> None:
    """One line with a time, on stderr, which is the log unless --foreground."""
    line = f"{time.strftime('%Y-%m-%dT%H:%M:%S')} devproxyd[{os.getpid()}]: {text}"
    if log_module.in_json():
        line = log_module.as_json(text, "devproxyd")
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass
