# SPDX-License-Identifier: Apache-2.0
"""A Jupyter kernel behind devproxy-run: it lives while whoever started it lives, and no longer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import RUN

# What ipykernel does (kernelapp.py init_poller, parentpoller.py), for one that asks at once.
KERNEL = """
import os, sys, threading, time

parent = int(os.environ.get("JPY_PARENT_PID") or 0)

def poll(parent):
    if os.getppid() != parent:
        parent = 0
    while True:
        if os.getppid() != parent if parent else os.getppid() == 1:
            print("Parent appears to have exited, shutting down.", flush=True)
            os._exit(1)
        time.sleep(0.1)

if parent and parent != 1:
    threading.Thread(target=poll, args=(parent,), daemon=True).start()
print("kernel", flush=True)
time.sleep(float(sys.argv[1]))
print("served", flush=True)
"""
# Jupyter: starts a kernel, and ends without a word to it.
LEAVES = """
import os, subprocess, sys
os.environ["JPY_PARENT_PID"] = str(os.getpid())
kernel = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, start_new_session=True)
kernel.stdout.readline()
print(kernel.pid, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("options", [[], ["--plain"]])
def test_a_kernel_lives_while_its_starter_does(run_job, options: list[str]) -> None:
    env = {"JPY_PARENT_PID": str(os.getpid())}
    done = run_job(sys.executable, "-c", KERNEL, "1", options=options, env=env)
    assert (done.returncode, done.stdout) == (0, "kernel\nserved\n"), done.stderr


@pytest.mark.parametrize("options", [[], ["--plain"]])
def test_a_kernel_ends_with_its_starter(job_env: dict[str, str], options: list[str]) -> None:
    kernel = [*RUN, "--device", "soft", *options, "--", sys.executable, "-c", KERNEL, "1000"]
    done = subprocess.run(
        [sys.executable, "-c", LEAVES, *kernel], env=job_env, capture_output=True, text=True, timeout=60
    )  # fmt: skip
    supervisor = int(done.stdout)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{supervisor}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    listed = subprocess.run(
        [sys.executable, "-m", "devproxy.cli.ctl", "ps", "--json"], env=job_env, capture_output=True
    )
    assert json.loads(listed.stdout)["jobs"] == []


def test_other_jobs_do_not_look_at_their_parent(run_job) -> None:
    """A job that was started from inside a kernel's shell, and outlives it."""
    done = run_job("sh", "-c", "echo $JPY_PARENT_PID; sleep 1.5", env={"JPY_PARENT_PID": "1"})
    assert (done.returncode, done.stdout) == (0, "1\n")
