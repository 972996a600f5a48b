# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a job come to a point where it may be cut (csrc/server/agreement.h has the rules).

Every server holds its clients before their next communication message and reports what they have submitted. All reports
go to all servers until each says that nothing is owed and nobody has moved. This module carries the reports and keeps
the time; it decides nothing about them.

No progress means that a rank's host waits, past the GPU (a socket, a file), for a rank that is held. Then the hold is
lifted, the job runs on, and the next attempt follows after a pause.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from devproxy.errors import CheckpointError
from devproxy.node.answer import Answer
from devproxy.node.together import all_of

PATIENCE_S = 5.0  # without progress
ATTEMPT_S = 120.0  # with it: somebody owes a long computation
PAUSES_S = (0.2, 1.0, 3.0)  # between the attempts
LOOK_S = (0.001, 0.02)  # between two rounds, at first and at most


class Part(Protocol):
    """A tree's side of it."""

    def hold(self) -> list[dict[str, Any]]: ...

    def agree(self, reports: list[dict[str, Any]]) -> Answer: ...

    def lift(self) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """ranks: members of communicators, counted once for each process; 0 for a job that has none, and then nothing is held."""

    ranks: int = 0
    rounds: int = 0
    attempts: int = 0
    seconds: float = 0.0
    way: str = "agreement"  # or meta, or take-back (barrier.py)

    @property
    def takes_back(self) -> bool:
        return self.way == "take-back"


class NoPoint(Exception):
    """There was none in the time given."""


def acquire(parts: Sequence[Part], *, once_s: float = 0.0) -> Outcome:
    """Returns with all parts held at a point where they may be cut. Raises CheckpointError with nothing held.

    once_s: tries once, for so long; then NoPoint, with nothing held.
    """
    began = time.monotonic()
    rounds, debt = 0, ""
    patience_s, attempt_s = (once_s, once_s) if once_s else (PATIENCE_S, ATTEMPT_S)
    for attempt, pause in enumerate((*PAUSES_S, 0.0), 1):
        try:
            reports = flat(all_of([part.hold for part in parts]))
            ranks = sum(1 for report in reports if report["members"])
            if ranks == 0:
                lift(parts)
                return Outcome()
            more, debt = settle(parts, reports, patience_s, attempt_s)
            rounds += more
            if not debt:
                return Outcome(ranks, rounds, attempt, time.monotonic() - began)
        except BaseException:
            lift(parts)
            raise
        lift(parts)
        if once_s:
            raise NoPoint(debt)
        time.sleep(pause)
    raise CheckpointError(
        "cut",
        f"the ranks come to no common point: {debt}, and its host waits for something else",
        "try again while that rank computes",
    )


def settle(
    parts: Sequence[Part],
    reports: list[dict[str, Any]],
    patience_s: float,
    attempt_s: float = ATTEMPT_S,
) -> tuple[int, str]:
    """Rounds, and what was still owed when nothing moved any more; "" when all have settled."""
    began = moved = time.monotonic()
    for rounds in looks():
        answers = all_of([partial(part.agree, reports) for part in parts])
        if failure := next((a.failure for a in answers if a.failure), ""):
            raise CheckpointError("cut", failure, "the ranks that wait must end or abort it")
        if all(answer.settled for answer in answers):
            return rounds, ""
        now, fresh = time.monotonic(), flat([answer.reports for answer in answers])
        if _progress(fresh) != _progress(reports):
            moved = now
        if now - moved > patience_s or now - began > attempt_s:
            return rounds, next(
                (a.debt for a in answers if a.debt), "a host function is outstanding"
            )
        reports = fresh
    raise AssertionError  # looks() has no end


def looks() -> Iterator[int]:
    """1, 2, ... without end. Waits before each but the first, longer from one to the next."""
    pause_s, number = LOOK_S[0], 1
    while True:
        yield number
        time.sleep(pause_s)
        pause_s, number = min(pause_s * 1.5, LOOK_S[1]), number + 1


def _progress(reports: list[dict[str, Any]]) -> list[Any]:
    return sorted((r["client"], r["counts"], r["launches"], r["host_functions"]) for r in reports)


def flat(lists: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [report for reports in lists for report in reports]


def lift(parts: Sequence[Part]) -> None:
    for part in parts:
        part.lift()
