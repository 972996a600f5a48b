# SPDX-License-Identifier: Apache-2.0
"""The events of an agent, for as long as it lives."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from devproxy.errors import DevproxyError

LOOK_S = 0.2
LAST_WORDS_S = 2.0  # how long the stream of an agent that has ended may still bring events
# How long a verb under way waits for a supervisor that a signal has stopped.
STOPPED_S = 5.0


def until_ended(
    events: Iterator[Any],
    ended: Callable[[], bool],
    lost: DevproxyError | None = None,
    stopped: Callable[[], DevproxyError | None] = lambda: None,
) -> Iterator[Any]:
    """Yields the events while the agent lives, then ends or raises `lost`. If `stopped` has returned an error for
    STOPPED_S, that error is raised.

    A thread reads the events. If it never returns it is left alone: when a process ends while a channel of gRPC 1.85
    connects to it, that channel may never answer again, not even to cancel() (about one in a hundred refused restores on
    a loaded machine).
    """
    told: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def read() -> None:
        try:
            for event in events:
                told.put((event, None))
            told.put((None, None))
        except BaseException as error:
            told.put((None, error))

    threading.Thread(target=read, name="news", daemon=True).start()
    deadline = None
    stopped_s: float | None = None
    while True:
        try:
            event, error = told.get(timeout=LOOK_S)
        except queue.Empty:
            why = stopped()
            if why is None:
                stopped_s = None
            elif stopped_s is None:
                stopped_s = time.monotonic()
            elif time.monotonic() - stopped_s > STOPPED_S:
                raise why from None
            if deadline is None:
                deadline = time.monotonic() + LAST_WORDS_S if ended() else None
            elif time.monotonic() > deadline:
                if lost:
                    raise lost from None
                return
            continue
        if error:
            raise error
        if event is None:
            return
        yield event
