# SPDX-License-Identifier: Apache-2.0
"""Replica splicing on hal/cuda over the fake driver: nobody sees a difference, and what is equal is there once.

The fake maps memory as the driver does, in pages of 2 MiB, runs each stream by a thread of its own, and ends a server that
touches what is not mapped. It shows nothing about speed.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests import sweeps
from tests.checkpoint.test_splice import RANKS, Job, Tight, moved_about
from tests.checkpoint.world import World
from tests.native.test_hal_cuda import fake_gpus

MODE = "eager"
PAGE = 2 << 20


@pytest.fixture
def world(tmp_path: Path):
    fakes = fake_gpus(tmp_path / "root", 4)
    made = World(**fakes, DEVPROXY_CUDA_EXECUTOR="host", FAKE_NCCL_MANY="1")
    yield made
    made.close()


def run(
    world: World, name: str, gpus: str, *programs: str, mode: str = MODE, hold: bool = False
) -> Job:
    return Job(world, name, gpus, *programs, mode=mode, hold=hold, device="cuda")


def test_ranks_that_are_not_quite_replicas(world: World) -> None:
    expected = run(world, "off", "--gpu 0,0,0,0", mode="off").results()
    job = run(world, "together", "--gpu 0,0,0,0", hold=True)
    job.wait()
    counts = job.counts()
    results = job.results()
    assert {name for name in expected if results[name] != expected[name]} == set()
    assert all(counts[what] > 0 for what in ("squashed", "validations", "different", "broken")), (
        counts
    )


@pytest.mark.parametrize(("program", "launches"), [("plain", 8), ("fused", 1)])
def test_the_step_of_replicas_is_computed_once_and_kept_once(
    world: World, program: str, launches: int
) -> None:
    job = run(world, "once", "--gpu 0,0,0,0", program, mode=f"{MODE},patient", hold=True)
    job.wait()
    counts = job.counts()
    assert counts["different"] == counts["given_up"] == 0, counts
    assert 6 * launches * (RANKS - 1) <= counts["squashed"] <= 9 * launches * (RANKS - 1), counts
    # Parameters, states and what the step makes on the way: the small ones lie in one page, the others in another. A fused step
    # counts its steps among the small ones, each rank by itself, since a launch so small is not worth a meeting; so that page
    # is not always one.
    saved = counts["saved_bytes"] // ((RANKS - 1) * PAGE)
    assert saved == 2 or (program == "fused" and saved >= 1), counts
    job.results()


@pytest.mark.parametrize("seed", range(2))
def test_resizes_while_ranks_are_spliced(world: World, seed: int) -> None:
    dice = random.Random(f"{sweeps.seed()} {seed}")
    programs = ["plain", "fused", "average", "diverges_once", "there_and_back", "graph"]
    dice.shuffle(programs)
    world.env["DEVPROXY_REDUCTION"] = "tree"  # so that a resize changes no bit
    expected = run(world, "apart", "--gpus 4", *programs).results()
    job = run(world, "moved", "--gpu 0,0,0,0", *programs, hold=True)
    assert moved_about(world, job, programs, dice) == expected


def test_ranks_come_to_a_gpu_spliced(world: World) -> None:
    """By a resize, as they are loaded; and there they stay so, from the first step on."""
    tight = Tight(world)
    world.env["DEVPROXY_REDUCTION"] = "tree"
    options = ("--device", "cuda", "--gpus", str(RANKS))
    job = tight.start("off", *options)
    (tight.folder / "go").touch()
    (tight.folder / "hold").unlink()
    assert world.end_of(job) == 0, world.tail()
    alone = tight.digests()
    for old in tight.folder.iterdir():
        old.unlink()
    (tight.folder / "hold").touch()

    job = tight.start("on,patient", *options)
    tight.wait("at-gate")
    world.ctl("resize", "j", "--gpus", "0,0,0,0")
    # Of three ranks, parameters and two states of three layers: whole pages, for the optimizer's step counts, which each rank
    # writes alone, do not lie between them.
    saved = 3 * 3 * 3 * 4 * 2048 * 2048
    assert tight.server()["splicing"]["saved_bytes"] >= saved
    (tight.folder / "go").touch()
    tight.wait("ended")
    counts = tight.server()["splicing"]
    assert counts["squashed"] == 5 * (RANKS - 1) and counts["saved_bytes"] >= saved, counts
    (tight.folder / "hold").unlink()
    assert world.end_of(job) == 0, world.tail()
    assert tight.digests() == alone
