# SPDX-License-Identifier: Apache-2.0
"""A life of a job of which nothing is usual: names, arguments, environment and working folder that are no UTF-8, names as
long as a file system takes, a CPU and a timer slack of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.needs import require_criu

PYTHON = os.fsencode(sys.executable)
ODD = b"odd-\xff\xe9"
LONG = b"n" * 255
JOB = b"""
import ctypes, os, sys, time
assert (os.fsencode(sys.argv[1]), os.environb[b"ODD"], os.getcwdb()[-6:]) == (%(odd)r,) * 3
files = [open(name, "w") for name in (%(odd)r + b".txt", %(long)r, b"\\xe9" * 126)]
libc = ctypes.CDLL(None)
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
libc.prctl(29, 123456)  # PR_SET_TIMERSLACK, and 30 is PR_GET
assert libc.syscall(251, 1, 0, 3 << 13) == 0  # ioprio_set(IOPRIO_WHO_PROCESS, own, idle), and 252 is ioprio_get
open("/proc/self/coredump_filter", "w").write("0x7f")
scheduled = open("scheduled", "a")
for number in range(1, 1000):
    io, core = libc.syscall(252, 1, 0) >> 13, open("/proc/self/coredump_filter").read().strip()
    print(sorted(os.sched_getaffinity(0)), libc.prctl(30), io, core, file=scheduled, flush=True)
    for file in files:
        print(number, file=file, flush=True)
    print(number, flush=True)
    time.sleep(0.05)
""" % {b"odd": ODD, b"long": LONG}


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def last(path: bytes) -> int:
    """The last whole number in a file."""
    with open(path, "rb") as file:
        lines = file.read().split(b"\n")[:-1]
    return int(lines[-1]) if lines else 0


@pytest.mark.every
def test_the_life_of_an_odd_job(job_env: dict[str, str], tmp_path: Path) -> None:
    require_criu()
    env = {os.fsencode(k): os.fsencode(v) for k, v in job_env.items()}
    env |= {
        b"DEVPROXY_STATE_DIR": os.fsencode(tmp_path / "state"),
        b"DEVPROXY_KEY_FILE": os.fsencode(tmp_path / "key"),
        b"PYTHONIOENCODING": b"utf-8:strict",
        b"ODD": ODD,
    }
    folder = os.fsencode(tmp_path) + b"/" + ODD
    os.mkdir(folder)
    store, out = folder + b"/store", folder + b"/out"

    def ctl(*words: bytes) -> bytes:
        done = subprocess.run(
            [PYTHON, b"-m", b"devproxy.cli.ctl", *words],
            env=env, cwd=folder, capture_output=True, timeout=90,
        )  # fmt: skip
        assert done.returncode == 0, done
        return done.stdout

    run = [PYTHON, b"-m", b"devproxy.cli.run", b"--device", b"soft", b"--name", b"odd"]
    with open(out, "wb") as output:
        job = subprocess.Popen(
            [*run, b"--store", store, b"--", PYTHON, b"-c", JOB, ODD],
            env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        until(lambda: last(out) > 3, "the first numbers")
        assert ODD in ctl(b"status", b"odd")
        assert b"in store " + store in ctl(b"checkpoint", b"odd")
        job.kill()
        job.wait()
        until(lambda: b"odd  " not in ctl(b"ps"), "the end of the job")
        assert b"odd-" in ctl(b"images", b"--store", store)
        ctl(b"restore", b"odd", b"--store", store, b"--output", b"restored-" + ODD)
        restored = folder + b"/restored-" + ODD
        until(lambda: last(restored) > 10, "the restored job's numbers")
        ctl(b"kill", b"odd", b"--signal", b"KILL")
        until(lambda: b"odd  " not in ctl(b"ps"), "the end of the restored job")
        for name in (ODD + b".txt", LONG, b"\xe9" * 126):
            with open(folder + b"/" + name, "rb") as file:
                numbers = [int(text) for text in file.read().split()]
            assert numbers == list(range(1, len(numbers) + 1))
            assert len(numbers) >= last(restored)
        with open(folder + b"/scheduled") as file:
            wanted = f"[{max(os.sched_getaffinity(0))}] 123456 3 0000007f"
            assert set(file.read().splitlines()) == {wanted}
    finally:
        job.kill()
        job.wait()
        subprocess.run(
            [PYTHON, b"-m", b"devproxy.cli.ctl", b"kill", b"odd", b"--signal", b"KILL"],
            env=env, cwd=folder, capture_output=True, timeout=60,
        )  # fmt: skip
