# SPDX-License-Identifier: Apache-2.0
"""What all tests share: where things are, and how to run a job under devproxy-run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import own_state, sweeps

ROOT = Path(__file__).resolve().parent.parent
LIB = Path(os.environ.get("DEVPROXY_LIB") or ROOT / "build" / "lib")
RUN = [sys.executable, "-m", "devproxy.cli.run"]

own_state.take_own()

# A shell without job control starts what it puts into the background with SIGINT ignored, and so would every job here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sweeps.thin_out(config, items)


@pytest.fixture(scope="session")
def lib_dir() -> Path:
    """Folder of the built libraries. A missing build fails the test: it does not pass by skipping."""
    for name in ("devproxy-server", "libcuda.so.1"):
        if not (LIB / name).exists():
            pytest.fail(f"{LIB / name} is not built: run make build", pytrace=False)
    return LIB


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A folder of its own in place of /dev/shm, so that what is left behind can be seen exactly."""
    folder = Path(tempfile.mkdtemp(prefix="devproxy-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def job_env(shm_dir: Path, lib_dir: Path) -> dict[str, str]:
    """The environment for devproxy-run with the real server."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("DEVPROXY_")}
    env |= {"DEVPROXY_SHM_DIR": str(shm_dir), "DEVPROXY_STATE_DIR": own_state.folder()}
    env["DEVPROXY_LIB"] = str(lib_dir)
    env["DEVPROXY_DAEMON_IDLE_S"] = "0.3"  # else it stays ten seconds after each test's job
    env["PYTHONPATH"] = str(ROOT)
    return env


@pytest.fixture
def run_job(job_env: dict[str, str]):
    """run_job("python", "x.py", options=["--gpus", "2"]) -> CompletedProcess with text output."""

    def run(
        *command: str,
        options: list[str] | None = None,
        env: dict[str, str] | None = None,
        timeout: float = 120,
        **keywords: object,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*RUN, "--device", "soft", *(options or []), "--", *command],
            env=job_env | (env or {}),
            capture_output=True,
            text=True,
            timeout=timeout,
            **keywords,
        )

    return run
