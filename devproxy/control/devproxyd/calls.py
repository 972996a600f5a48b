# SPDX-License-Identifier: Apache-2.0
"""The calls under way, and since when there is nothing to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from devproxy.control import messages
from devproxy.control.quiet_grpc import grpc


class Calls:
    """One lock decides whether to leave and whether to take a call, so the daemon never takes a call and then cuts it off. A
    caller that comes too late is told that its call was not taken, and asks the next daemon (client.py).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._idle_since = time.monotonic()
        self._leaving = False
        self.leave_asked = False

    @contextmanager
    def running(self, context: grpc.ServicerContext) -> Iterator[None]:
        with self._lock:
            taken = not self._leaving
            self._running += taken
        if not taken:
            messages.not_taken(context)
        try:
            messages.taken(context)
            yield
        finally:
            with self._lock:
                self._running -= 1
                self._idle_since = time.monotonic()

    def busy(self) -> None:
        """A job lives."""
        with self._lock:
            self._idle_since = time.monotonic()

    def should_leave(self, idle_s: float) -> bool:
        with self._lock:
            if self._running:
                return False
            if self.leave_asked or time.monotonic() - self._idle_since >= idle_s:
                self._leaving = True
            return self._leaving

    def take_no_more(self) -> None:
        """A signal ends us; calls under way have the rest of the server's grace."""
        with self._lock:
            self._leaving = True
