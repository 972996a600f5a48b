# SPDX-License-Identifier: Apache-2.0
"""Traits of pipes and FIFOs."""

from __future__ import annotations

import fcntl
import os
import random
import signal

from tests.subjects.odd.shared import PAGE, Child, Look, Wrong, flow, fork, here, same, trait


@trait()
def pipe_unread(dice: random.Random) -> Look:
    """A pipe that always has unread bytes."""
    r, w = os.pipe()
    put = got = 0
    value = b""
    while True:
        count = dice.randrange(1, 4000)
        os.write(w, flow(put, count))
        put += count
        yield value
        count = dice.randrange(0, put - got)
        value = os.read(r, count) if count else b""
        same("bytes of the pipe", value, flow(got, count))
        got += count
        if put - got > 50_000:
            same("the rest of the pipe", os.read(r, put - got), flow(got, put - got))
            got = put


@trait()
def pipe_blocked(dice: random.Random) -> Look:
    """A child writes until the pipe, of a size of its own, is full, and waits."""
    r, w = os.pipe()
    size = fcntl.fcntl(w, fcntl.F_SETPIPE_SZ, PAGE * dice.choice([1, 2, 32, 256]))

    def work() -> None:
        os.close(r)
        at = 0
        while True:
            at += os.write(w, flow(at, 3000))

    fork(work)
    got, value = 0, b""
    while True:
        yield value
        same("size of the pipe", fcntl.fcntl(r, fcntl.F_GETPIPE_SZ), size)
        count, value = dice.randrange(1, 6000), b""
        while len(value) < count:
            if not (piece := os.read(r, count - len(value))):
                raise Wrong("nobody writes any more")
            value += piece
        same("bytes of the full pipe", value, flow(got, count))
        got += count


@trait()
def pipe_ends(dice: random.Random) -> Look:
    """A pipe without writers that has unread bytes, and one without readers."""
    (r, w), (lonely_r, lonely_w) = os.pipe(), os.pipe()
    os.write(w, flow(0, 3000))
    os.close(w)
    os.close(lonely_r)
    got = 0
    while True:
        yield got
        value = os.read(r, 20)
        same("bytes of a pipe without writers", value, flow(got, min(20, 3000 - got)))
        got += len(value)
        try:
            os.write(lonely_w, b"x")
            raise Wrong("a pipe without readers takes bytes")
        except BrokenPipeError:
            pass


@trait()
def fifo(dice: random.Random) -> Look:
    """A FIFO with unread bytes, one that two processes have open, and one that is deleted."""
    os.mkfifo(here("fifo-a"))
    os.mkfifo(here("fifo-b"))
    unread = os.open(here("fifo-a"), os.O_RDWR)
    both = os.open(here("fifo-b"), os.O_RDWR)
    child = Child(lambda word: os.read(both, 100) if word != "-" else b"")
    os.write(unread, b"0")
    step = 0
    while True:
        step = yield os.fstat(unread).st_mode
        same("the FIFO", os.read(unread, 100), str(step - 1).encode())
        os.write(unread, str(step).encode())
        os.write(both, f"to {step}".encode())
        same("the FIFO to a child", child.ask("read"), f"to {step}".encode())


@trait()
def fifo_deleted(dice: random.Random) -> Look:
    """A FIFO that has no name any more, with unread bytes."""
    os.mkfifo(here("fifo-c"))
    fd = os.open(here("fifo-c"), os.O_RDWR)
    os.unlink(here("fifo-c"))
    os.write(fd, b"0")
    while True:
        step = yield None
        same("the deleted FIFO", os.read(fd, 100), str(step - 1).encode())
        os.write(fd, str(step).encode())


@trait()
def pipe_flags(dice: random.Random) -> Look:
    """Flags of descriptors and of what they lead to, owners and signals of it."""
    r, w = os.pipe2(os.O_NONBLOCK)
    plain_r, plain_w = os.pipe2(os.O_CLOEXEC)
    fcntl.fcntl(r, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(r, fcntl.F_SETSIG, signal.SIGRTMIN + 1)
    os.set_inheritable(w, True)
    file = os.open(here("flags"), os.O_RDWR | os.O_CREAT | os.O_DSYNC | os.O_NOATIME)
    fds = (r, w, plain_r, plain_w, file)
    asks = (fcntl.F_GETFL, fcntl.F_GETFD, fcntl.F_GETOWN, fcntl.F_GETSIG)
    wanted = [[fcntl.fcntl(fd, ask) for ask in asks] for fd in fds]
    while True:
        yield None
        same("flags", [[fcntl.fcntl(fd, ask) for ask in asks] for fd in fds], wanted)
