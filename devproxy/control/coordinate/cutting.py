# SPDX-License-Identifier: Apache-2.0
"""Where a job may be cut: all its ranks come to a common point, and all its trees know what was taken back there."""

from __future__ import annotations

from collections.abc import Sequence

from devproxy import fault
from devproxy.control import barrier
from devproxy.control.agreement import Outcome
from devproxy.control.coordinate.job import Job
from devproxy.control.operation import Operation

fault.register("agree", "nothing has stopped, before the ranks are asked for a common point")


def agree(
    job: Job, op: Operation, parts: Sequence[barrier.Part], aim_ms: int | None = 0
) -> Outcome:
    """The ranks come to where the job may be cut."""

    def chose(way: str) -> None:
        op.stages.beside("instead" if chosen else "barrier", way)
        chosen.append(way)

    chosen: list[str] = []
    with op.stages.at("agree", "waiting for a point that all ranks have come to", op.name):
        fault.point("agree")
        outcome = barrier.acquire(parts, job.spec.barrier, chose, aim_ms=aim_ms)
    if chosen:
        job.standing.last_cut = f"{chosen[-1]}; {outcome.seconds:.2f} s"
    return outcome


def flush(op: Operation, parts: Sequence[barrier.Part], outcome: Outcome) -> None:
    """Every tree knows what the dumps have taken back."""
    if outcome.takes_back:
        with op.stages.at("flush", "waiting for what the trees have said", op.name):
            barrier.flush(parts, op.stages.name)
