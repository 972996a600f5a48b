# SPDX-License-Identifier: Apache-2.0
"""Module images travel and are kept once per server, whatever loads them."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_programs import BUILD, build_kernels

# Loads every image as often as it says, in two processes one after the other; prints the results.
LOADER = """
import ctypes, subprocess, sys
cu = ctypes.CDLL("libcuda.so.1")
ctx = ctypes.c_void_p()
assert cu.cuInit(0) == 0
assert cu.cuDevicePrimaryCtxRetain(ctypes.byref(ctx), 0) == 0 and cu.cuCtxSetCurrent(ctx) == 0
times, more, paths = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
mods = []
for path in paths * times:
    mods.append(ctypes.c_void_p())
    print(cu.cuModuleLoad(ctypes.byref(mods[-1]), path.encode()))
sys.stdout.flush()
if more:
    subprocess.run([sys.executable, __file__, str(times), "0", *paths], check=True)
"""


def fat(cubin: bytes, padding: int) -> bytes:
    """A fat binary with the cubin and, before it, an entry that no device takes, of that many random bytes."""

    def entry(kind: int, arch: int, body: bytes) -> bytes:
        body += bytes(-len(body) % 8)
        head = (kind, 0x101, 64, len(body), 0, 0, 0, arch, 0, 0, 0x11, 0, 0)
        return struct.pack("<HHIQIIIIIIQQQ", *head) + body

    body = entry(8, 90, os.urandom(padding)) + entry(2, 90, cubin)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def run(
    env: dict[str, str], device: str, script: Path, *words: str
) -> tuple[list[int], dict[str, Any]]:
    """(results of the loads, the server's statistics of images)"""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "devproxy.cli.run", "--device", device, "--gpu-memory"),
            *("256MiB", "--summary", "--json", "--", sys.executable, str(script), *words),
        ],
        capture_output=True, text=True, timeout=120, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    summary = next(json.loads(line) for line in done.stderr.splitlines() if line.startswith("{"))
    return [int(line) for line in done.stdout.split()], summary["gpus"][0]["images"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "loader.py"
    path.write_text(LOADER)
    return path


def test_soft_modules(job_env: dict[str, str], script: Path, tmp_path: Path) -> None:
    """Three loads by one process and three by its child, of one image: its bytes travel once."""
    kernels = build_kernels(BUILD / "kernels.so")
    results, images = run(job_env, "soft", script, "3", "1", str(kernels))
    assert results == [0] * 6
    assert images["received_bytes"] == kernels.stat().st_size
    assert (images["loads"], images["loads_known"]) == (6, 5)


def test_an_image_longer_than_the_staging_area(
    job_env: dict[str, str], script: Path, tmp_path: Path
) -> None:
    from tests.integration.test_record import image

    path = tmp_path / "big.fatbin"
    path.write_bytes(fat(image("cubin").read_bytes(), 47_000_000))
    results, images = run(job_env, "record", script, "2", "1", str(path))
    assert results == [0] * 4
    assert images["received_bytes"] == path.stat().st_size > 32 << 20
    assert (images["loads"], images["loads_known"]) == (4, 3)


def test_a_refused_image_is_not_kept(job_env: dict[str, str], script: Path, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("this is no image of any kind")
    results, images = run(job_env, "soft", script, "2", "0", str(path))
    assert results == [200, 200]
    assert (images["kept"], images["received_bytes"]) == (0, 2 * path.stat().st_size)
