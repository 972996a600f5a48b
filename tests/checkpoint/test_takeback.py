# SPDX-License-Identifier: Apache-2.0
"""Cuts in the middle of collectives: one rank waits past its GPU, others have submitted what it owes.

At the gate (subjects/gate.py) rank 0 stands before its next step, and the others are in it. So what they have submitted
has not begun, with all that waits behind it.
"""

from __future__ import annotations

import random

import pytest

from tests.checkpoint.test_ranks import (
    STEPS,
    check,
    command,
    disturb,
    training,
    way_of_last_cut,
)
from tests.checkpoint.world import World

VERBS = ("checkpoint", "migrate", "suspend")


def stand(world: World, at: int) -> None:
    """Rank 0 waits before the step behind that one."""
    world.until(at)
    world.wait(lambda: bool(world.steps()) and world.steps()[-1] >= at, 120, f"step {at}")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("barrier", ["auto", "takeback"])
def test_verbs_while_a_rank_waits(world: World, barrier: str) -> None:
    expected = world.undisturbed(*command(4), gpus=4)
    world.until(2)
    job = world.run(*command(4), options=("--gpus", "4", "--barrier", barrier))
    dice = random.Random(barrier)
    for number, verb in enumerate(VERBS * 2):
        stand(world, 3 + 4 * number)
        disturb(world, verb, dice, 4)
        assert way_of_last_cut(world).startswith("take-back: "), way_of_last_cut(world)
    assert world.end_of(job) == 0, world.tail()
    check(world, expected)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("ranks", "gpus", "seed"), [(4, 4, 1), (3, 2, 2), (2, 1, 3)])
def test_verbs_at_random_moments(world: World, ranks: int, gpus: int, seed: int) -> None:
    """Ranks at work, and cut wherever they are."""
    dice = random.Random(seed)
    expected = world.undisturbed(*command(ranks), gpus=gpus)
    job = world.run(*command(ranks), options=("--gpus", str(gpus), "--barrier", "takeback"))
    for at in sorted(dice.sample(range(2, 80), 5)):
        world.wait_step(at)
        disturb(world, dice.choice(VERBS), dice, gpus)
    assert world.end_of(job) == 0, world.tail()
    check(world, expected)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("seed", [1, 2])
def test_restore_after_everything_was_killed(world: World, seed: int) -> None:
    """Twice, the second time of an image of the restored job; on other GPUs each time."""
    expected = world.undisturbed(*command(4), gpus=4)
    dice = random.Random(seed)
    world.until(2)
    world.run(*command(4), options=("--gpus", "4", "--barrier", "takeback"))
    for _ in range(2):
        stand(world, max(world.steps(), default=2) + dice.randrange(1, 6))
        disturb(world, "checkpoint", dice, 4)
        assert world.kill_everything()
        world.restore("--gpu", ",".join(map(str, dice.sample(range(6), 4))))
    world.wait_end("digest")
    assert len(world.nonces()) == 1, world.tail()
    assert world.digest() == expected
    assert world.steps()[-1] == STEPS


def test_all_kinds_of_commands_behind_a_collective(world: World) -> None:
    """Copies of all kinds, sets, host functions, graphs, events and memory that are gone by then (subjects/behind.py)."""
    dice = random.Random(7)
    words = (*command(2), "--behind", "1")
    expected = world.undisturbed(*words, gpus=2)
    world.until(2)
    world.run(*words, options=("--gpus", "2", "--barrier", "takeback"))
    for number, verb in enumerate((*VERBS, "migrate", "checkpoint")):
        stand(world, 3 + 2 * number)
        disturb(world, verb, dice, 2)
    assert world.kill_everything()
    world.restore("--gpu", "3,1")
    stand(world, max(world.steps()) + 3)
    disturb(world, "migrate", dice, 2)
    world.wait_end("digest")
    assert len(world.nonces()) == 1, world.tail()
    assert world.digest() == expected


@pytest.mark.sweep(1)
@pytest.mark.parametrize("way", ["ddp", "pipeline", "fsdp2"])
def test_training_while_a_rank_waits(world: World, way: str) -> None:
    """Under torchrun: moved or suspended, stored, then kill -9 of everything and a restore."""
    dice = random.Random(way)
    expected = world.undisturbed(*training(way), gpus=4)
    world.until(2)
    world.run(*training(way), options=("--gpus", "4"))
    stand(world, dice.randrange(3, 20))
    disturb(world, dice.choice(("suspend", "migrate")), dice, 4)
    assert way_of_last_cut(world).startswith("take-back: "), way_of_last_cut(world)
    stand(world, max(world.steps()) + dice.randrange(1, 6))
    disturb(world, "checkpoint", dice, 4)
    assert world.kill_everything()
    world.restore()
    world.wait_end("digest")
    assert len(world.nonces()) == 1, world.tail()
    assert world.digest() == expected
