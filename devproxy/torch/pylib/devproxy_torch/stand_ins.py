# SPDX-License-Identifier: Apache-2.0
"""What a name of torch is made of where nothing is behind it: a refusal by name, a constant, a switch that is off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def refuse(what: str, remedy: str = "") -> Callable[..., Any]:
    """A function that says by name what devproxy does not have."""

    def say_no(*_: object, **__: object) -> Any:
        raise RuntimeError(
            f"{what} is not supported behind devproxy" + (f"; {remedy}" if remedy else "")
        )

    return say_no


def constant(value: object) -> Callable[..., Any]:
    """A new function that returns `value`: torch compares some of these by identity, so none is shared."""
    return lambda *_, **__: value


def only_off(what: str) -> Callable[..., None]:
    """A switch of what devproxy does not have: it is off, and may be told so."""
    say_no = refuse(what)
    return lambda on=False, *_: say_no() if on else None
