# SPDX-License-Identifier: Apache-2.0
"""One verb on its way over all trees of a job: its stages, its words, and the same step of every tree side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from devproxy.errors import DevproxyError
from devproxy.node.history import History
from devproxy.node.stages import Report, Stages
from devproxy.node.together import all_of


class _Staged(Protocol):
    stages: Stages


class _Part(Protocol):
    stages: Stages
    warnings: list[str]

    @property
    def still_s(self) -> float: ...


P = TypeVar("P", bound=_Staged)


def each(stages: Stages, parts: Sequence[P], step: Callable[[P], None]) -> None:
    """The step of every part side by side; each has stages of its own (Stages.part), which these here join.

    Raises the first failure after all have ended; where that part stood is where the operation stands.
    """
    failed: list[P] = []

    def run(part: P) -> None:
        try:
            step(part)
        except BaseException:
            failed.append(part)
            raise

    try:
        all_of([partial(run, part) for part in parts])
    finally:
        for part in parts:
            stages.join(part.stages, failed=part in failed[:1])


class Operation:
    """Owned by the verb's thread. Each tree's part has stages of its own (part()), which each() joins."""

    def __init__(self, verb: str, job: str, report: Report, record: History) -> None:
        self.verb = verb
        self.name = f"job {job}"
        self.stages = Stages(report, "refuse_early", self.name, record)
        self.warnings: list[str] = []

    def each(self, parts: Sequence[P], step: Callable[[P], None]) -> None:
        each(self.stages, parts, step)


def still_s(parts: Sequence[_Part]) -> float:
    """The job stands still as long as its slowest tree."""
    return max((part.still_s for part in parts), default=0.0)


def words(error: Exception) -> tuple[str, str]:
    """What failed, and what to do."""
    if isinstance(error, DevproxyError):
        return error.what, error.remedy
    return f"{type(error).__name__}: {error}", ""
