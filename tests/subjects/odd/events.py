# SPDX-License-Identifier: Apache-2.0
"""Traits of descriptors that stand for events."""

from __future__ import annotations

import ctypes
import os
import random
import select
import signal
import struct
import time

from tests.subjects.odd.shared import (
    Look,
    Wrong,
    call,
    flow,
    fork,
    here,
    libc,
    same,
    sleep_for_ever,
    status,
    trait,
    wait_for,
)


@trait()
def eventfd(dice: random.Random) -> Look:
    """A counter."""
    count = os.eventfd(5)
    while True:
        yield None
        same("counter", os.eventfd_read(count), 5)
        os.eventfd_write(count, 5)


@trait()
def timerfd_late(dice: random.Random) -> Look:
    """One that ticks faster than it is read: at every cut it has expired."""
    fd = call("timerfd_create", time.CLOCK_MONOTONIC, os.O_NONBLOCK)
    call("timerfd_settime", fd, 0, struct.pack("qqqq", 0, 500_000, 0, 500_000), None)
    while True:
        yield None
        wait_for(lambda: select.select([fd], [], [], 0)[0], "a tick")
        same("ticks", struct.unpack("Q", os.read(fd, 8))[0] > 0, True)


@trait()
def timerfd(dice: random.Random) -> Look:
    """One far off, one that has expired, one that ticks, each of another clock; and one that does not run."""

    def make(clock: int, first_s: float, every_s: float) -> int:
        fd = call("timerfd_create", clock, os.O_NONBLOCK)
        whole = [part for s in (every_s, first_s) for part in (int(s), int(s % 1 * 1e9))]
        call("timerfd_settime", fd, 0, struct.pack("qqqq", *whole), None)
        return fd

    far, over = make(time.CLOCK_MONOTONIC, 5000, 700), make(7, 0.001, 0)
    ticks, seen = make(time.CLOCK_REALTIME, 0.05, 0.05), 0
    off = make(time.CLOCK_MONOTONIC, 0, 3)
    left = ctypes.create_string_buffer(32)
    while True:
        step = yield None
        call("timerfd_gettime", far, left)
        every_s, every_ns, left_s, _ = struct.unpack("qqqq", left)
        same("interval", (every_s, every_ns, 4000 < left_s <= 5000), (700, 0, True))
        call("timerfd_gettime", off, left)
        same("one that does not run", struct.unpack("qqqq", left), (3, 0, 0, 0))
        wait_for(lambda: select.select([over], [], [], 0)[0], "a timer that was over")
        if step % 10 == 0:
            wait_for(lambda: select.select([ticks], [], [], 0)[0], f"a tick after {seen}")
        if select.select([ticks], [], [], 0)[0]:
            seen += struct.unpack("Q", os.read(ticks, 8))[0]


@trait()
def signalfd(dice: random.Random) -> Look:
    """One with a signal that waits in it."""
    number = signal.SIGRTMIN + 2
    fd = libc.signalfd(-1, struct.pack("Q", 1 << (number - 1)), os.O_NONBLOCK)
    os.kill(os.getpid(), number)
    while True:
        step = yield None
        info = os.read(fd, 128)
        same("signal and sender", struct.unpack_from("IiiI", info)[::3], (number, os.getpid()))
        for _ in range(1 + step % 3):
            os.kill(os.getpid(), number)
        for _ in range(step % 3):
            os.read(fd, 128)


@trait()
def epoll(dice: random.Random) -> Look:
    """Sets of sets, edges, one shots, and what is watched under a number that is closed."""
    inner, outer = select.epoll(), select.epoll()
    (r, w), (dup_r, dup_w), (once_r, once_w) = os.pipe(), os.pipe(), os.pipe()
    inner.register(r, select.EPOLLIN)
    inner.register(once_r, select.EPOLLIN | select.EPOLLONESHOT)
    outer.register(inner.fileno(), select.EPOLLIN)
    old = os.dup(dup_r)
    outer.register(dup_r, select.EPOLLIN | select.EPOLLET)
    os.dup2(old, dup_r + 400)
    os.close(old)
    os.write(once_w, b"x")
    same("one shot", inner.poll(1), [(once_r, select.EPOLLIN)])
    while True:
        yield None
        same("nothing", outer.poll(0), [])
        os.write(w, b"x")
        same("inner", inner.poll(1), [(r, select.EPOLLIN)])
        same("outer", outer.poll(1), [(inner.fileno(), select.EPOLLIN)])
        os.read(r, 1)
        os.write(dup_w, b"x")
        same("edge", outer.poll(1), [(dup_r, select.EPOLLIN)])
        same("no edge", outer.poll(0), [])
        os.read(dup_r + 400, 1)


@trait()
def epoll_closed(dice: random.Random) -> Look:
    """A set that watches something under a number that is closed; another number still leads to it."""
    watch = select.epoll()
    r, w = os.pipe()
    other = os.dup(r)
    watch.register(r, select.EPOLLIN)
    os.close(r)
    while True:
        yield None
        same("nothing", watch.poll(0), [])
        os.write(w, b"x")
        same("under its old number", watch.poll(1), [(r, select.EPOLLIN)])
        os.read(other, 1)


@trait()
def inotify(dice: random.Random) -> Look:
    """A watched folder."""
    os.mkdir(here("watched"))
    fd = call("inotify_init1", os.O_NONBLOCK)
    number = call("inotify_add_watch", fd, here("watched"), 0x100)  # IN_CREATE
    while True:
        step = yield None
        with open(here(f"watched/{step}"), "wb"):
            pass
        watch, what, _, size = struct.unpack_from("iIII", data := os.read(fd, 4096))
        same("event", (watch, what, len(data)), (number, 0x100, 16 + size))
        same("name", data[16:].rstrip(b"\0"), str(step).encode())


@trait()
def pidfd(dice: random.Random) -> Look:
    """Of a child that lives, of one that is a zombie, and of one that is gone."""
    lives, zombie, gone = (fork(work) for work in (sleep_for_ever, lambda: 0, lambda: 0))
    fds = [os.pidfd_open(pid) for pid in (lives, zombie, gone)]
    os.waitpid(gone, 0)
    wait_for(lambda: status(zombie, "State")[0] == "Z", "a zombie")
    while True:
        yield None
        same("ended", [bool(select.select([fd], [], [], 0)[0]) for fd in fds], [False, True, True])
        signal.pidfd_send_signal(fds[0], 0)
        try:
            signal.pidfd_send_signal(fds[2], 0)
            raise Wrong("a signal reaches a child that is gone")
        except ProcessLookupError:
            pass


@trait(may="an AIO context, in a root without /dev/null")
def aio(dice: random.Random) -> Look:
    """A context of the kernel's asynchronous input and output."""
    context = ctypes.c_ulong()
    call("syscall", 206, 8, ctypes.byref(context))
    file = os.open(here("aio"), os.O_RDWR | os.O_CREAT)
    os.write(file, flow(0, 4096))
    into, events = ctypes.create_string_buffer(16), ctypes.create_string_buffer(64)
    while True:
        step = yield None
        block = struct.pack("QIIHhIQQqQII", step, 0, 0, 0, 0, file, ctypes.addressof(into), 16, step, 0, 0, 0)  # fmt: skip
        held = ctypes.create_string_buffer(block, 64)
        call("syscall", 209, context, 1, ctypes.byref(ctypes.c_void_p(ctypes.addressof(held))))
        same("events", call("syscall", 208, context, 1, 2, events, None), 1)
        same("which", struct.unpack_from("Q", events)[0], step)
        same("bytes", into.raw, flow(step, 16))


def _events(fd: int) -> list[tuple[int, int, int]]:
    """Mask, descriptor and process of each event that waits."""
    found, at = [], 0
    try:
        data = os.read(fd, 1 << 16)
    except BlockingIOError:
        data = b""
    while at < len(data):
        size, _, _, _, mask, opened, pid = struct.unpack_from("=IBBHQii", data, at)
        found.append((mask, opened, pid))
        at += size
    return found


def _fanotify(name: str, flags: int) -> Look:
    os.mkdir(here(name))
    fd = call("fanotify_init", 0x2 | flags, os.O_RDONLY)  # FAN_NONBLOCK
    call("fanotify_mark", fd, 1, ctypes.c_uint64(0x20 | 0x08000000), -100, here(name))
    with open(here(f"{name}/file"), "wb"):
        pass
    opened: list[int] = []
    while True:
        yield None
        for one in opened:
            os.close(one)
        opened = [one for _, one, _ in _events(fd) if one >= 0]
        with open(here(f"{name}/file"), "rb"):
            pass
        events = _events(fd)
        same("event", (0x20, os.getpid()) in [(mask, pid) for mask, _, pid in events], True)
        opened += [one for _, one, _ in events if one >= 0]


@trait(root=True)
def fanotify(dice: random.Random) -> Look:
    """A fanotify group that watches a folder."""
    return _fanotify("fan", 0x200)  # FAN_REPORT_FID: no descriptors


@trait(root=True, apart="CRIU cannot dump it at times: Can't lookup mount")
def fanotify_opens(dice: random.Random) -> Look:
    """One whose events come with descriptors, of what devproxy itself opens in the folder too, as the host has it mounted."""
    return _fanotify("fans", 0)
