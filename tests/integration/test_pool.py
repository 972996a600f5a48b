# SPDX-License-Identifier: Apache-2.0
"""What a memory pool holds on to (cuda.h, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD): seen by the server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from devproxy.proxy import stats
from tests.conftest import RUN
from tests.integration.test_cut import (
    LIB,
    OneServer,
    folder,
    job,
    move,
    passed,
    servers,
    until_ready,
)

__all__ = ["folder", "servers"]  # fixtures

HELD_BYTES = 200 << 20  # of the 320 MiB that tests/subjects/driver/cut.c frees

# One command a line on stdin: turns, or a communicator of this process alone.
SCRIPT = """
import ctypes, sys
from ctypes import byref, c_int, c_uint64, c_void_p
cuda, nccl = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnccl.so.2")
def do(name, *args, of=cuda):
    code = getattr(of, name)(*args)
    assert code == 0, (name, code)
context, pool, all_of_it = c_void_p(), c_void_p(), c_uint64(2**64 - 1)
do("cuInit", 0)
do("cuDevicePrimaryCtxRetain", byref(context), 0)
do("cuCtxSetCurrent", context)
do("cuDeviceGetDefaultMemPool", byref(pool), 0)
do("cuMemPoolSetAttribute", pool, 4, byref(all_of_it))
def turns():
    for _ in range(1000):
        p = c_uint64()
        do("cuMemAllocAsync", byref(p), ctypes.c_size_t(4096), None)
        do("cuMemFreeAsync", p, None)
    free, total = c_uint64(), c_uint64()
    do("cuMemGetInfo_v2", byref(free), byref(total))  # an answer: the server has taken up all before it
def communicator():
    class Id(ctypes.Structure): _fields_ = [("bytes", ctypes.c_char * 128)]
    uid, comm = Id(), c_void_p()
    do("ncclGetUniqueId", byref(uid), of=nccl)
    nccl.ncclCommInitRank.argtypes = [c_void_p, c_int, Id, c_int]
    do("ncclCommInitRank", byref(comm), 1, uid, 0, of=nccl)
print("ready", flush=True)
for line in sys.stdin:
    globals()[line.strip()]()
    print("ready", flush=True)
print("PASS pool")
"""


def seen(server: OneServer) -> dict[str, Any]:
    return stats.query(str(server.folder), 0)


@pytest.fixture
def script(servers: list[OneServer]) -> Iterator[subprocess.Popen[str]]:
    env = os.environ | {
        "DEVPROXY_JOB_DIR": str(servers[0].folder),
        "DEVPROXY_GPUS": "1",
        "LD_LIBRARY_PATH": str(LIB),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], env=env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    until_ready(process)
    yield process
    process.kill()
    process.wait()


def tell(process: subprocess.Popen[str], what: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{what}\n")
    process.stdin.flush()
    until_ready(process)


def test_small_blocks_go_round_without_a_word(
    servers: list[OneServer], script: subprocess.Popen[str]
) -> None:
    """Until the process has a communicator: replica splicing wants to hear of each release."""
    tell(script, "turns")
    assert seen(servers[0])["totals"]["allocs"] < 100
    tell(script, "communicator")
    before = seen(servers[0])["totals"]
    tell(script, "turns")
    after = seen(servers[0])["totals"]
    assert after["allocs"] - before["allocs"] == 1000
    assert after["frees"] - before["frees"] == 1000
    passed(script)


def test_held_memory_is_the_jobs_until_it_moves(servers: list[OneServer]) -> None:
    """A fresh server takes for it only what is allocated, since its GPU may have less room."""
    process = job(servers[0].folder, "cut", "held")
    until_ready(process)
    assert seen(servers[0])["ledger"]["taken"] > HELD_BYTES
    move(servers, 1)
    assert seen(servers[-1])["ledger"]["taken"] < HELD_BYTES / 2
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    passed(process)


# What a stream gets that has freed 64 MiB behind a gate: sizes in MiB, and the places where they lie, from the first one.
PLACES = """
import ctypes, threading
from ctypes import byref, c_size_t, c_uint64, c_void_p
cuda = ctypes.CDLL("libcuda.so.1")
def do(name, *args):
    code = getattr(cuda, name)(*args)
    assert code == 0, (name, code)
context, stream, gate = c_void_p(), c_void_p(), threading.Event()
wait = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: gate.wait(60) and None)
do("cuInit", 0)
do("cuDevicePrimaryCtxRetain", byref(context), 0)
do("cuCtxSetCurrent", context)
do("cuStreamCreate", byref(stream), 0)
do("cuLaunchHostFunc", stream, wait, None)
def allocate(mib):
    p = c_uint64()
    do("cuMemAllocAsync", byref(p), c_size_t(mib << 20), stream)
    do("cuMemsetD8Async", p, 1, c_size_t(mib << 20), stream)
    return p
first = allocate(64)
places = []
do("cuMemFreeAsync", first, stream)
for mib in (48, 64, 32, 56, 40, 24):
    p = allocate(mib)
    places.append((p.value - first.value) >> 20)
    do("cuMemFreeAsync", p, stream)
gate.set()
do("cuStreamSynchronize", stream)
print(*places)
"""


def places(job_env: dict[str, str], gpus: str) -> list[int]:
    done = subprocess.run(
        [*RUN, "--device", "soft", "--gpu", gpus, "--", sys.executable, "-c", PLACES],
        env=job_env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_what_others_may_read_is_overwritten_late(job_env: dict[str, str]) -> None:
    """Ranks that share a GPU find results in memory that the other has freed. So a rank goes on to other addresses, up to
    twice of what it had at most and 32 MiB (device_state.cc, kSpreadParts)."""
    assert places(job_env, "0") == [0] * 6
    assert places(job_env, "0,0") == [64, 0, 112, 0, 0, 0]
