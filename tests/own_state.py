# SPDX-License-Identifier: Apache-2.0
"""One state folder for a whole run of the tests: what their jobs leave does not go to the user's own.

One, since each state folder gets a copy of devproxy's own files (state.py, builds/), which takes longer than a small job.
pytest's workers are children of who calls take_own() first, and use the same folder. A test that looks at what a job leaves
there makes one of its own.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

OF_THE_RUN = "DEVPROXY_TEST_STATE"
STATE_DIR = "DEVPROXY_STATE_DIR"


def folder() -> str:
    """The state folder of this run, made at first use and removed when the process that has made it ends."""
    if not (path := os.environ.get(OF_THE_RUN)):
        path = os.environ[OF_THE_RUN] = tempfile.mkdtemp(prefix="devproxy-test-state-")
        atexit.register(_remove, path, os.getpid())
    return path


def _remove(path: str, maker: int) -> None:
    if os.getpid() == maker:  # not in a fork of it
        shutil.rmtree(path, ignore_errors=True)


def take_own() -> None:
    """Whatever this process starts has that state folder."""
    if (
        "DEVPROXY_JOB_ID" not in os.environ
    ):  # the tests of torch are a job: who started it gave it a folder
        os.environ[STATE_DIR] = folder()
