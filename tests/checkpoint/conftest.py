"""Fixtures of the end-to-end tests of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpoint.world import World


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()
