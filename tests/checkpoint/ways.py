# SPDX-License-Identifier: Apache-2.0
"""The ways in which tests/subjects/parallel.py trains on several ranks, and the command line of each."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tests.checkpoint.world import SUBJECTS

STEPS = 300


@dataclass(frozen=True)
class Way:
    """ranks: how many the tests start, and fewest: of how many it makes sense. meta: its collectives are all of one communicator that every rank is in, so
    `--barrier meta` can find a point. launcher: how the ranks meet without torchrun."""

    name: str
    ranks: int = 4
    fewest: int = 2
    meta: bool = False
    launcher: str = ""
    train: str = ""
    steps: int = STEPS

    def command(
        self, ranks: int = 0, steps: int = 0, seconds_per_step: float = 0.2
    ) -> tuple[str, ...]:
        count = str(ranks or self.ranks)
        if self.launcher:
            words = (sys.executable, str(SUBJECTS / "launcher.py"), "--ranks", count, "--meet", self.launcher)  # fmt: skip
        else:
            torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
            words = (*torchrun, "--nproc-per-node", count, str(SUBJECTS / "parallel.py"))
        options = ("--way", self.train or self.name, "--steps", str(steps or self.steps))
        return (*words, *options, "--seconds-per-step", str(seconds_per_step))


WAYS = {
    way.name: way
    for way in (
        Way("ddp", meta=True),
        Way("join", meta=True),
        Way("fsdp2", meta=True),
        Way("hsdp", fewest=4),
        Way("zero1", meta=True),
        Way("tensor", meta=True),
        Way("megatron", meta=True),
        Way("pipeline"),
        Way("custom"),
        Way("interleaved"),
        Way("threed", fewest=4),
        Way("threed_8", ranks=8, fewest=8, train="threed", steps=120),
        Way("compiled", meta=True),
        Way("graphs"),
        Way("evaluate", meta=True),
        Way("launcher", meta=True, launcher="tcp", train="ddp"),
        Way("launcher_file", launcher="file", train="fsdp2", meta=True),
    )
}
