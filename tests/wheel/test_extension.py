# SPDX-License-Identifier: Apache-2.0
"""A user's C++ extension and the plugin agree on devices and streams: torch's own CUDA library over devproxy's runtime, the
driver's functions by the fake driver, ops by the executor on the host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.native.test_hal_cuda import fake_gpus

CASES = Path(__file__).with_name("extension_cases.py")
PYTHON = os.environ["DEVPROXY_WHEEL_PYTHON"]


def test_an_extension_and_the_plugin_agree(job_env: dict[str, str], tmp_path: Path) -> None:
    env = job_env | fake_gpus(tmp_path, 2) | {"DEVPROXY_CUDA_EXECUTOR": "host"}
    line = [sys.executable, "-m", "devproxy.cli.run", "--device", "cuda", "--gpus", "2", "--"]
    line += [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(
        line, env=env, capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    cases = CASES.read_text().count("\ndef test_")
    assert f"{cases} passed" in done.stdout and "skipped" not in done.stdout, done.stdout
