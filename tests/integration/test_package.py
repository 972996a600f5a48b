# SPDX-License-Identifier: Apache-2.0
"""A wheel, installed outside the checkout, runs a job. `make test-wheel` tries more Pythons, an isolated build and torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_a_job_runs_from_the_installed_wheel_and_uninstall_leaves_nothing() -> None:
    line = [sys.executable, str(ROOT / "scripts/test_wheel.py"), "--quick"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1048576 bytes of 7" in done.stdout
