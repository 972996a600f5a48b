# SPDX-License-Identifier: Apache-2.0
"""Traits of memory."""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import struct
from pathlib import Path

from tests.subjects.odd.shared import (
    HOME,
    PAGE,
    Child,
    Look,
    Wrong,
    call,
    flow,
    here,
    libc,
    mapped,
    peek,
    poke,
    same,
    smaps,
    trait,
)


@trait()
def shared_memory(dice: random.Random) -> Look:
    """Anonymous memory that a child has too, and writes into; memory that both had, and that is now each one's own."""
    shared, own = mapped(16 * PAGE, 0x21), mapped(16 * PAGE, 0x22)
    poke(own, flow(0, 16 * PAGE))

    def work(word: str) -> object:
        if word != "-":
            poke(shared + int(word) % 16 * PAGE, word.encode())
            poke(own + 99, b"not yours")
        return peek(own + 99, 9)

    child = Child(work)
    while True:
        step = yield None
        same("the child's own", child.ask(str(step)), b"not yours")
        same("shared", peek(shared + step % 16 * PAGE, len(str(step))), str(step).encode())
        same("own", peek(own, 16 * PAGE), flow(0, 16 * PAGE))


@trait()
def memfd(dice: random.Random) -> Look:
    """Memory files: sealed, mapped in two ways, and one whose descriptors are closed."""
    sealed = os.memfd_create("odd \n(deleted)", os.MFD_ALLOW_SEALING)
    os.write(sealed, flow(0, 9000))
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    plain = os.memfd_create("plain")
    os.ftruncate(plain, 8 * PAGE)
    shared, private = mapped(8 * PAGE, 1, plain), mapped(8 * PAGE, 2, plain)
    poke(private, b"mine")
    gone = os.memfd_create("gone")
    os.ftruncate(gone, PAGE)
    alone = mapped(PAGE, 1, gone)
    os.close(gone)
    poke(alone, b"alone")
    while True:
        step = yield os.readlink(f"/proc/self/fd/{sealed}")
        same("seals", fcntl.fcntl(sealed, fcntl.F_GET_SEALS), 6)
        same("sealed bytes", os.pread(sealed, 9999, 0), flow(0, 9000))
        same("alone", peek(alone, 5), b"alone")
        poke(shared + 8, b"%08d" % step)
        same("through the descriptor", os.pread(plain, 8, 8), b"%08d" % step)
        same("private", peek(private, 4), b"mine")
        try:
            os.ftruncate(sealed, 1)
            raise Wrong("a sealed file shrinks")
        except PermissionError:
            pass


@trait()
def file_maps(dice: random.Random) -> Look:
    """Maps of a file: private with changes, shared, beyond the end, and of a part."""
    path = here("mapped")
    with open(path, "wb") as file:
        file.write(flow(0, 5 * PAGE + 100))
    fd = os.open(path, os.O_RDWR)
    private, shared = mapped(8 * PAGE, 2, fd), mapped(8 * PAGE, 1, fd)
    part = mapped(PAGE, 2, fd, protection=1, offset=3 * PAGE)
    poke(private + PAGE, b"changed")
    os.close(fd)
    while True:
        step = yield None
        same("changed", peek(private + PAGE, 7), b"changed")
        same("unchanged", peek(private + 2 * PAGE, 99), flow(2 * PAGE, 99))
        same("part", peek(part, PAGE), flow(3 * PAGE, PAGE))
        poke(shared + 4 * PAGE, b"%08d" % step)
        with open(path, "rb") as file:
            file.seek(4 * PAGE)
            same("in the file", file.read(8), b"%08d" % step)


@trait()
def deleted_maps(dice: random.Random) -> Look:
    """Shared and private maps of a file that is deleted."""
    path = here("soon-gone")
    with open(path, "wb") as file:
        file.write(flow(0, 4 * PAGE))
    fd = os.open(path, os.O_RDWR)
    shared, private = mapped(4 * PAGE, 1, fd), mapped(4 * PAGE, 2, fd)
    os.close(fd)
    os.unlink(path)
    poke(shared, b"0" * 8)
    poke(private + PAGE, b"mine")
    while True:
        step = yield None
        same("shared", peek(shared, 8), b"%08d" % (step - 1))
        same("seen in the private one", peek(private, 8), b"%08d" % (step - 1))
        same("mine", peek(private + PAGE, 4), b"mine")
        same("the rest", peek(shared + 2 * PAGE, PAGE), flow(2 * PAGE, PAGE))
        poke(shared, b"%08d" % step)


@trait()
def moved_memory(dice: random.Random) -> Look:
    """Memory that was moved, grown, with holes, and without any rights."""
    at = mapped(32 * PAGE, 0x22)
    poke(at, flow(0, 32 * PAGE))
    size = ctypes.c_size_t
    at = call("mremap", size(at), size(32 * PAGE), size(512 * PAGE), 1)
    call("munmap", size(at + 8 * PAGE), size(4 * PAGE))
    call("mprotect", size(at + 16 * PAGE), size(PAGE), 0)
    call("mprotect", size(at + 20 * PAGE), size(PAGE), 1)
    down = mapped(4 * PAGE, 0x122)  # MAP_GROWSDOWN
    poke(down, b"down")
    reserved = mapped(1 << 32, 0x4022)  # MAP_NORESERVE
    poke(reserved + (3 << 30), b"far")
    spots = [at, at + 16 * PAGE, at + 20 * PAGE, at + 100 * PAGE, down, reserved]
    wanted = [smaps(spot) for spot in spots]
    while True:
        yield None
        same("modes", [smaps(spot) for spot in spots], wanted)
        same("beginning", peek(at, 8 * PAGE), flow(0, 8 * PAGE))
        same("read only", peek(at + 20 * PAGE, PAGE), flow(20 * PAGE, PAGE))
        same("new", peek(at + 300 * PAGE, 9), bytes(9))
        same("far", (peek(reserved + (3 << 30), 3), peek(down, 4)), (b"far", b"down"))


@trait()
def memory_advice(dice: random.Random) -> Look:
    """Memory with each advice that the kernel keeps, and locked memory."""
    kept = (
        10,
        12,
        14,
        15,
        16,
        18,
    )  # DONTFORK, MERGEABLE, HUGEPAGE, NOHUGEPAGE, DONTDUMP, WIPEONFORK
    spots = []
    for advice in kept:
        # Two pages without rights keep it apart from its neighbours.
        at = mapped(600 * PAGE, 0x22, protection=0) + PAGE
        call("mprotect", ctypes.c_size_t(at), ctypes.c_size_t(590 * PAGE), 3)
        poke(at, flow(advice, PAGE))
        if libc.madvise(ctypes.c_size_t(at), ctypes.c_size_t(590 * PAGE), advice) == 0:
            spots.append((advice, at))
    locked = mapped(3 * PAGE, 0x22)
    call("mlock", ctypes.c_size_t(locked), ctypes.c_size_t(PAGE))
    wanted = [smaps(at) for _, at in spots] + [smaps(locked)]
    while True:
        yield None
        found = [smaps(at) for _, at in spots] + [smaps(locked)]
        for (advice, at), one, before in zip([*spots, (0, locked)], found, wanted):
            same(f"mode and flags after advice {advice}", one, before)
        for advice, at in spots:
            same("bytes", peek(at, PAGE), flow(advice, PAGE))


@trait()
def code(dice: random.Random) -> Look:
    """Machine code that the job made itself, and registers that nothing else uses."""
    text = bytes.fromhex("8d4701c3")  # lea eax, [rdi + 1]; ret
    at = mapped(PAGE, 0x22)
    poke(at, text)
    call("mprotect", ctypes.c_size_t(at), ctypes.c_size_t(PAGE), 5)
    plus_one = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(at)
    libm = ctypes.CDLL("libm.so.6")
    libm.fesetround(0x400)
    while True:
        step = yield None
        same("made code", plus_one(step), step + 1)
        same("rounding", libm.fegetround(), 0x400)


@trait()
def named_memory(dice: random.Random) -> Look:
    """POSIX shared memory with a name, and a named semaphore."""
    from multiprocessing import resource_tracker
    from multiprocessing import shared_memory as shm

    tracked, resource_tracker.register = resource_tracker.register, lambda *_: None
    name = "odd-" + HOME[-12:].decode("ascii", "replace").replace("/", "-")
    block = shm.SharedMemory(name, create=True, size=5000)
    resource_tracker.register = tracked
    gone = libc.shm_open(f"/{name}-gone".encode(), os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(gone, PAGE)
    at = mapped(PAGE, 1, gone)
    libc.shm_unlink(f"/{name}-gone".encode())
    libc.sem_open.restype = ctypes.c_void_p
    semaphore = libc.sem_open(f"/{name}-sem".encode(), os.O_CREAT, 0o600, 3)
    value = ctypes.c_int()
    assert block.buf is not None
    block.buf[:4] = struct.pack("I", 0)
    try:
        while True:
            step = yield None
            same("by name", struct.unpack("I", Path(f"/dev/shm/{name}").read_bytes()[:4])[0], step - 1)  # fmt: skip
            block.buf[:4] = struct.pack("I", step)
            same("deleted", (peek(at, 4), os.pread(gone, 4, 0)), (struct.pack("I", step - 1),) * 2)
            poke(at, struct.pack("I", step))
            libc.sem_getvalue(ctypes.c_void_p(semaphore), ctypes.byref(value))
            same("semaphore", value.value, 3)
    finally:
        libc.shm_unlink(f"/{name}".encode())
        libc.sem_unlink(f"/{name}-sem".encode())
