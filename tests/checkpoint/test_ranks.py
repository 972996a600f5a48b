# SPDX-License-Identifier: Apache-2.0
"""Jobs of many ranks, cut anywhere: the same numbers, each step once."""

from __future__ import annotations

import json
import random
import sys
import time

import pytest

from devproxy.control import barrier as barriers
from devproxy.proxy.control_channel import ControlChannel, ServerError
from tests.checkpoint import ways
from tests.checkpoint.world import SUBJECTS, World

STEPS = 400  # far more than the verbs take: at the gate before the last step no cut is possible
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


def check(world: World, expected: list[str], steps: int = STEPS) -> None:
    assert len(world.nonces()) == 1, world.tail()
    assert world.steps() == list(range(1, steps + 1)), world.tail()
    assert world.digest() == expected


def run_freely(world: World, at: int, steps: int = STEPS) -> None:
    """Returns at that step. From then on no rank stands at the gate: a host that waits past its GPU is what no cut can
    wait for."""
    world.wait_step(at)
    world.until(steps - 1)


def disturb(world: World, verb: str, dice: random.Random, gpus: int) -> None:
    """One verb, now."""
    if verb == "checkpoint":
        world.ctl("checkpoint", "j")
    elif verb == "migrate":
        to = dice.sample(range(gpus + 2), gpus)
        world.ctl("migrate", "j", "--to", ",".join(map(str, to)))
    elif verb == "resize":
        shared = dice.sample(range(gpus + 2), dice.randrange(1, gpus + 1))
        to = [dice.choice(shared) for _ in range(gpus)]
        world.ctl("resize", "j", "--gpus", ",".join(map(str, to)))
    elif verb == "suspend":
        world.ctl("suspend", "j")
        world.ctl("resume", "j")


@pytest.mark.parametrize(("ranks", "gpus"), [(4, 4), (3, 1)])
def test_an_image_has_what_ranks_keep_between_two_steps(
    world: World, ranks: int, gpus: int
) -> None:
    """Each rank's wave is 6 MiB high, and they train together: images of random moments have none of it."""
    steps = 3 * STEPS
    own = {"0.1": "0.03", str(STEPS): str(steps)}
    waves = (*(own.get(word, word) for word in command(ranks)), "--waves", "1")
    expected = world.undisturbed(*waves, gpus=gpus)
    job = world.run(*waves, options=("--gpus", str(gpus)))
    run_freely(world, 20, steps)
    dice, took = random.Random(ranks), []
    while len(took) < 6 and max(world.steps()) < steps // 2:  # a busy machine has fewer
        time.sleep(dice.uniform(0, 0.1))
        image = world.ctl_json("checkpoint", "j")
        took.append((image["device_bytes"], world.ctl_json("status", "j")["last_cut"]))
    at_least = [size for size, how in took if "least device memory" in str(how)]
    assert len(at_least) >= max(1, len(took) - 1), took
    assert all(size < ranks << 20 for size in at_least), took  # type: ignore[operator]
    assert world.end_of(job) == 0, world.tail()
    check(world, expected, steps)


@pytest.mark.parametrize(("ranks", "gpus", "seed"), [(4, 4, 1), (3, 2, 2), (2, 1, 3)])
def test_verbs_at_random_moments(world: World, ranks: int, gpus: int, seed: int) -> None:
    dice = random.Random(seed)
    # Communicators that grow and are revoked, in two of the three.
    changing = (*command(ranks), "--changing", str(int(seed < 3)))
    expected = world.undisturbed(*changing, gpus=gpus)
    job = world.run(*changing, options=("--gpus", str(gpus)))
    for at in sorted(dice.sample(range(2, 80), 5)):
        run_freely(world, at)
        disturb(world, dice.choice(("checkpoint", "migrate", "suspend")), dice, gpus)
    assert world.end_of(job) == 0, world.tail()
    check(world, expected)


@pytest.mark.every
def test_restore_after_everything_was_killed(world: World) -> None:
    expected = world.undisturbed(*command(4), gpus=4)
    world.run(*command(4), options=("--gpus", "4"))
    run_freely(world, 20)
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


def check_shown(world: World) -> None:
    """Eight ranks on two GPUs, by number and in all."""
    servers = world.ctl_json("status", "j")["servers"]
    assert isinstance(servers, list)
    ranks = [client["rank"] for server in servers for client in server["clients"]]
    assert sorted(ranks) == list(range(8))
    header, line = world.ctl("ps").stdout.strip().splitlines()[-2:]
    at = header.index("RANKS")
    assert line[at:].split()[0] == "8", (header, line)
    for image in world.images():
        assert (image["gpus"], image["ranks"]) == ([2], [8])


def test_ranks_that_outnumber_the_gpus(world: World) -> None:
    expected = world.undisturbed(*command(8), gpus=2)
    job = world.run(*command(8), options=("--gpus", "2"))
    for at in (5, 20, 35):
        run_freely(world, at)
        disturb(world, "checkpoint", random.Random(0), 2)
    check_shown(world)
    assert world.end_of(job) == 0, world.tail()
    check(world, expected)


def training(way: str, ranks: int = 0) -> tuple[str, ...]:
    return ways.WAYS[way].command(ranks)


# An image of four torch processes is a gigabyte, which takes longer than all else here. Every wait has a bound of its own.
@pytest.mark.timeout(600)
@pytest.mark.sweep(1)
@pytest.mark.parametrize("way", ways.WAYS)
def test_training_on_several_ranks(world: World, way: str) -> None:
    """Moved or suspended, then kill -9 of everything and a restore."""
    dice = random.Random(way)
    expected = world.undisturbed(*training(way), gpus=4)
    world.run(*training(way), options=("--gpus", "4"))
    world.wait_step(dice.randrange(2, 30), timeout_s=120)
    world.until(ways.WAYS[way].steps - 1)
    disturb(world, dice.choice(("suspend", "migrate")), dice, 4)
    time.sleep(dice.random())
    disturb(world, "checkpoint", dice, 4)
    assert world.kill_everything()
    world.restore()
    world.wait_end("digest")
    assert len(world.nonces()) == 1, world.tail()
    assert world.digest() == expected


def way_of_last_cut(world: World) -> str:
    return str(world.ctl_json("status", "j")["last_cut"])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("barrier", ["meta", "agree"])
def test_ddp_comes_to_a_cut_in_either_way(world: World, barrier: str) -> None:
    """Moved, suspended, stored, then kill -9 of everything and a restore; and again in the restored job."""
    two = ("--gpus", "2")
    expected = world.undisturbed(*training("ddp", 2), gpus=2)
    world.run(*training("ddp", 2), options=(*two, "--barrier", barrier))
    run_freely(world, 5)
    took = "meta over communicator" if barrier == "meta" else "agreement: --barrier agree"
    for verb in ("migrate", "suspend", "checkpoint"):
        disturb(world, verb, random.Random(verb), 2)
        assert way_of_last_cut(world).startswith(took)
    assert world.kill_everything()
    world.restore()
    run_freely(world, max(world.steps()) + 3)
    world.ctl("checkpoint", "j")
    assert way_of_last_cut(world).startswith(took)
    world.wait_end("digest")
    assert len(world.nonces()) == 1, world.tail()
    assert world.digest() == expected


def test_auto_says_which_way_it_took(world: World) -> None:
    """In band for a data-parallel job at work; else by agreement."""
    world.run(*training("ddp", 2), options=("--gpus", "2"))
    run_freely(world, 5)
    done = world.ctl("checkpoint", "j", "--progress", "json")
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    said = [line["text"] for line in lines if line["stage"] == "barrier"]
    assert said[0].startswith("meta over communicator"), done.stderr
    # On a slow machine the ranks may not meet soon enough.
    assert len(said) == 1 or said[1].startswith("take-back: meta found no point: ")
    assert way_of_last_cut(world).startswith(said[-1])


def test_auto_takes_the_agreement_for_a_pipeline(world: World) -> None:
    world.run(*training("pipeline", 2), options=("--gpus", "2"))
    run_freely(world, 5)
    world.ctl("checkpoint", "j")
    took = way_of_last_cut(world)
    assert took.startswith(("agreement: ", "take-back: agreement found no point: "))


@pytest.mark.parametrize("barrier", ["auto", "meta"])
def test_idle_ranks(world: World, barrier: str) -> None:
    """All ranks stand at the gate. auto sees it and agrees; in band there is no point, and the job goes on."""
    expected = world.undisturbed(*command(2), "--together", "1", gpus=2)
    job = world.run(*command(2), "--together", "1", options=("--gpus", "2", "--barrier", barrier))
    world.until(6)
    world.wait(lambda: 6 in world.steps(), 90, "step 6")
    time.sleep(6)
    if barrier == "auto":
        world.ctl("checkpoint", "j")
        assert "is idle for" in way_of_last_cut(world)
    else:
        done = world.ctl("checkpoint", "j", check=False)
        assert done.returncode != 0
        assert "--barrier meta: 0 of 2 ranks have met" in done.stderr
        assert "the job continues" in done.stderr
    assert world.end_of(job) == 0, world.tail()
    check(world, expected)


@pytest.mark.parametrize(("ranks", "gpus"), [(4, 2), (3, 1)])
def test_a_step_of_the_job_counts_once(world: World, ranks: int, gpus: int) -> None:
    """--checkpoint-every 8steps: each rank counts the same step, and an image is due at each eighth. All ranks stand at the
    gate behind each look, so that the numbers are exact."""

    def images() -> int:
        return len(world.images()) if world.store.exists() else 0

    def allow(step: int) -> None:
        world.until(step)
        world.wait(lambda: max(world.steps(), default=0) >= step, 60, f"step {step}")
        world.wait(lambda: world.ctl_json("status", "j")["steps"] == step, 60, f"{step} counted")

    world.until(1)
    job = world.run(
        *command(ranks), *("--together", "1", "--counted", "1"),
        options=("--gpus", str(gpus), "--checkpoint-every", "8steps", "--keep", "9"),
    )  # fmt: skip
    for number, due in enumerate((8, 16)):
        for step in (due - 5, due - 1):
            allow(step)
            assert images() == number
        allow(due)
        world.wait(lambda number=number: images() == number + 1, 60, f"image {due}")  # type: ignore[misc]
    allow(20)
    assert images() == 2
    assert job.poll() is None, world.tail()


# Of torchrun's four processes an image is a gigabyte, as above.
@pytest.mark.timeout(600)
def test_a_suspend_is_longer_than_the_process_groups_timeout(world: World) -> None:
    """5 s, and the job sleeps for 12: in the middle of a step, where a rank waits for the other most of the time."""
    line = (*ways.WAYS["ddp"].command(2, 40, 0.4), "--timeout-s", "5")
    expected = world.undisturbed(*line, gpus=2)
    world.run(*line, options=("--gpus", "2", "--barrier", "takeback"))
    world.wait_step(5, timeout_s=120)
    world.until(39)
    world.ctl("suspend", "j")
    time.sleep(12)
    world.ctl("resume", "j")
    world.wait_end("digest")
    assert "timeout" not in world.text(), world.tail()
    assert len(world.nonces()) == 1, world.tail()
    assert world.digest() == expected


def test_a_rank_that_is_held_does_not_time_out(world: World) -> None:
    """A move may take longer than the 5 s of the process group, and the processes run meanwhile."""
    line = (*ways.WAYS["ddp"].command(2, 40, 0.05), "--timeout-s", "5")
    expected = world.undisturbed(*line, gpus=2)
    world.run(*line, options=("--gpus", "2"))
    world.wait_step(5, timeout_s=120)
    world.until(39)
    folder = str(next(world.shm.glob("**/job.json")).parent)
    channels = [ControlChannel(folder, gpu) for gpu in range(2)]
    for channel in channels:
        channel.hold()
    time.sleep(8)
    for channel in channels:
        channel.close()  # which lifts it
    world.wait_end("digest")
    assert "timeout" not in world.text(), world.tail()
    assert world.digest() == expected


def test_a_coordinator_that_goes_lifts_the_barrier(world: World) -> None:
    """All ranks stand; then the channels hang up."""
    expected = world.undisturbed(*command(2), "--together", "1", gpus=2)
    job = world.run(*command(2), "--together", "1", options=("--gpus", "2", "--barrier", "meta"))
    run_freely(world, 5)
    folder = str(next(world.shm.glob("**/job.json")).parent)
    channels = [ControlChannel(folder, gpu) for gpu in range(2)]
    members = [report for channel in channels for report in channel.ranks() if report["members"]]
    comm = barriers.over_all(members).comm
    assert comm is not None

    def acquired() -> int:
        return sum(int(channel.barrier(comm, 7)["acquired"]) for channel in channels)

    world.wait(lambda: acquired() == 2, 60, "all ranks to stand")
    with pytest.raises(ServerError, match="another agreement is under way"):
        ControlChannel(folder, 0).barrier(comm, 8)
    counts = [channel.ranks() for channel in channels]
    before = max(world.steps())
    time.sleep(1)
    assert max(world.steps()) <= before + 1
    assert [[r["counts"] for r in reports] for reports in counts] == [
        [r["counts"] for r in channel.ranks()] for channel in channels
    ]
    for channel in channels:
        channel.close()
    run_freely(world, before + 5)
    assert world.end_of(job) == 0, world.tail()
    check(world, expected)
