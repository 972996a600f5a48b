# SPDX-License-Identifier: Apache-2.0
"""Ranks on one GPU whose activations do not fit beside each other take turns: the GPU's memory is never exceeded, and the
numbers are those of a GPU for each (tests/subjects/activations.py)."""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.checkpoint.world import SUBJECTS, World

MIB = 1 << 20


class Job:
    def __init__(self, world: World, ranks: int, *words: str) -> None:
        self.world, self.ranks, self.words = world, ranks, words
        self.folder = world.home / "activations"

    def start(self, gpus: str, memory: str, *more: str) -> None:
        for old in self.folder.iterdir() if self.folder.exists() else ():
            old.unlink()
        self.folder.mkdir(exist_ok=True)
        script = (str(SUBJECTS / "activations.py"), str(self.ranks), str(self.folder))
        self.job = self.world.run(
            sys.executable, *script, *self.words, *more,
            options=("--gpu", gpus, "--gpu-memory", memory),
        )  # fmt: skip

    def wait_gate(self) -> None:
        gates = lambda: len(list(self.folder.glob("at-gate-*"))) == self.ranks  # noqa: E731
        self.world.wait(gates, 90, "the gate")

    def move(self, gpus: str, memory: str, onto: str) -> None:
        """Starts there, and goes on from its gate on the GPU `onto`."""
        self.start(gpus, memory, "--gated")
        self.wait_gate()
        self.world.ctl("resize", "j", "--gpus", onto)
        (self.folder / "go").touch()

    def server(self) -> dict[str, Any] | None:
        done = self.world.ctl("status", "j", "--json", check=False)
        if done.returncode != 0:
            return None
        servers: list[dict[str, Any]] = json.loads(done.stdout).get("servers", [])
        return servers[0] if servers else None

    def watch(self) -> list[dict[str, Any]]:
        """What the server said until the job ended."""
        seen = []
        while self.job.poll() is None:
            if (server := self.server()) is not None and server.get("memory_turns"):
                seen.append(server)
        assert self.world.end_of(self.job) == 0, self.world.tail()
        return seen

    def digests(self) -> list[str]:
        return [(self.folder / f"digest-{rank}").read_text() for rank in range(self.ranks)]

    def apart(self) -> list[str]:
        self.start(",".join(map(str, range(self.ranks))), "2GiB")
        assert self.world.end_of(self.job) == 0, self.world.tail()
        return self.digests()


def test_ranks_that_come_to_one_gpu_take_turns(world: World) -> None:
    """Each had 296 MiB at its peak, elsewhere."""
    job = Job(world, 3, "--steps", "8")
    expected = job.apart()
    job.move("0,1,2", "512MiB", "0,0,0")
    seen = job.watch()
    assert job.digests() == expected
    assert max(s["ledger"]["used"] for s in seen) <= 512 * MIB
    most = [sum(rank["most"] for rank in s["memory_turns"].get("ranks", ())) for s in seen]
    assert max(most) > 3 * 290 * MIB
    turns = seen[-1]["memory_turns"]
    assert turns["waits"] > 0 and not turns["off"]


def test_ranks_that_start_on_one_gpu_take_turns(world: World) -> None:
    """Nothing is known of them at first."""
    job = Job(world, 2)
    expected = job.apart()
    job.start("0,0", "512MiB")
    seen = job.watch()
    assert job.digests() == expected
    assert seen[-1]["memory_turns"]["waits"] > 0


def test_ranks_that_need_their_memory_at_the_same_time(world: World) -> None:
    """They meet in the middle of each forward. The software GPU lets them have what it has not."""
    job = Job(world, 2, "--meets", "--steps", "4", "--layers", "12")
    expected = job.apart()
    job.start("0,0", "300MiB")
    seen = job.watch()
    assert job.digests() == expected
    assert seen[-1]["memory_turns"]["off"]
    assert max(s["ledger"]["used"] for s in seen) > 300 * MIB


def test_ranks_that_fit_never_wait(world: World) -> None:
    job = Job(world, 2, "--steps", "5")
    expected = job.apart()
    job.move("0,1", "1GiB", "0,0")
    seen = job.watch()
    assert job.digests() == expected
    assert seen[-1]["memory_turns"]["waits"] == 0
