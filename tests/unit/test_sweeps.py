# SPDX-License-Identifier: Apache-2.0
"""tests/sweeps.py: what a run leaves out, another one runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import sweeps

ROOT = Path(__file__).resolve().parents[2]
TEST = """
import pytest

@pytest.mark.sweep(2)
@pytest.mark.parametrize("n", range(7))
def test_many(n): pass

@pytest.mark.parametrize("n", range(3))
def test_few(n): pass
"""
CONFTEST = """
import pathlib
from tests import sweeps

def pytest_configure(config):
    for name in ("sweep(n)", "every", "sampled"):
        config.addinivalue_line("markers", name + ": of a run")

def pytest_collection_modifyitems(config, items):
    sweeps.thin_out(config, items, MORE)
"""


def ran(folder: Path, seed: str, *words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", *words],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), sweeps.VARIABLE: seed},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_a_run_takes_some_cases_and_says_how_many_it_leaves(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    (tmp_path / "conftest.py").write_text(CONFTEST.replace(", MORE", ""))
    first = ran(tmp_path, "1")
    assert len(first) == 2 + 3 and sum("test_many" in line for line in first) == 2
    assert ran(tmp_path, "1") == first
    assert len(ran(tmp_path, "all")) == 7 + 3
    assert len(ran(tmp_path, "1", "test_it.py::test_many")) == 7
    assert len(ran(tmp_path, "1", "-k", "many")) == 7
    assert len(ran(tmp_path, "1", "test_it.py")) == 2 + 3
    assert len(ran(tmp_path, "", "test_it.py")) == 7 + 3


SAMPLED = """
import pytest

@pytest.mark.parametrize("n", range(9))
def test_life(n): pass

@pytest.mark.every
def test_main_path(): pass

@pytest.mark.sweep(1)
@pytest.mark.parametrize("n", range(4))
def test_swept(n): pass
"""


def test_a_run_takes_a_share_of_slow_folders(tmp_path: Path) -> None:
    (tmp_path / "lives").mkdir()
    (tmp_path / "lives" / "test_it.py").write_text(SAMPLED)
    (tmp_path / "test_fast.py").write_text(TEST.replace("sweep(2)", "sweep(7)"))
    more = f"pathlib.Path({str(tmp_path)!r}), {{'lives': 0.4}}"
    (tmp_path / "conftest.py").write_text(CONFTEST.replace("MORE", more))
    runs = [ran(tmp_path, str(seed)) for seed in range(16)]
    for one in runs:
        assert sum("test_life" in line or "test_swept" in line for line in one) == 4  # 0.4 of 9 + 1
        assert sum("test_main_path" in line for line in one) == 1
        assert sum("test_swept" in line for line in one) <= 1
        assert sum("test_fast" in line for line in one) == 10
    lives = [{line for line in one if "test_life" in line} for one in runs]
    assert len(set.union(*lives)) == 9
    assert any("test_swept" in line for one in runs for line in one)
    assert len(ran(tmp_path, "all")) == 9 + 1 + 4 + 10
    assert len(ran(tmp_path, "all", "-m", "sampled")) == 9 + 4


def test_every_case_has_its_turn() -> None:
    taken = [sweeps.chosen("test", 7, 2, str(seed)) for seed in range(60)]
    assert all(len(one) == 2 for one in taken)
    assert set.union(*taken) == set(range(7))
    assert sweeps.chosen("test", 3, 8, "x") == {0, 1, 2}


def test_a_share_that_is_no_whole_number_is_rounded_by_chance() -> None:
    taken = [sweeps.some(0.25, "test", str(seed)) for seed in range(400)]
    assert set(taken) == {0, 1}
    assert 60 < sum(taken) < 140
    assert {sweeps.some(3.0, "test", str(seed)) for seed in range(40)} == {3}
