# SPDX-License-Identifier: Apache-2.0
"""What `make test` leaves out, for it must end within 20 minutes: each run takes a sample, another one after each commit.

    @pytest.mark.sweep(2)    # 2 of the cases
    @pytest.mark.parametrize("how", [killed, suspended, moved, twice])

Of each file below SAMPLED's names a run takes that share of the tests, and of the cases that a sweep has left, perhaps none:
whole lives of jobs cost seconds to minutes each. The first name that fits counts. `@pytest.mark.every` runs each time: the main path.

DEVPROXY_TEST_SWEEPS=all runs everything (the campaign `sweeps` of `make soak` does), and so does a test that is named or
asked for by -k; another value is the seed in place of the commit. Without the variable, a file that is named runs whole too.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

VARIABLE = "DEVPROXY_TEST_SWEEPS"
ROOT = Path(__file__).resolve().parent.parent
SAMPLED = {
    "tests/checkpoint": 0.1,
    "tests/fault": 0.12,
    "tests/comm": 0.2,
    "tests/integration/test_cudart.py": 0.25,
    "tests/integration/test_cudart_programs.py": 0.25,
    "tests/integration/test_fuzz.py": 0.33,  # tests/prebuild.py makes only the server that it needs
    "tests/integration/test_gpu_check.py": 0.25,
    "tests/integration/test_model.py": 0.25,
    "tests/integration/test_process_group.py": 0.3,
    "tests/integration": 0.4,
    "tests/native/test_reduce_ptx.py": 0.3,
    "tests/torch/test_compile.py": 0.5,
    "tests/torch/test_guards.py": 0.5,
    "tests/torch/test_models.py": 0.6,
    "tests/torch/test_opdb.py": 0.5,
    "tests/torch/test_plugin.py": 0.6,
    "tests/torch/test_profiler.py": 0.5,
}


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


def some(number: float, what: str, of: str) -> int:
    """A whole number, up or down by chance, so that small files do not run more often than large ones."""
    return math.floor(number + random.Random(f"{of} share of {what}").random())


def share(of: Path, sampled: dict[str, float]) -> float | None:
    """What SAMPLED says of a test's file, relative to the checkout."""
    return next((part for name, part in sampled.items() if of.is_relative_to(name)), None)


def sampled_groups(
    items: list[pytest.Item], root: Path, sampled: dict[str, float]
) -> dict[str, tuple[float, list[pytest.Item]]]:
    """The tests of each file below SAMPLED's names that do not run each time; they get the mark `sampled`."""
    groups: dict[str, tuple[float, list[pytest.Item]]] = {}
    for item in items:
        path = item.path.relative_to(root) if item.path.is_relative_to(root) else item.path
        part = share(path, sampled)
        if part is None or any(item.get_closest_marker(name) for name in ("every", "soak", "gpu")):
            continue
        item.add_marker("sampled")
        groups.setdefault(str(path), (part, []))[1].append(item)
    return groups


def thin_out(
    config: pytest.Config,
    items: list[pytest.Item],
    root: Path = ROOT,
    sampled: dict[str, float] = SAMPLED,
) -> None:
    """Takes out of `items` what does not run this time."""
    of = seed()
    groups = sampled_groups(items, root, sampled)
    whole = ("::",) if os.environ.get(VARIABLE) else ("::", ".py")
    named = any(sign in str(word) for word in config.args for sign in whole)
    named = named or bool(config.getoption("keyword"))
    if of == "all" or named:
        return
    sweeps: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep"):
            sweeps[item.nodeid.split("[")[0]].append(item)
    gone: set[pytest.Item] = set()
    for test, cases in sweeps.items():
        marker = cases[0].get_closest_marker("sweep")
        assert marker is not None
        keep = chosen(test, len(cases), marker.args[0], of)
        gone |= {item for place, item in enumerate(cases) if place not in keep}
    for name, (part, tests) in groups.items():
        tests = [item for item in tests if item not in gone]
        keep = chosen(name, len(tests), some(part * len(tests), name, of), of)
        gone |= {item for place, item in enumerate(tests) if place not in keep}
    if gone:
        left_out = [item for item in items if item in gone]
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=left_out)
