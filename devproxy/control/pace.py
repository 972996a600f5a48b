# SPDX-License-Identifier: Apache-2.0
"""How long an optimizer step takes, from looks at a counter at odd moments."""

from __future__ import annotations

from collections import deque

WINDOW_S = 20.0


class Pace:
    """Times are those of the looks that saw the counter move, so that the error of one look spreads over the window."""

    def __init__(self) -> None:
        self.steps = 0
        self._moves: deque[tuple[float, int]] = deque()

    def look(self, now_s: float, steps: int) -> None:
        if steps < self.steps:  # a job that went back to an image
            self._moves.clear()
        if steps != self.steps:
            self._moves.append((now_s, steps))
        self.steps = steps
        while len(self._moves) > 2 and now_s - self._moves[0][0] > WINDOW_S:
            self._moves.popleft()

    def forget(self) -> None:
        """The job stood still."""
        self._moves.clear()

    @property
    def step_s(self) -> float:
        """0 where it is not known yet."""
        if len(self._moves) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self._moves[0], self._moves[-1]
        return (last_s - first_s) / (last - first)
