# SPDX-License-Identifier: Apache-2.0
"""Jobs of many ranks on hal/cuda, over the fake driver and the fake NCCL of tests/native/hal_cuda: their lives.

NCCL's communicators end with a server. They are made again where it is replaced, and the job sees nothing of it. It shows
nothing about NCCL itself.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.world import SUBJECTS, World
from tests.integration.needs import require_criu
from tests.native.test_hal_cuda import fake_gpus

GPUS = 6
STEPS = 1000  # far more than the verbs take: at the gate before the last step no cut is possible
TORCH_STEPS = 250
RANKS = (sys.executable, str(SUBJECTS / "ranks.py"), "--steps", str(STEPS), "--seconds-per-step", "0.1")  # fmt: skip
ON_CUDA = ("--device", "cuda", "--gpu-memory", "512MiB", "--gpus")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    require_criu()
    made = World(**fake_gpus(tmp_path / "root", GPUS), DEVPROXY_CUDA_EXECUTOR="host")
    made.env["FAKE_NCCL_MANY"] = "1"  # of several ranks in one server
    made.env["DEVPROXY_LOG"] = "warn,device=info"
    made.hold()
    yield made
    made.close()


def command(ranks: int) -> tuple[str, ...]:
    return (*RANKS, "--ranks", str(ranks))


def run_freely(world: World, at: int, steps: int = STEPS) -> None:
    """Returns at that step. From then on no rank stands at the gate."""
    world.wait_step(at, timeout_s=120)
    world.until(steps - 1)


def generations(world: World) -> set[int]:
    """Which NCCL communicators the servers that are there have had, by their logs."""
    said = server_logs(world)
    return {
        int(n) for n in re.findall(r"communicator \w+: rank \d+ of \d+, generation (\d+)", said)
    }


def server_logs(world: World) -> str:
    """Of the servers that are there."""
    return "".join(log.read_text() for log in world.shm.glob("devproxy-*/j/gpu*.log"))


@pytest.mark.every
@pytest.mark.parametrize("stagger_ms", ["", "150"])
def test_moved_suspended_and_killed(world: World, stagger_ms: str) -> None:
    """One life with all of it. A move to other GPUs replaces the servers under the job; NCCL's communicators are of another
    generation then. One of the new servers is on a GPU of the old ones, so for a while two ranks are there. stagger_ms: the
    servers come one behind the other, and the end of a communicator waits for all of them."""
    if stagger_ms:
        world.env |= {"FAKE_STAGGER_MS": stagger_ms, "FAKE_NCCL_LEAVE_MS": "3000"}
    expected = world.undisturbed(*command(3), gpus=3)
    job = world.run(*command(3), options=(*ON_CUDA, "3"))
    run_freely(world, 5)
    assert generations(world) == {1}
    world.ctl("checkpoint", "j")
    assert generations(world) == {1}
    world.ctl("migrate", "j", "--to", "3,4,1")
    run_freely(world, max(world.steps()) + 3)
    assert max(generations(world)) > 1
    boards = "devproxy-*/j/nccl-*"
    assert list(world.shm.glob(boards))
    world.ctl("suspend", "j")
    assert not list(world.shm.glob(boards)), "the members' servers are gone"
    world.ctl("resume", "j")
    run_freely(world, max(world.steps()) + 3)
    world.ctl("checkpoint", "j")
    assert world.kill_everything()
    world.restore("--gpu", "5,0,2")
    world.wait_end("digest")
    assert world.digest() == expected
    assert len(world.nonces()) == 1, world.tail()
    assert job.poll() is not None


@pytest.mark.every
def test_a_move_that_fails(world: World) -> None:
    """The new servers have taken the members' rows when they go. The old ones take them again, and make NCCL's communicators
    anew."""
    expected = world.undisturbed(*command(3), gpus=3)
    fault = world.home / "fault"
    world.env["DEVPROXY_FAULT"] = f"@{fault}"
    job = world.run(*command(3), options=(*ON_CUDA, "3"))
    run_freely(world, 5)
    fault.write_text("migrate_hand_over:error")
    failed = world.ctl("migrate", "j", "--to", "3,4,1", check=False)
    assert failed.returncode == 1 and "hand_over" in failed.stderr, failed.stderr
    run_freely(world, max(world.steps()) + 3)
    assert max(generations(world)) > 1
    world.ctl("migrate", "j", "--to", "3,4,1")
    run_freely(world, max(world.steps()) + 3)
    assert world.end_of(job) == 0, world.tail()
    assert world.steps() == list(range(1, STEPS + 1)), world.tail()
    assert world.digest() == expected


def test_resized(world: World) -> None:
    """Four ranks on one GPU, on three, on two and on four, under the job; and an image of them comes back on two."""
    expected = world.undisturbed(*command(4), gpus=4)
    job = world.run(*command(4), options=(*ON_CUDA, "4"))
    run_freely(world, 5)
    for to in ("1,1,1,1", "0,1,1,2", "3,0,3,0", "0,1,2,3", "4,4,4,5"):
        world.ctl("resize", "j", "--gpus", to)
        run_freely(world, max(world.steps()) + 3)
    assert "by its server" in server_logs(world)
    world.ctl("checkpoint", "j")
    assert world.kill_everything()
    world.restore("--gpu", "5,2,5,2")
    run_freely(world, max(world.steps()) + 3)
    world.ctl("resize", "j", "--gpus", "3,3,3,3")
    world.wait_end("digest")
    assert world.digest() == expected
    assert len(world.nonces()) == 1, world.tail()
    assert job.poll() is not None


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("ranks", "barrier"), [(2, "agree"), (4, "meta"), (4, "auto")])
def test_verbs_at_random_moments(world: World, ranks: int, barrier: str) -> None:
    dice = random.Random(f"{ranks} {barrier}")
    expected = world.undisturbed(*command(ranks), gpus=ranks)
    job = world.run(*command(ranks), options=(*ON_CUDA, str(ranks), "--barrier", barrier))
    for at in sorted(dice.sample(range(2, 50), 4)):
        run_freely(world, at)
        match dice.choice(("checkpoint", "migrate", "suspend")):
            case "checkpoint":
                world.ctl("checkpoint", "j")
            case "migrate":
                to = dice.sample(range(GPUS), ranks)
                world.ctl("migrate", "j", "--to", ",".join(map(str, to)))
            case _:
                world.ctl("suspend", "j")
                world.ctl("resume", "j")
    assert world.end_of(job) == 0, world.tail()
    assert world.steps() == list(range(1, STEPS + 1)), world.tail()
    assert world.digest() == expected


@pytest.mark.timeout(600)
@pytest.mark.sweep(1)
@pytest.mark.parametrize("way", ["ddp", "fsdp2", "pipeline", "tensor", "graphs"])
def test_training_on_two_ranks(world: World, way: str) -> None:
    """PyTorch's operators by the executor for the host, its collectives by NCCL's stand-in: the software GPU's numbers."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")  # fmt: skip
    words = (*torchrun, str(SUBJECTS / "parallel.py"), "--way", way, "--steps", str(TORCH_STEPS))
    paced = (*words, "--seconds-per-step", "0.2")
    expected = world.undisturbed(*paced, gpus=2)
    world.run(*paced, options=(*ON_CUDA, "2"))
    run_freely(world, 3, TORCH_STEPS)
    world.ctl("migrate", "j", "--to", "4,1")
    run_freely(world, max(world.steps()) + 2, TORCH_STEPS)
    world.ctl("resize", "j", "--gpus", "2,2")
    run_freely(world, max(world.steps()) + 2, TORCH_STEPS)
    world.ctl("resize", "j", "--gpus", "1,2")
    run_freely(world, max(world.steps()) + 2, TORCH_STEPS)
    world.ctl("resize", "j", "--gpus", "0,0")
    run_freely(world, max(world.steps()) + 2, TORCH_STEPS)
    world.ctl("checkpoint", "j")
    assert world.kill_everything()
    world.restore()
    world.wait_end("digest")
    assert world.digest() == expected
    assert len(world.nonces()) == 1, world.tail()
