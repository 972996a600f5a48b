# SPDX-License-Identifier: Apache-2.0
"""Traits for which every image must be refused."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable

from tests.subjects.odd.shared import (
    PAGE,
    TRACES,
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
    sleep_for_ever,
    status,
    trait,
    wait_for,
)
from tests.subjects.odd.signals import make_timer


def _in_child(first: Callable[[], object]) -> Look:
    """A child that does it, and goes on; it ends with the trait."""
    child = Child(lambda word: word, first)
    try:
        while True:
            step = yield None
            same("the child", child.ask(str(step)), str(step))
    finally:
        end(child.pid)


@trait(must="userfaultfd")
def userfaultfd(dice: random.Random) -> Look:
    """A userfaultfd."""
    return _in_child(lambda: call("syscall", 323, 0))


NAMESPACES = (0x20000000, 0x04000000, 0x08000000, 0x40000000, 0x80, 0x02000000, 0x10000000)


@trait(must="made a (pid|uts|ipc|net|time|cgroup|user) namespace", root=True)
def namespaces(dice: random.Random) -> Look:
    """A child with a namespace of its own, in which a process lives."""
    flag = dice.choice(NAMESPACES)

    def lives() -> None:
        call("prctl", 1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
        sleep_for_ever()

    def first() -> None:
        call("unshare", flag)
        fork(lives)

    return _in_child(first)


@trait(must="made a pid namespace", root=True)
def namespace_to_be(dice: random.Random) -> Look:
    """A child that has made a PID namespace, and has forked nobody yet."""
    return _in_child(lambda: call("unshare", 0x20000000))


@trait(must="an eventfd with the value")
def eventfd_large(dice: random.Random) -> Look:
    """An eventfd that has counted far."""
    return _in_child(lambda: os.eventfd_write(os.eventfd(0), 5 << 32 | 7))


@trait(must="an eventfd semaphore")
def eventfd_semaphore(dice: random.Random) -> Look:
    """An eventfd that is a semaphore."""
    return _in_child(lambda: os.eventfd(9, os.EFD_SEMAPHORE))


@trait(must="inotify with 32 bytes of unread events")
def inotify_unread(dice: random.Random) -> Look:
    """A watched folder with an event that nobody has read yet."""

    def first() -> None:
        os.mkdir(here("seen"))
        call("inotify_add_watch", call("inotify_init1", 0), here("seen"), 0x100)  # IN_CREATE
        os.mkdir(here("seen/0"))

    return _in_child(first)


@trait(must="a POSIX timer that signals one thread")
def posix_timer_thread(dice: random.Random) -> Look:
    """A timer whose signal goes to one thread, as all of glibc's that call a function are."""
    return _in_child(lambda: make_timer(1, 4, signal.SIGRTMIN + 8))


@trait(must="System V shared memory")
def system_v(dice: random.Random) -> Look:
    """System V shared memory."""

    def first() -> None:
        libc.shmat.restype = ctypes.c_size_t
        number = call("shmget", 0, PAGE, 0o1600)
        call("shmat", number, None, 0)
        call("shmctl", number, 0, None)

    return _in_child(first)


@trait(must="System V semaphore")
def system_v_semaphores(dice: random.Random) -> Look:
    """System V semaphores."""
    number = call("semget", 0, 2, 0o1600)
    child = Child(lambda word: libc.semop(number, struct.pack("hhh", 0, 1, 0), 1))
    try:
        while True:
            yield None
            same("semop", libc.semop(number, struct.pack("hhh", 0, 1, 0), 1), 0)
    finally:
        end(child.pid)
        call("semctl", number, 0, 0)


@trait(must="memfd_secret|secret")
def secret(dice: random.Random) -> Look:
    """Memory that not even the kernel reads."""
    fd = call("syscall", 447, 0)
    os.ftruncate(fd, PAGE)
    at = mapped(PAGE, 1, fd)
    try:
        while True:
            step = yield None
            poke(at, b"%d" % step)
    finally:
        call("munmap", ctypes.c_size_t(at), ctypes.c_size_t(PAGE))
        os.close(fd)


@trait(must="message queue")
def message_queue(dice: random.Random) -> Look:
    """A POSIX message queue with a name that is gone."""
    name = f"/odd-{os.getpid()}-{time.time_ns()}".encode()
    queue = libc.mq_open(name, os.O_RDWR | os.O_CREAT, 0o600, None)
    libc.mq_unlink(name)
    try:
        while True:
            yield None
            call("mq_send", queue, b"x", ctypes.c_size_t(1), 0)
            same("message", call("mq_receive", queue, ctypes.create_string_buffer(9000), ctypes.c_size_t(9000), None), 1)  # fmt: skip
    finally:
        os.close(queue)


@trait(must="is deleted, open, and has another name")
def deleted_with_name(dice: random.Random) -> Look:
    """A deleted open file that has another name."""
    fd = os.open(here("one-name"), os.O_RDWR | os.O_CREAT)
    os.link(here("one-name"), here("other-name"))
    os.unlink(here("one-name"))
    try:
        while True:
            step = yield None
            os.pwrite(fd, b"%d" % step, 0)
    finally:
        os.close(fd)


@trait(must="MPTCP")
def mptcp(dice: random.Random) -> Look:
    """A socket of MPTCP."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262):
        while True:
            yield None


@trait(must=TRACES)
def traced(dice: random.Random) -> Look:
    """A child that its parent traces."""
    pid = fork(sleep_for_ever)
    call("ptrace", 0x4206, pid, None, None)  # PTRACE_SEIZE
    try:
        while True:
            yield None
            same("tracer", status(pid, "TracerPid"), str(os.getpid()))
    finally:
        end(pid)


@trait(must="first thread has ended")
def zombie_leader(dice: random.Random) -> Look:
    """A child whose first thread has ended, and another lives."""

    def work() -> None:
        threading.Thread(target=sleep_for_ever).start()
        libc.syscall(60, 0)

    pid = fork(work)
    wait_for(lambda: status(pid, "State")[0] == "Z", "its end")
    try:
        while True:
            yield None
            same("threads", len(os.listdir(f"/proc/{pid}/task")), 2)
    finally:
        end(pid)


@trait(apart="a restore makes another PID namespace")
def forgetful(dice: random.Random) -> Look:
    """Not a trait that may be there: it takes something for kept that no restore keeps. The campaign must notice."""
    wanted = os.readlink("/proc/self/ns/pid")
    while True:
        yield None
        same("PID namespace", os.readlink("/proc/self/ns/pid"), wanted)
