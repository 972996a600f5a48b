"""What a user meets first: a job's store, its output and its end are remembered by its name."""

from __future__ import annotations

import json
import sys

import pytest

from tests.checkpoint.world import World

COUNT = """
import torch
from tests.subjects import gate
held = torch.zeros(4, device="cuda")
for n in range(1, 151):
    held += 1
    print("x step", n, flush=True)
    gate.before(n + 1, 150, 0.05)
print("digest", float(held.sum()), flush=True)
"""


@pytest.mark.every
def test_a_job_is_found_by_its_name(world: World) -> None:
    job = world.run(sys.executable, "-c", COUNT)
    world.wait_step(3)
    assert "x step 3\n" in world.ctl("logs", "j").stdout
    said = world.ctl("checkpoint", "j").stdout
    assert said.count("\n") == 5
    assert "is running on GPU 0" in said
    assert world.kill_everything()
    job.wait(20)
    told = world.ctl("status", "j").stdout
    assert "its supervisor was killed" in told
    assert f"file://{world.store}" in told
    listed = json.loads(world.ctl("images", "--json").stdout)["images"]
    assert [(one["job"], one["whole"], one["store"]) for one in listed] == [
        ("j", True, f"file://{world.store}")
    ]
    world.ctl("restore", "j", "--wait")
    assert world.ctl("logs", "j").stdout.endswith("digest 600.0\n")
    status = json.loads(world.ctl("status", "j", "--json").stdout)
    assert (status["phase"], status["exit_code"], status["alive"]) == ("gone", 0, False)
