# SPDX-License-Identifier: Apache-2.0
"""What a user meets first: a job's store, its output and its end are remembered by its name."""

from __future__ import annotations

import json
import os
import signal
import sys

import psutil
import pytest

from tests.checkpoint.world import World

COUNT = """
import torch
from tests.subjects import gate
held = torch.zeros(4, device="cuda", requires_grad=True)
optimizer = torch.optim.AdamW([held])
for n in range(1, 151):
    held.sum().backward()
    optimizer.step()
    print("x step", n, flush=True)
    gate.before(n + 1, 150, 0.05)
print("digest", n, flush=True)
"""


def command_of(world: World) -> int:
    (found,) = [p for p in world.processes() if p.cmdline()[1:] == ["-c", COUNT]]
    return found.pid


@pytest.mark.every
def test_a_job_is_found_by_its_name(world: World) -> None:
    job = world.run(sys.executable, "-c", COUNT)
    world.wait_step(3)
    assert "x step 3\n" in world.ctl("logs", "j").stdout
    assert "x step 3\n" in str(world.ctl_json("logs", "j")["text"])
    said = world.ctl("checkpoint", "j").stdout
    assert said.count("\n") == 5
    assert "is running on GPU 0" in said
    assert (
        "job j is on GPU 0 already; nothing was done"
        in world.ctl("migrate", "j", "--to", "0").stdout
    )
    status = world.ctl_json("status", "j")
    assert (status["images"], status["last_error"]) == (1, "")
    world.near(120)
    world.wait(lambda: world.ctl_json("status", "j")["step_s"])
    assert int(str(world.ctl_json("status", "j")["steps"])) >= 3
    for process in (job.pid, command_of(world)):
        os.kill(process, signal.SIGSTOP)
        world.wait(lambda: psutil.Process(process).status() == psutil.STATUS_STOPPED)
        assert world.ctl_json("status", "j")["phase"] == "stopped"
        if process == job.pid:
            refused = world.ctl("checkpoint", "j", check=False)
            assert (refused.returncode, "kill -CONT" in refused.stderr) == (2, True)
        os.kill(process, signal.SIGCONT)
        world.wait(lambda: world.ctl_json("status", "j")["phase"] == "running")
    assert world.kill_everything()
    job.wait(20)
    told = world.ctl("status", "j").stdout
    assert "its supervisor was killed" in told
    assert f"file://{world.store}" in told
    listed = json.loads(world.ctl("images", "--json").stdout)["images"]
    assert [(one["job"], one["whole"], one["store"]) for one in listed] == [
        ("j", True, f"file://{world.store}")
    ]
    world.ctl("restore", "j")
    restored = world.ctl_json("status", "j")
    assert (restored["images"], restored["last_image"]) == (1, listed[0]["id"])
    world.hurry()
    world.wait(lambda: world.ctl_json("status", "j")["phase"] == "gone", 60)
    said = world.ctl("logs", "j").stdout
    assert (
        "\n".join(f"x step {n}" for n in range(1, 151)) + "\ndigest 150\n" in said
    )  # each line once
    status = json.loads(world.ctl("status", "j", "--json").stdout)
    assert (status["phase"], status["exit_code"], status["alive"]) == ("gone", 0, False)


def test_images_that_are_removed_do_not_count(world: World) -> None:
    world.run(sys.executable, "-c", COUNT)
    world.wait_step(3)
    ids = []
    for _ in range(3):
        world.ctl("checkpoint", "j")
        ids.append(str(world.ctl_json("status", "j")["last_image"]))
    world.ctl("images", "rm", ids[2], ids[0])
    status = world.ctl_json("status", "j")
    assert (status["images"], status["last_image"]) == (1, ids[1])
    (world.store / "images" / ids[1] / "manifest.json").unlink()  # nobody tells the job
    world.ctl("checkpoint", "j")
    status = world.ctl_json("status", "j")
    assert status["images"] == 1
    assert status["last_image"] not in ids
