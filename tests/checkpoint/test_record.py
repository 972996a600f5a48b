# SPDX-License-Identifier: Apache-2.0
"""A job on the recording GPU through checkpoint, death and restore: its modules come back from the replay log."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.checkpoint.world import World
from tests.integration.needs import require_criu, require_nvcc
from tests.integration.test_record import calls, image


@pytest.fixture
def world() -> Iterator[World]:
    require_nvcc()
    require_criu()
    made = World()
    yield made
    made.close()


def test_checkpoint_kill_restore(world: World) -> None:
    """calls.c compares its words at each step, and at the end a module's variable that it had changed before."""
    env = {"TEST_KERNELS": str(image("cubin")), "DEVPROXY_RECORD": str(world.home / "record")}
    go = world.home / "go"
    world.run(str(calls()), "loop", str(go), "50", options=("--device", "record"), **env)

    def wait_step(number: int) -> None:
        world.wait(lambda: f"calls step {number}\n" in world.text(), what=f"step {number}")

    wait_step(10)
    world.ctl("checkpoint", "j")
    cut = world.text().count("calls step")
    wait_step(cut + 10)
    assert world.kill_everything()
    before = [json.loads(line) for line in (world.home / "record").read_text().splitlines()]
    assert [line["op"] for line in before if line["op"] in ("start", "load_module")] == [
        *("start", "load_module"),
    ]
    assert (
        sum(line["op"] == "launch" for line in before) >= 10
    )  # the last ones died with the server
    world.ctl("restore", "j", "--store", str(world.store), "--output", "log")
    wait_step(cut + 10)
    go.touch()
    world.wait_end("digest done")
    steps = [int(line.split()[-1]) for line in world.text().splitlines() if "calls step" in line]
    assert steps == list(range(len(steps)))
