"""Jobs of many ranks, cut anywhere: the same numbers, each step once."""

from __future__ import annotations

import random
import sys

import pytest

from tests.checkpoint.world import SUBJECTS, World, without_pauses

STEPS = 120
RANKS = (
    sys.executable,
    str(SUBJECTS / "ranks.py"),
    "--steps",
    str(STEPS),
    "--seconds-per-step",
    "0.1",
)


def command(ranks: int) -> tuple[str, ...]:
    return (*RANKS, "--ranks", str(ranks))


def undisturbed(world: World, ranks: int, gpus: int) -> list[str]:
    job = world.run(
        *without_pauses(command(ranks)),
        name="alone",
        log="alone",
        options=("--gpus", str(gpus)),
        TEST_GATE="",
    )
    assert job.wait(120) == 0, world.tail("alone")
    return world.digest("alone")


def check(world: World, expected: list[str]) -> None:
    assert len(world.nonces()) == 1, world.tail()
    assert world.steps() == list(range(1, STEPS + 1)), world.tail()
    assert world.digest() == expected


def disturb(world: World, verb: str, dice: random.Random, gpus: int) -> None:
    """One verb, now. No rank stands at the gate meanwhile: a host that waits for nobody's GPU is what no cut can wait for."""
    world.until(STEPS - 1)
    if verb == "checkpoint":
        world.ctl("checkpoint", "j")
    elif verb == "migrate":
        to = dice.sample(range(gpus + 2), gpus)
        world.ctl("migrate", "j", "--to", ",".join(map(str, to)))
    elif verb == "suspend":
        world.ctl("suspend", "j")
        world.ctl("resume", "j")


@pytest.mark.parametrize(("ranks", "gpus", "seed"), [(4, 4, 1), (3, 2, 2), (2, 1, 3)])
def test_verbs_at_random_moments(world: World, ranks: int, gpus: int, seed: int) -> None:
    dice = random.Random(seed)
    expected = undisturbed(world, ranks, gpus)
    job = world.run(*command(ranks), options=("--gpus", str(gpus)))
    for at in sorted(dice.sample(range(2, STEPS - 40), 5)):
        world.wait_step(at)
        disturb(world, dice.choice(("checkpoint", "migrate", "suspend")), dice, gpus)
    assert world.end_of(job) == 0, world.tail()
    check(world, expected)


def test_restore_after_everything_was_killed(world: World) -> None:
    expected = undisturbed(world, 4, 4)
    world.run(*command(4), options=("--gpus", "4"))
    world.wait_step(20)
    disturb(world, "checkpoint", random.Random(0), 4)
    world.wait_step(max(world.steps()) + 3)
    assert world.kill_everything()
    # What was printed after the image is printed again.
    kept = world.steps()
    world.restore("--gpu", "3,2,1,0")
    world.wait_end("digest")
    assert len(world.nonces()) == 1, world.tail()
    assert world.digest() == expected
    assert world.steps()[-1] == STEPS
    assert kept[0] == 1


def test_ranks_that_outnumber_the_gpus(world: World) -> None:
    expected = undisturbed(world, 8, 2)
    job = world.run(*command(8), options=("--gpus", "2"))
    for at in (5, 20, 35):
        world.wait_step(at)
        disturb(world, "checkpoint", random.Random(0), 2)
    assert world.end_of(job) == 0, world.tail()
    check(world, expected)
