# SPDX-License-Identifier: Apache-2.0
"""A resize that fails or is killed in each of its stages: the job is where it was, or where it was to go, never half."""

from __future__ import annotations

import sys

import psutil
import pytest

from tests.checkpoint.world import SUBJECTS
from tests.fault.scene import Scene

OLD, NEW = [0, 0, 1, 2], [3, 4, 3, 3]
STEPS = 300
# Where, how, and who is left: the job at OLD, at NEW, or nobody.
CASES = [
    ("agree", "error", OLD),
    ("server_cut_parked", "error", OLD),
    ("server_dump_mid", "error", OLD),
    ("server_dump_mid", "kill", None),
    ("migrate_start", "error", OLD),
    ("migrate_start", "kill", None),
    ("server_restore_start", "error", OLD),
    ("server_restore_mid", "kill", OLD),
    ("server_restore_end", "error", OLD),
    ("server_restore_end", "kill", OLD),
    ("migrate_hand_over", "error", OLD),
    ("migrate_hand_over", "kill", None),
    ("server_resume", "kill", None),
]


def command() -> tuple[str, ...]:
    line = (sys.executable, str(SUBJECTS / "ranks.py"), "--steps", str(STEPS), "--ranks", "4")
    return (*line, "--seconds-per-step", "0.1")


def placement(servers: list[psutil.Process]) -> dict[str, list[int]]:
    """Which of the job's GPUs each machine's GPU serves."""
    found: dict[str, list[int]] = {}
    for process in servers:
        words = process.cmdline()
        there = words[words.index("--physical-gpu") + 1]
        assert there not in found, "two servers on one GPU"
        found[there] = [
            int(w) for before, w in zip(words, words[1:], strict=False) if before == "--gpu"
        ]
    return found


def as_told(gpus: list[int]) -> dict[str, list[int]]:
    return {str(there): [k for k, g in enumerate(gpus) if g == there] for there in gpus}


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("point", "action", "left"), CASES)
def test_killed_or_failed_in_the_middle(
    scene: Scene, point: str, action: str, left: list[int] | None
) -> None:
    expected = scene.undisturbed(*command(), gpus=4)
    scene.job = scene.run(*command(), options=("--gpus", "4"))
    scene.wait_step(5)
    scene.until(STEPS - 1)
    scene.ctl("resize", "j", "--gpus", ",".join(map(str, OLD)))
    scene.ctl("checkpoint", "j")
    scene.arm(f"{point}:{action}")
    done = scene.ctl("resize", "j", "--gpus", ",".join(map(str, NEW)), check=False)
    fired = scene.fired()
    scene.disarm()
    assert fired, done
    assert done.returncode != 0, done
    if left is None:
        # Ranks whose NCCL waits for one that has gone wait for ever without a watchdog: the user ends the job.
        scene.kill_everything()
        scene.restore("--gpu", "5,5,5,5")
        left = [5] * 4
    else:
        assert "the job continues" in done.stderr, done.stderr
    assert scene.ctl_json("status", "j")["gpus"] == left
    assert placement(scene.named("devproxy-server")) == as_told(left)
    scene.ctl("resize", "j", "--gpus", ",".join(map(str, NEW)))
    assert placement(scene.named("devproxy-server")) == as_told(NEW)
    scene.hurry()
    scene.wait_end("digest")
    assert scene.digest() == expected
