# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's executor in the server keeps for a job besides device memory: generators and settings, through images.

On a CUDA device generators live in the executor. DEVPROXY_TORCH_GENERATORS=kept has them there on the software GPU too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.checkpoint.world import SUBJECTS, World
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
    undisturbed = world.undisturbed(*COMMAND)
    world.run(*COMMAND, options=("--device", "soft"))
    world.wait_step(10)
    world.ctl("migrate", "j", "--to", "0", "--anew")
    world.checkpoint_then_die(15, after=25)
    world.restore("--wait")
    world.wait_end()
    assert world.digest() == undisturbed
    assert set(world.steps()) == set(range(1, 41))
