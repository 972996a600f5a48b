# SPDX-License-Identifier: Apache-2.0
"""Which stage an operation has reached, on which object, and how long each of its stages took.

An error is told with the stage and the object that were reached last, so a stage is entered before its work begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from devproxy.node.history import History


@dataclass(frozen=True)
class Progress:
    """One line of news about a long operation. total_bytes == 0: the size is not known (yet)."""

    stage: str  # refuse_early cut device host files upload commit restore ...
    text: str
    done_bytes: int = 0
    total_bytes: int = 0


Report = Callable[[Progress], None]


class Stages:
    """Owned by the thread that runs the operation. Only beside() and timed() may be called from another."""

    def __init__(
        self, report: Report, name: str, object: str, record: History | None = None
    ) -> None:
        self.name = name
        self.object = object
        self.seconds: dict[str, float] = {}
        self._report = report
        self._record = record or History()
        self._begin = time.monotonic()

    def elapsed_s(self) -> float:
        return time.monotonic() - self._begin

    def say(self, text: str, done: int = 0, total: int = 0) -> None:
        self._report(Progress(self.name, text, done, total))

    def beside(self, name: str, text: str, done: int = 0, total: int = 0) -> None:
        """News of a stage that runs beside the one that errors are about."""
        self._report(Progress(name, text, done, total))

    def reach(self, name: str, text: str, object: str) -> None:
        self.name, self.object = name, object
        self.say(text)

    @contextmanager
    def at(self, name: str, text: str, object: str) -> Iterator[None]:
        """Reaches the stage, and adds the time that the block takes."""
        self.reach(name, text, object)
        with self.timed(name):
            yield

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Adds the block's time to the part. Each part belongs to one thread at a time."""
        begin = time.monotonic()
        try:
            with self._record.during("stage", part):
                yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - begin

    def took(self, part: str, begin_s: float, end_s: float) -> None:
        """Of a part that is no block of code. Times of time.monotonic()."""
        self.seconds[part] = end_s - begin_s
        self._record.add("stage", part, int(begin_s * 1e9), int(end_s * 1e9))

    def part(self) -> Stages:
        """For one of several trees that work on the same stage side by side; join() ends it."""
        return Stages(self._report, self.name, self.object, self._record)

    def join(self, part: Stages, *, failed: bool = False) -> None:
        """The slowest tree's times count. Where a tree failed, its stage and object are the operation's."""
        for name, seconds in part.seconds.items():
            self.seconds[name] = max(seconds, self.seconds.get(name, 0.0))
        if failed:
            self.name, self.object = part.name, part.object
