# SPDX-License-Identifier: Apache-2.0
"""The tests in this folder run under devproxy-run, in a Python with torch: each takes 'cuda' for what it is."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

try:
    import torch
except ImportError:
    collect_ignore_glob = [
        "test_*.py"
    ]  # these need a Python with torch, which is not always this one


@pytest.fixture(autouse=True)
def _one_compute_thread() -> Iterator[None]:
    """CPU numbers depend on the thread count; both sides use one unless a test says otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: run under devproxy-run --gpus 2")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a device the tests of this folder cannot run; those of the plugin's shape can."""
    here = os.path.dirname(os.path.abspath(__file__))
    mine = [item for item in items if os.path.dirname(str(item.path)) == here]
    missing = pytest.mark.skip(reason="no cuda device: run under devproxy-run")
    available = bool(mine) and torch.cuda.is_available()
    for item in mine:
        item.add_marker("torch")
        if "opdb" in item.name or "test_opdb" in item.nodeid:
            item.add_marker("slow")
        if not available and "needs_no_device" not in item.keywords:
            item.add_marker(missing)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs_no_device: runs in a plain process")
