# SPDX-License-Identifier: Apache-2.0
"""Each kind of program: an image in the middle, kill -9 of everything, restore; then what an undisturbed run prints.

The subjects check themselves; their digest must not depend on what was done to them.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

import pytest

from tests.checkpoint.world import SUBJECTS, World, without_pauses
from tests.integration.test_programs import BUILD, build_kernels


@dataclass(frozen=True)
class Subject:
    script: str
    arguments: tuple[str, ...] = ()
    steps: int = 30
    at: int = 6
    seconds: str = "0.3"

    @property
    def name(self) -> str:
        kind = self.arguments[-1:] if {"--method", "--on"} & {*self.arguments} else ()
        return " ".join((self.script.removesuffix(".py"), *kind))

    @property
    def command(self) -> tuple[str, ...]:
        return (
            sys.executable,
            str(SUBJECTS / self.script),
            *("--steps", str(self.steps), "--seconds-per-step", self.seconds),
            *self.arguments,
        )


KERNELS = BUILD / "kernels.so"
SUBJECTS_TO_TRY = [
    Subject("gpt.py", ("--workers", "2")),
    Subject("rng.py"),
    Subject("sparse.py"),
    Subject("files.py"),
    Subject("waits.py"),
    Subject("hostfunc.py"),
    Subject("graphs.py", ("--kernels", str(KERNELS))),
    Subject("torch_graph.py"),
    Subject("pipes.py"),
    Subject("psutil_check.py"),
    Subject("signals.py"),
    Subject("gloo.py"),
    Subject("gloo.py", ("--on", "cuda")),
    Subject("compiled.py", steps=14, at=4, seconds="0.6"),
    *(Subject("workers.py", ("--method", how)) for how in ("fork", "spawn", "forkserver", "torch")),
]


@pytest.mark.sweep(8)
@pytest.mark.parametrize("subject", SUBJECTS_TO_TRY, ids=lambda s: s.name)
def test_killed_and_restored(world: World, subject: Subject) -> None:
    build_kernels(KERNELS)
    other = World()
    try:
        assert other.run(*without_pauses(subject.command)).wait(200) == 0, other.tail()
        (digest,) = other.digest()
    finally:
        other.close()

    world.run(*subject.command)
    world.wait_step(subject.at)
    world.ctl("checkpoint", "j")
    cut = max(world.steps())
    world.wait_step(min(cut + 3, subject.steps - 2))
    world.kill_everything()
    world.ctl("restore", "j", "--store", str(world.store), "--output", "log", "--wait")
    assert len(world.nonces()) == 1, world.tail()
    assert world.steps() == list(range(1, subject.steps + 1)), world.tail()
    assert world.digest() == [digest], world.tail()
    assert len(re.findall(r"^start ", world.text(), re.M)) == 1
