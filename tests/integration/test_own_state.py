# SPDX-License-Identifier: Apache-2.0
"""What the jobs of the tests leave is in the run's own state folder (tests/own_state.py), and none of it in the user's."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import own_state
from tests.integration.test_programs import run
from tests.living import matching

USERS = Path(f"/var/tmp/devproxy-{os.getuid()}")


def traces(folder: Path, name: str) -> list[str]:
    """Of a job of that name: the user's other jobs may come and go meanwhile."""
    return sorted(str(path.relative_to(folder)) for path in matching(folder, f"*/{name}*"))


@pytest.mark.parametrize("way", ["fixture", "programs"])
def test_a_job_of_the_tests_leaves_the_users_state_alone(
    way: str, run_job: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Tests start jobs with an environment of their own (job_env), or with pytest's."""
    name = f"untouched-{uuid.uuid4().hex[:12]}"
    options, command = ["--name", name], ["echo", "said"]
    done = run_job(*command, options=options) if way == "fixture" else run(options, command)
    assert done.returncode == 0, done.stderr
    assert traces(USERS, name) == []
    assert f"records/{name}.json" in traces(Path(own_state.folder()), name)
