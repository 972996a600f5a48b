# SPDX-License-Identifier: Apache-2.0
"""Traits of what a process may do."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import struct
from pathlib import Path

from tests.subjects.odd.shared import (
    PAGE,
    Child,
    Look,
    call,
    end,
    fork,
    here,
    libc,
    mapped,
    poke,
    same,
    status,
    trait,
)


def seccomp_filter(number: int) -> None:
    """Makes one system call fail with EDOM (0: none). PR_SET_SECCOMP, SECCOMP_MODE_FILTER."""
    program = struct.pack("HBBI", 0x20, 0, 0, 0)
    if number:
        program += struct.pack("HBBI", 0x15, 0, 1, number)
        program += struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | errno.EDOM)
    program += struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)
    held = ctypes.create_string_buffer(program, len(program))
    call("prctl", 22, 2, struct.pack("H6xQ", len(program) // 8, ctypes.addressof(held)), 0, 0)


@trait(late=True)
def seccomp(dice: random.Random) -> Look:
    """No new privileges, and filters on top of each other."""
    call("prctl", 38, 1, 0, 0, 0)
    for number in (139, 134, 136):  # sysfs, uselib, ustat
        seccomp_filter(number)
    while True:
        yield None
        same("no new privileges", libc.prctl(39, 0, 0, 0, 0), 1)
        same("filters", status(os.getpid(), "Seccomp_filters"), "3")
        for number in (139, 134, 136):
            same("filtered call", (libc.syscall(number, 0), ctypes.get_errno()), (-1, errno.EDOM))
        fork_and_wait = fork(lambda: 0)
        same("a child", os.waitpid(fork_and_wait, 0)[1], 0)


@trait()
def strict_child(dice: random.Random) -> Look:
    """A child that may only read, write and exit."""
    r, w = os.pipe()
    back_r, back_w = os.pipe()
    # A loop of read and write in machine code: after PR_SET_SECCOMP nothing of Python's may run.
    text = bytes.fromhex(
        "4989f4" "4989fd"  # mov r12, rsi; mov r13, rdi
        "4889d5"  # mov rbp, rdx
        "31c0" "4489ef" "4889ee" "ba01000000" "0f05"  # read(r13, rbp, 1)
        "b801000000" "4489e7" "4889ee" "ba01000000" "0f05"  # write(r12, rbp, 1)
        "ebdd"
    )  # fmt: skip
    at = mapped(PAGE, 0x22, protection=7)
    poke(at, text)

    def work() -> None:
        loop = ctypes.CFUNCTYPE(None, ctypes.c_long, ctypes.c_long, ctypes.c_long)(at)
        buffer = mapped(PAGE, 0x22)
        os.write(back_w, b"!")
        libc.prctl(22, 1, 0, 0, 0)
        loop(r, back_w, buffer)

    pid = fork(work)
    same("it starts", os.read(back_r, 1), b"!")
    while True:
        step = yield None
        os.write(w, bytes([step % 256]))
        same("it answers", os.read(back_r, 1), bytes([step % 256]))
        same("its mode", status(pid, "Seccomp"), "1")


@trait(root=True)
def capabilities(dice: random.Random) -> Look:
    """Children with few or no capabilities, with a smaller bounding set, with ambient ones and with secure bits."""
    keys = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Uid", "Gid", "Groups")

    def caps(effective: int, permitted: int, inheritable: int) -> None:
        parts = [part for half in (0, 32) for part in ((effective >> half) & 0xFFFFFFFF, (permitted >> half) & 0xFFFFFFFF, (inheritable >> half) & 0xFFFFFFFF)]  # fmt: skip
        call("syscall", 126, struct.pack("II", 0x20080522, 0), struct.pack("6I", *parts))

    def bounded() -> None:
        for number in (25, 22, 16):  # SYS_TIME, SYS_BOOT, SYS_MODULE
            call("prctl", 24, number, 0, 0, 0)
        call("prctl", 28, 1 << 6, 0, 0, 0)  # PR_SET_SECUREBITS: no ambient raise
        caps(0xFF, 0x3FFF, 0x3)

    def ambient() -> None:
        caps(0xFF, 0xFF, 0xFF)
        call("prctl", 47, 2, 3, 0, 0)  # PR_CAP_AMBIENT_RAISE

    def look(word: str) -> object:
        return [status(os.getpid(), key) for key in keys], libc.prctl(27, 0, 0, 0, 0)

    children = [Child(look, first) for first in (bounded, ambient, lambda: caps(0, 0, 0))]
    wanted = [child.ask() for child in children]
    while True:
        yield None
        same("capabilities", [child.ask() for child in children], wanted)


@trait(may="it runs as uid", root=True)
def other_user(dice: random.Random) -> Look:
    """A child of another user, with groups, that keeps its own folder."""
    os.mkdir(here("other"), 0o777)

    def first() -> None:
        os.setgroups([5, 6, 77])
        os.setresgid(1234, 1235, 1236)
        os.setresuid(65534, 65534, 65534)

    child = Child(lambda word: (os.getresuid(), os.getresgid(), os.getgroups()), first)
    wanted = child.ask()
    try:
        while True:
            yield None
            same("user and groups", child.ask(), wanted)
    finally:
        end(child.pid)


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int) -> None:
    call("mount", source, target, kind, ctypes.c_ulong(flags), None)


def _mounts(in_a_root: bool) -> Look:
    top = "m-root" if in_a_root else "m"
    for name in ("", "/tmp", "/bind", "/root", "/from"):
        os.mkdir(here(top + name))
    for name in ("from/file", "root/file"):
        with open(here(f"{top}/{name}"), "wb") as file:
            file.write(name.encode())
    held: list[int] = []

    def first() -> None:
        call("unshare", 0x20000)
        _mount(b"none", b"/", None, 0x40000 | 0x4000)
        _mount(b"tmpfs", here(f"{top}/tmp"), b"tmpfs", 0)
        _mount(here(f"{top}/from"), here(f"{top}/bind"), None, 0x1000)
        held.append(os.open(here(f"{top}/tmp/file"), os.O_RDWR | os.O_CREAT))
        held.append(os.open(here(f"{top}/bind/file"), os.O_RDONLY))
        os.write(held[0], b"in a tmpfs")
        if in_a_root:
            os.chroot(here(f"{top}/root"))
            os.chdir("/")

    child = Child(lambda word: [os.pread(fd, 99, 0) for fd in held], first)
    while True:
        yield None
        same("mounts", child.ask(), [b"in a tmpfs", b"from/file"])


@trait(root=True)
def mounts(dice: random.Random) -> Look:
    """A child with mounts of its own: a tmpfs with an open file, and a bind mount."""
    return _mounts(in_a_root=False)


@trait(root=True, apart="refused: a mount or another file hides it; without open files CRIU fails")
def mounts_in_root(dice: random.Random) -> Look:
    """The same, in another root, with files open that lie outside of it."""
    return _mounts(in_a_root=True)


@trait(root=True)
def other_root(dice: random.Random) -> Look:
    """A child in another root."""
    os.mkdir(here("root"))
    with open(here("root/file"), "wb") as file:
        file.write(b"in the root")
    opened: list[int] = []

    def first() -> None:
        os.chroot(here("root"))
        os.chdir("/")
        opened.append(os.open("/file", os.O_RDONLY))

    child = Child(lambda word: (os.listdir("/"), os.getcwd(), os.pread(opened[0], 99, 0)), first)
    while True:
        yield None
        same("another root", child.ask(), (["file"], "/", b"in the root"))


@trait(root=True)
def own_mounts(dice: random.Random) -> Look:
    """Mounts that the job makes in its own namespace: a tmpfs, and a bind mount over a file."""
    for name in ("o", "o/tmp"):
        os.mkdir(here(name))
    for name in ("o/over", "o/under"):
        with open(here(name), "wb") as file:
            file.write(name.encode())
    call("mount", b"tmpfs", here("o/tmp"), b"tmpfs", 0, b"size=1m")
    call("mount", here("o/over"), here("o/under"), None, 0x1000, None)
    log = open(here("o/tmp/log"), "w+b", buffering=0)
    text = b""
    while True:
        step = yield None
        log.write(b"%d\n" % step)
        text += b"%d\n" % step
        same("in the tmpfs", Path(os.fsdecode(here("o/tmp/log"))).read_bytes(), text)
        same("bound over", Path(os.fsdecode(here("o/under"))).read_bytes(), b"o/over")
