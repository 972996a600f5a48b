"""Tests that repeat one thing over many cases: `make test` runs some of the cases, other ones after each commit.

    @pytest.mark.sweep(2)
    @pytest.mark.parametrize("how", [killed, suspended, moved, twice])

DEVPROXY_TEST_SWEEPS=all runs every case (the campaign `sweeps` of `make soak` does), and so does a test that is named or
asked for by -k; another value is the seed in place of the commit.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

VARIABLE = "DEVPROXY_TEST_SWEEPS"


def seed() -> str:
    named = os.environ.get(VARIABLE)
    if named:
        return named
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() or "no commit"


def chosen(test: str, cases: int, wanted: int, of: str) -> set[int]:
    """Which of a test's cases run, by their places."""
    return set(random.Random(f"{of} {test}").sample(range(cases), min(wanted, cases)))


def thin_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes out of `items` what does not run this time."""
    of = seed()
    named = any("::" in str(word) for word in config.args) or config.getoption("keyword")
    if of == "all" or named:
        return
    sweeps: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep"):
            sweeps[item.nodeid.split("[")[0]].append(item)
    left_out: list[pytest.Item] = []
    for test, cases in sweeps.items():
        marker = cases[0].get_closest_marker("sweep")
        assert marker is not None
        keep = chosen(test, len(cases), marker.args[0], of)
        left_out += [item for place, item in enumerate(cases) if place not in keep]
    if left_out:
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=left_out)
