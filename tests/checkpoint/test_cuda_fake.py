"""hal/cuda behind the proxy, over the fake driver of tests/hal_cuda: a job's whole life with `--device cuda`.

It shows that nothing between the command line and the driver's calls knows only the software GPU. It shows nothing about
a real driver.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.world import SUBJECTS, World
from tests.integration.needs import require_criu
from tests.unit.test_hal_cuda import FAKE, compiled

CHEAP = (sys.executable, str(SUBJECTS / "cheap.py"), "--steps", "60", "--seconds-per-step", "0.02")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    require_criu()
    fake = compiled("fake_libcuda.so", [FAKE], "-shared")
    root = tmp_path / "root"  # where devproxy sees an NVIDIA device, and the fake as its driver
    for path in (root / "dev" / "nvidia0", root / str(fake).lstrip("/")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    made = World(DEVPROXY_SYSROOT=str(root), DEVPROXY_CUDA_DRIVER=str(fake))
    yield made
    made.close()


def test_checkpoint_kill_restore(world: World) -> None:
    world.run(*CHEAP, name="soft", log="soft.log").wait(60)
    assert world.digest("soft.log")
    world.run(*CHEAP, options=("--device", "cuda"))
    world.wait_step(10)
    assert "--device cuda is experimental" in world.text()
    world.ctl("checkpoint", "j")
    world.wait_step(20)
    assert world.kill_everything()
    world.ctl("restore", "j", "--store", str(world.store), "--output", "log", "--wait")
    world.wait_end()
    assert world.digest() == world.digest("soft.log")
    assert len(world.nonces()) == 1
    assert set(world.steps()) == set(range(1, 61))
