"""What PyTorch's executor in the server keeps for a job besides device memory: generators and settings, through images.

On a CUDA device generators live in the executor. DEVPROXY_TORCH_GENERATORS=kept has them there on the software GPU too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.checkpoint.world import SUBJECTS, World, without_pauses
from tests.integration.needs import require_criu


@pytest.fixture
def world() -> Iterator[World]:
    require_criu()
    made = World(DEVPROXY_TORCH_GENERATORS="kept")
    made.hold()
    yield made
    made.close()


COMMAND = (
    sys.executable,
    str(SUBJECTS / "rng.py"),
    *("--steps", "40", "--seconds-per-step", "0.1"),
)


def test_generators_of_the_executor_go_on_after_a_restore_and_a_migration(world: World) -> None:
    alone = world.env | {"TEST_GATE": ""}
    world.run(*without_pauses(COMMAND), name="alone", log="alone.log", **alone).wait(120)
    assert world.digest("alone.log")
    world.run(*COMMAND, options=("--device", "soft"))
    world.wait_step(10)
    world.ctl("migrate", "j", "--to", "0")
    world.wait_step(15)
    world.ctl("checkpoint", "j")
    world.wait_step(25)
    assert world.kill_everything()
    world.ctl("restore", "j", "--store", str(world.store), "--output", "log", "--wait")
    world.wait_end()
    assert world.digest() == world.digest("alone.log")
    assert set(world.steps()) == set(range(1, 41))
