# SPDX-License-Identifier: Apache-2.0
"""How far a subject may go, and how fast, as the test says that watches it.

A job that is paced by its own clock may end before a slow machine's next command reaches it, and one that goes on after a
restore may be too far when somebody looks. So a paced subject asks before each step. $TEST_GATE names a symbolic link
(read without opening anything, which an image would hold): "N", the last step that it may begin, and never the last of
all; "end", go on and do not pause; not there, all but the last one.
"""

from __future__ import annotations

import os
import time

_LOOK_S = 0.02


def before(step: int, last: int, pause_s: float) -> None:
    """Returns when `step` (of 1..last) may begin, and not before pause_s have passed. step > last: the end."""
    path, due = os.environ.get("TEST_GATE"), time.monotonic() + pause_s
    while (highest := _highest(path, last)) is not None:
        rest = due - time.monotonic()
        if rest <= 0 and min(step, last) <= highest:
            return
        time.sleep(min(rest, _LOOK_S) if rest > 0 else _LOOK_S)


def _highest(path: str | None, last: int) -> int | None:
    """The step that may be begun; None: all, at once."""
    if not path:
        return last
    try:
        word = os.readlink(path)
    except FileNotFoundError:
        return last - 1
    return None if word == "end" else min(int(word), last - 1)


def pause(seconds: float) -> None:
    """For what takes its time within a step; none without a gate, and when the subjects hurry."""
    path, until = os.environ.get("TEST_GATE"), time.monotonic() + seconds
    while path and _highest(path, 1) is not None and (rest := until - time.monotonic()) > 0:
        time.sleep(min(rest, _LOOK_S))
