# SPDX-License-Identifier: Apache-2.0
"""The proof that a job never held the device sees it when one does."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest

from devproxy import layout
from devproxy.proxy.proof import Proof

MAP_FIXED_NOREPLACE = 0x100000
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


@pytest.fixture(params=[0, mmap.PROT_READ])
def protection(request: pytest.FixtureRequest):
    address = layout.RANGE_BASE + 100 * layout.RANGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
    assert libc.mmap(address, 4096, request.param, flags, -1, 0) == address
    yield request.param
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(4096))


def test_device_ranges_must_be_closed(protection: int) -> None:
    proof = Proof([])
    proof.look([os.getpid()])
    assert proof.device_ranges == 1
    assert bool(proof.violations) == bool(protection)


def test_a_servers_memory_must_not_be_held() -> None:
    fd = os.memfd_create("devproxy-device")
    server = os.fork()
    if server == 0:
        import signal

        signal.pause()
    try:
        proof = Proof([server])
        proof.look([os.getpid()])
        assert any("holds a server's memory" in text for text in proof.violations)
        os.ftruncate(fd, 4096)
        mapping = mmap.mmap(fd, 4096)
        os.close(fd)
        proof = Proof([server])
        proof.look([os.getpid()])
        assert any("maps a server's memory" in text for text in proof.violations)
        mapping.close()
    finally:
        os.kill(server, 9)
        os.waitpid(server, 0)


def test_a_clean_process() -> None:
    proof = Proof([1 << 30])
    proof.look([os.getpid(), 1 << 30])
    assert proof.as_json() == {
        "looks": 1,
        "processes": 2,
        "device_ranges": 0,
        "device_nodes": 0,
        "held_device": False,
        "violations": [],
    }
