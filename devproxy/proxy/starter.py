# SPDX-License-Identifier: Apache-2.0
"""A Jupyter kernel ends itself when whoever started it has ended. Behind devproxy-run it cannot see that one; we can.

jupyter_client tells a kernel its own process id (JPY_PARENT_PID), and ipykernel compares it with the kernel's parent, which is
devproxy-init here (ipykernel/parentpoller.py, 7.4).
"""

from __future__ import annotations

import os
import signal
import time

TYPE_CHECKING = False  # typing itself costs every start 10 ms
if TYPE_CHECKING:
    from collections.abc import Callable

LOOK_S = 1.0
GRACE_S = 5.0


class Starter:
    """look() from time to time; end(signal) ends the job."""

    def __init__(self, variable: str, end: Callable[[int], None]) -> None:
        self._pid = os.getppid()
        self._end = end
        self._gone_at: float | None = None
        self._killed = False
        self.is_watched = os.environ.get(variable) == str(self._pid)

    def look(self) -> None:
        if not self.is_watched or os.getppid() == self._pid:
            return
        now = time.monotonic()
        if self._gone_at is None:
            self._gone_at = now
            self._end(signal.SIGTERM)
        elif now - self._gone_at > GRACE_S and not self._killed:
            self._killed = True
            self._end(signal.SIGKILL)
