# SPDX-License-Identifier: Apache-2.0
"""A job of two hosts on hal/cuda, over the fake driver and the fake NCCL: cut together, moved, brought back (test_hosts.py).

Each host has GPUs of its own. It shows nothing about NCCL itself.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.hosts import Hosts
from tests.checkpoint.test_hosts import elsewhere, on_one_host
from tests.checkpoint.world import SUBJECTS
from tests.integration.needs import require_criu
from tests.native.test_hal_cuda import fake_gpus

STEPS = 1200  # far more than the verbs take: at the gate before the last step no cut is possible
RANKS = (sys.executable, str(SUBJECTS / "ranks.py"), "--steps", str(STEPS), "--ranks", "4", "--seconds-per-step", "0.1")  # fmt: skip
TORCH_STEPS = 400
MASTER = "10.213.0.1"  # what the processes of node 0 have for an address, wherever it runs
ON_CUDA = ("--device", "cuda", "--gpu-memory", "512MiB", "--gpus", "2")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    require_criu()
    made = Hosts(**fake_gpus(tmp_path / "root", 4), DEVPROXY_CUDA_EXECUTOR="host")
    made.env["FAKE_NCCL_MANY"] = "1"  # of several ranks in one server
    made.env["DEVPROXY_LOG"] = "warn,device=info"
    made.hold()
    yield made
    made.close()


def run_freely(hosts: Hosts, at: int, steps: int = STEPS) -> None:
    """Returns at that step. From then on no rank stands at the gate."""
    hosts.wait_step(at, "log0", timeout_s=120)
    hosts.until(steps - 1)


def finish(hosts: Hosts, expected: list[str]) -> None:
    for log in ("log0", "log1"):
        hosts.wait_end("digest", log)
        assert hosts.digest(log) == expected
    assert len(hosts.nonces("log0")) == 1


@pytest.mark.every
def test_moved_resized_and_exchanged(hosts: Hosts) -> None:
    """The main path. NCCL's communicators are made anew behind each move, over both hosts; the bits are one host's."""
    expected = on_one_host(hosts, RANKS)
    hosts.start(*RANKS, options=ON_CUDA)
    run_freely(hosts, 3)
    hosts.on(0, "checkpoint", "j")
    for verb, *words in (
        ("migrate", "--to", "2,3,1,0"),
        ("resize", "--gpus", "0,0,1,1"),
        ("resize", "--gpus", "3,3,0,2"),
        ("suspend",),
        ("migrate", "--to", "0,1,2,3"),
    ):
        hosts.on(0, verb, "j", *words)
        if verb == "suspend":
            hosts.on(0, "resume", "j")
        run_freely(hosts, max(hosts.steps("log0")) + 3)
    hosts.on(0, "checkpoint", "j")
    assert hosts.kill_everything()
    hosts.came_back(hosts.bring_back((1, 0)))
    run_freely(hosts, max(hosts.steps("log0")) + 3)
    hosts.on(1, "migrate", "j", "--to", "3,2,0,1")  # where node 0 is now
    finish(hosts, expected)


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("point", ["migrate_start", "migrate_hand_over"])
def test_a_move_that_fails_on_one_node(hosts: Hosts, node: int, point: str) -> None:
    """Its new servers have taken the members' rows perhaps; the old ones go on, on both nodes. The end of a communicator
    waits for the members of both."""
    hosts.env["FAKE_NCCL_LEAVE_MS"] = "20000"
    expected = on_one_host(hosts, RANKS)
    hosts.start(*RANKS, options=ON_CUDA)
    run_freely(hosts, 3)
    hosts.arm(node, point)
    failed = hosts.on(0, "migrate", "j", "--to", "2,3,1,0", check=False)
    assert failed.returncode == 1 and f"injected at {point}" in failed.stderr, failed.stderr
    assert hosts.job_status(0)["gpus"] == [0, 1, 0, 1]
    hosts.arm(node, "")
    run_freely(hosts, max(hosts.steps("log0")) + 3)
    hosts.on(0, "migrate", "j", "--to", "1,0,3,2")
    run_freely(hosts, max(hosts.steps("log0")) + 3)
    finish(hosts, expected)


@pytest.mark.timeout(600)
@pytest.mark.sweep(1)
@pytest.mark.parametrize("way", ["ddp", "fsdp2", "pipeline", "tensor"])
def test_training_on_two_hosts(hosts: Hosts, way: str) -> None:
    """PyTorch under torchrun, two ranks on each host: the software GPU's numbers."""
    script = (str(SUBJECTS / "parallel.py"), "--way", way, "--steps", str(TORCH_STEPS), "--seconds-per-step", "0.2")  # fmt: skip
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node")
    expected = on_one_host(hosts, (*torchrun, "4", *script))
    nodes = f"--nnodes 2 --node-rank $DEVPROXY_NODE --master-addr {MASTER}"
    words = ["sh", "-c", f"exec {' '.join(torchrun)} 2 {nodes} {' '.join(script)}"]
    hosts.start(*words, options=ON_CUDA)
    run_freely(hosts, 3, TORCH_STEPS)
    for verb, *to in (
        ("migrate", "--to", "2,3,1,0"),
        ("resize", "--gpus", "0,0,1,1"),
        ("checkpoint",),
    ):
        hosts.on(0, verb, "j", *to)
        run_freely(hosts, max(hosts.steps("log0")) + 2, TORCH_STEPS)
    assert hosts.kill_everything()
    hosts.came_back(hosts.bring_back((1, 0)))
    hosts.wait_end("digest", "log0")
    assert hosts.digest("log0") == expected


def test_two_nodes_on_one_gpu(hosts: Hosts) -> None:
    """NCCL takes one rank for each GPU, and ranks of two nodes are never in one server: refused, with nothing started."""
    words = "are the same one"
    refused = hosts.start(*RANKS, options=(*ON_CUDA[:-2], "--gpu", "0,1"), nodes=(0, 0), log="both")
    assert [job.wait(60) for job in refused] == [2, 2]
    assert "GPU 0 of node 0" in hosts.text("both0") and words in hosts.text("both0")
    assert "nothing was started" in hosts.text("both0")
    expected = on_one_host(hosts, RANKS)
    hosts.start(*RANKS, options=ON_CUDA)
    run_freely(hosts, 3)
    hosts.on(0, "checkpoint", "j")
    assert hosts.kill_everything()
    tried = hosts.bring_back((0, 0), "--gpu", "2,3")
    said = [one.communicate(timeout=120)[0] for one in tried]
    assert words in said[0] and all(one.returncode != 0 for one in tried), said
    hosts.came_back(hosts.bring_back((0, 1)))
    finish(hosts, expected)


@pytest.mark.parametrize("seed", [1, 2])
def test_verbs_at_random_moments(hosts: Hosts, seed: int) -> None:
    dice = random.Random(seed)
    expected = on_one_host(hosts, RANKS)
    hosts.start(*RANKS, options=ON_CUDA)
    for at in sorted(dice.sample(range(2, 60), 4)):
        run_freely(hosts, at)
        verb = dice.choice(("checkpoint", "suspend", "migrate", "resize"))
        hosts.on(0, verb, "j", *elsewhere(verb, dice))
        if verb == "suspend":
            hosts.on(0, "resume", "j")
    hosts.on(0, "checkpoint", "j")
    assert hosts.kill_everything()
    hosts.came_back(hosts.bring_back((0, 1)))
    finish(hosts, expected)
