# SPDX-License-Identifier: Apache-2.0
"""A store in the test's own folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from devproxy import fault
from devproxy.checkpoint.store import Store


@pytest.fixture
def own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs with a key of the test's own, and no fault is armed."""
    monkeypatch.setenv("DEVPROXY_KEY_FILE", str(tmp_path / "key" / "image.key"))
    fault.arm("")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(own_key: None, root: Path) -> Store:
    return Store.open(str(root))
