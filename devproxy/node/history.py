# SPDX-License-Identifier: Apache-2.0
"""What the verbs of a job did of late, and when: for `devproxy trace`."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MOST = 2000  # spans that are kept; a checkpoint makes some twenty


@dataclass(frozen=True)
class Span:
    """Times in ns of CLOCK_MONOTONIC. What is under way ends when it was asked for."""

    kind: str  # phase, verb or stage
    name: str
    begin_ns: int
    end_ns: int


class History:
    """Threads: any. One lock, a leaf."""

    def __init__(self) -> None:
        self._mu = threading.Lock()
        self._ended: deque[Span] = deque(maxlen=MOST)
        self._under_way: dict[object, tuple[str, str, int]] = {}

    def begin(self, kind: str, name: str) -> object:
        """Returns what end() takes."""
        token = object()
        with self._mu:
            self._under_way[token] = (kind, name, time.monotonic_ns())
        return token

    def end(self, token: object) -> None:
        with self._mu:
            kind, name, since = self._under_way.pop(token)
            self._ended.append(Span(kind, name, since, time.monotonic_ns()))

    def add(self, kind: str, name: str, begin_ns: int, end_ns: int) -> None:
        with self._mu:
            self._ended.append(Span(kind, name, begin_ns, end_ns))

    @contextmanager
    def during(self, kind: str, name: str) -> Iterator[None]:
        token = self.begin(kind, name)
        try:
            yield
        finally:
            self.end(token)

    def since(self, ns: int) -> list[Span]:
        """Those that had not ended by then."""
        with self._mu:
            now = time.monotonic_ns()
            found = [span for span in self._ended if span.end_ns >= ns]
            return found + [Span(*about, now) for about in self._under_way.values()]
