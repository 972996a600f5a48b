# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the fault tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fault.scene import Scene


@pytest.fixture(scope="module")
def shared_scene() -> Iterator[Scene]:
    """One job for many cases: each leaves it as it found it, or the next one starts it anew."""
    made = Scene()
    yield made
    made.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()
