# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the end-to-end tests of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.world import World
from tests.integration.needs import require_criu
from tests.native.test_hal_cuda import fake_gpus


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
    return fake_gpus(tmp_path / "root")
