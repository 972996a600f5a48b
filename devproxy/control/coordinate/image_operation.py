# SPDX-License-Identifier: Apache-2.0
"""One image on its way: a part for each tree, what was noticed, and what there is of the image so far."""

from __future__ import annotations

from devproxy.control import coordinator_api as api
from devproxy.control.coordinate.job import Job
from devproxy.control.operation import Operation
from devproxy.node.participant import Dump
from devproxy.node.stages import Report


class ImageOperation(Operation):
    """leave: the job is suspended in it."""

    def __init__(self, job: Job, leave: bool, strict: bool, report: Report) -> None:
        verb = "suspend" if leave else "checkpoint"
        super().__init__(verb, job.spec.job, report, job.standing.record)
        self.leave = leave
        strict = strict or job.spec.strict
        self.dumps: list[Dump] = [
            tree.dump(self.stages.part(), leave=leave, strict=strict) for tree in job.trees.each
        ]
        self.whole = ""  # the image, as soon as it is one
        self.facts: api.ImageFacts | None = None

    def all_warnings(self) -> list[str]:
        return [*self.warnings, *(text for dump in self.dumps for text in dump.warnings)]
