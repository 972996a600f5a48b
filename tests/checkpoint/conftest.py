# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the end-to-end tests of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.world import World
from tests.integration.needs import require_criu
from tests.native.test_hal_cuda import FAKE, compiled


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    made.hold()
    yield made
    made.close()


@pytest.fixture
def fake_driver(tmp_path: Path) -> dict[str, str]:
    """The environment for `--device cuda` over the fake driver of tests/native/hal_cuda."""
    require_criu()
    fake = compiled("fake_libcuda.so", [FAKE], "-shared")
    root = tmp_path / "root"  # where devproxy sees an NVIDIA device, and the fake as its driver
    for path in (root / "dev" / "nvidia0", root / str(fake).lstrip("/")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return {"DEVPROXY_SYSROOT": str(root), "DEVPROXY_CUDA_DRIVER": str(fake)}
