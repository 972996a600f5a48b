# SPDX-License-Identifier: Apache-2.0
"""A resize over two hosts that fails, or is killed, on one of them: both trees are where they were, or both where they were
to go."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator

import pytest

from tests.checkpoint.hosts import Hosts
from tests.checkpoint.world import SUBJECTS, World, without_pauses
from tests.fault.host_kills import kind, processes
from tests.fault.test_resize_points import NEW, OLD, STEPS, as_told, placement
from tests.integration.needs import require_criu

# Where, how, and who is left: the job at OLD, or nobody. agree is node 0's alone. Of OLD and NEW the first two GPUs are node 0's.
CASES = [
    ("agree", "error", OLD),
    ("server_cut_parked", "error", OLD),
    ("server_dump_mid", "error", OLD),
    ("server_dump_mid", "kill", None),
    ("migrate_start", "error", OLD),
    ("migrate_start", "kill", None),
    ("server_restore_mid", "kill", OLD),
    ("server_restore_end", "error", OLD),
    ("migrate_hand_over", "error", OLD),
    ("migrate_hand_over", "kill", None),
    ("server_resume", "kill", None),
]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    require_criu()
    made = Hosts()
    made.hold()
    yield made
    made.close()


def command() -> tuple[str, ...]:
    line = (sys.executable, str(SUBJECTS / "ranks.py"), "--steps", str(STEPS), "--ranks", "4")
    return (*line, "--seconds-per-step", "0.1")


@functools.cache
def undisturbed() -> list[str]:
    world = World()
    try:
        words = without_pauses(command())
        return world.undisturbed(*words, "--seconds-per-step", "0", gpus=4)
    finally:
        world.close()


def check_placed(hosts: Hosts, gpus: list[int]) -> None:
    """What the job says, and the servers of each host."""
    assert hosts.job_status(0)["gpus"] == gpus
    for node in (0, 1):
        servers = [p for p in processes(hosts, node) if kind(p) == "server"]
        assert placement(servers) == as_told(gpus[2 * node : 2 * node + 2]), f"node {node}"


def resize(hosts: Hosts, gpus: list[int], check: bool = True) -> str:
    """What it said where it failed, else nothing."""
    done = hosts.on(0, "resize", "j", "--gpus", ",".join(map(str, gpus)), check=check)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr if done.returncode else ""


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("point", "action", "left", "node"),
    [(*case, node) for case in CASES for node in ((0,) if case[0] == "agree" else (0, 1))],
)
def test_killed_or_failed_on_one_of_two_hosts(
    hosts: Hosts, point: str, action: str, left: list[int] | None, node: int
) -> None:
    expected = undisturbed()
    hosts.start(*command(), options=("--gpus", "2"))
    hosts.wait_step(3, "log0")
    hosts.until(STEPS - 1)
    resize(hosts, OLD)
    hosts.on(0, "checkpoint", "j")
    hosts.arm(node, f"{point}:{action}")
    said = resize(hosts, NEW, check=False)
    assert not (hosts.home / f"fault{node}").exists(), f"nobody came by: {said}"
    assert said
    if left is None:
        # Ranks whose NCCL waits for one that has gone wait for ever without a watchdog: the user ends the job.
        hosts.kill_everything()
        hosts.came_back(hosts.bring_back((1, 0), "--gpu", "5,5"))
        assert hosts.job_status(1)["gpus"] == [5] * 4
    else:
        assert "the job continues" in said, said
        check_placed(hosts, left)
        resize(hosts, NEW)
        check_placed(hosts, NEW)
    hosts.until("end")
    hosts.wait_end("digest", "log0")
    hosts.wait_end("digest", "log1")
    assert hosts.digest("log0") == hosts.digest("log1") == expected
    assert len(hosts.nonces("log0")) == 1
