# SPDX-License-Identifier: Apache-2.0
"""Traits of threads and locks."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable

from tests.subjects.odd.rights import seccomp_filter
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
    peek,
    poke,
    same,
    sleep_for_ever,
    status,
    trait,
    wait_for,
)


@trait()
def threads(dice: random.Random) -> Look:
    """Threads with names that wait in different calls: a condition, a pipe, a sleep, a lock, poll, sigwait."""
    ready, lock = threading.Condition(), threading.Lock()
    r, w = os.pipe()
    a, b = socket.socketpair()
    number = signal.SIGRTMIN + 9
    turn, heard = 0, []
    lock.acquire()

    def on_condition() -> None:
        last = 0
        while True:
            with ready:
                ready.wait_for(lambda: turn > last)
                last = turn
            heard.append("condition")

    def on_pipe() -> None:
        while os.read(r, 1):
            heard.append("pipe")

    def on_poll() -> None:
        poll = select.poll()
        poll.register(b, select.POLLIN)
        while poll.poll(600_000):
            b.recv(1)
            heard.append("poll")

    def on_signal() -> None:
        while signal.sigwait({number}) == number:
            heard.append("signal")

    def on_lock() -> None:
        while lock.acquire(timeout=3000):
            heard.append("lock")

    works = (on_condition, on_pipe, on_poll, on_signal, on_lock, sleep_for_ever)
    tids = []
    for work in works:

        def named(work: Callable[[], None] = work) -> None:
            call("prctl", 15, work.__name__.encode()[:15], 0, 0, 0)
            work()

        thread = threading.Thread(target=named, daemon=True)
        thread.start()
        wait_for(lambda: status(os.getpid(), "Name", thread.native_id) == work.__name__[:15], "a name")  # fmt: skip
        tids.append(thread.native_id)
    while True:
        yield None
        with ready:
            turn += 1
            ready.notify_all()
        os.write(w, b"x")
        a.send(b"x")
        os.kill(os.getpid(), number)
        lock.release()
        wait_for(lambda: len(heard) >= 5, f"all threads: {heard}")
        same("who was heard", sorted(heard), ["condition", "lock", "pipe", "poll", "signal"])
        heard.clear()
        names = [status(os.getpid(), "Name", tid) for tid in tids]
        same("names", names, [work.__name__[:15] for work in works])


@trait()
def thread_credentials(dice: random.Random) -> Look:
    """A thread that has fewer capabilities than the others, and a filter of its own."""
    asked, found = threading.Semaphore(0), []

    def look() -> list[str]:
        keys = ("CapEff", "CapPrm", "NoNewPrivs", "Seccomp", "Seccomp_filters")
        return [status(os.getpid(), key, threading.get_native_id()) for key in keys]

    def work() -> None:
        if os.geteuid() == 0:
            call("syscall", 126, struct.pack("II", 0x20080522, 0), struct.pack("6I", 0, 0, 0, 0, 0, 0))  # fmt: skip
        call("prctl", 38, 1, 0, 0, 0)
        seccomp_filter(0)
        while True:
            found.append(look())
            asked.acquire()

    threading.Thread(target=work, daemon=True).start()
    wait_for(lambda: found, "a thread")
    wanted = (found.pop(), look())
    while True:
        yield None
        asked.release()
        wait_for(lambda: found, "a thread")
        same("credentials of the thread", found.pop(), wanted[0])


@trait()
def semaphores(dice: random.Random) -> Look:
    """Two processes that wait for each other at semaphores in shared memory."""
    at = mapped(PAGE, 0x21)
    go, done, count = at, at + 64, at + 128
    call("sem_init", ctypes.c_size_t(go), 1, 0)
    call("sem_init", ctypes.c_size_t(done), 1, 0)

    def work() -> None:
        while True:
            call("sem_wait", ctypes.c_size_t(go))
            poke(count, struct.pack("I", struct.unpack("I", peek(count, 4))[0] + 1))
            call("sem_post", ctypes.c_size_t(done))

    fork(work)
    while True:
        step = yield None
        call("sem_post", ctypes.c_size_t(go))
        call("sem_wait", ctypes.c_size_t(done))
        same("turns", struct.unpack("I", peek(count, 4))[0], step)


@trait()
def robust_mutex(dice: random.Random) -> Look:
    """A mutex in shared memory whose owner, a child, dies while it holds it; and a condition that a child waits for."""
    at = mapped(PAGE, 0x21)
    mutex, plain, ready, turn = (ctypes.c_size_t(at + n) for n in (0, 128, 256, 384))
    attribute = ctypes.create_string_buffer(64)
    libc.pthread_mutexattr_init(attribute)
    libc.pthread_mutexattr_setpshared(attribute, 1)
    libc.pthread_mutex_init(plain, attribute)
    libc.pthread_mutexattr_setrobust(attribute, 1)
    libc.pthread_mutex_init(mutex, attribute)
    libc.pthread_condattr_init(attribute)
    libc.pthread_condattr_setpshared(attribute, 1)
    libc.pthread_cond_init(ready, attribute)

    def holds() -> None:
        libc.pthread_mutex_lock(mutex)
        poke(at + 400, b"held")
        sleep_for_ever()

    def waits() -> None:
        libc.pthread_mutex_lock(plain)
        while True:
            seen = peek(turn.value, 1)
            while peek(turn.value, 1) == seen:
                libc.pthread_cond_wait(ready, plain)
            poke(at + 500, peek(turn.value, 1))

    fork(waits)
    holder = fork(holds)
    wait_for(lambda: peek(at + 400, 4) == b"held", "the owner")
    while True:
        step = yield None
        same("trylock", libc.pthread_mutex_trylock(mutex), errno.EBUSY)
        libc.pthread_mutex_lock(plain)
        poke(turn.value, bytes([step % 200 + 1]))
        libc.pthread_cond_broadcast(ready)
        libc.pthread_mutex_unlock(plain)
        wait_for(lambda: peek(at + 500, 1)[0] == step % 200 + 1, "who waits at the condition")
        if step % 6 == 0:
            end(holder)
            same("lock of a dead owner", libc.pthread_mutex_lock(mutex), errno.EOWNERDEAD)
            same("consistent", libc.pthread_mutex_consistent(mutex), 0)
            poke(at + 400, b"free")
            same("unlock", libc.pthread_mutex_unlock(mutex), 0)
            holder = fork(holds)
            wait_for(lambda: peek(at + 400, 4) == b"held", "the owner")


@trait()
def file_locks(dice: random.Random) -> Look:
    """Locks of all three kinds, of this process and of a child, that each sees of the other."""
    for name in "abcd":
        with open(here(f"lock-{name}"), "wb") as file:
            file.write(bytes(100))
    flock_, posix, ofd, shared = (os.open(here(f"lock-{n}"), os.O_RDWR) for n in "abcd")
    record = "hhqqi4x"
    fcntl.flock(flock_, fcntl.LOCK_EX)
    fcntl.lockf(posix, fcntl.LOCK_EX, 10, 5)
    fcntl.lockf(posix, fcntl.LOCK_SH, 10, 40)
    fcntl.fcntl(ofd, fcntl.F_OFD_SETLK, struct.pack(record, fcntl.F_WRLCK, 0, 20, 30, 0))
    fcntl.flock(shared, fcntl.LOCK_SH)

    def look(word: str) -> object:
        found = []
        for name, how in (("a", fcntl.LOCK_EX), ("d", fcntl.LOCK_EX), ("d", fcntl.LOCK_SH)):
            file = os.open(here(f"lock-{name}"), os.O_RDWR)
            try:
                fcntl.flock(file, how | fcntl.LOCK_NB)
                found.append("free")
            except BlockingIOError:
                found.append("locked")
            os.close(file)
        for name, ask in (("b", fcntl.F_GETLK), ("c", fcntl.F_OFD_GETLK)):
            file = os.open(here(f"lock-{name}"), os.O_RDWR)
            for begin in (0, 7, 25, 45, 90):
                answer = fcntl.fcntl(file, ask, struct.pack(record, fcntl.F_WRLCK, 0, begin, 1, 0))
                found.append(str(struct.unpack(record, answer)[::2]))
            os.close(file)
        return found

    child = Child(look)
    wanted = child.ask()
    same("locks", wanted[:3], ["locked", "locked", "free"])
    while True:
        yield None
        same("locks", child.ask(), wanted)


@trait()
def waits_for_lock(dice: random.Random) -> Look:
    """Children that wait for a lock which their parent holds."""
    file = os.open(here("wanted"), os.O_RDWR | os.O_CREAT)
    a, b = os.pipe()

    def work() -> None:
        mine = os.open(here("wanted"), os.O_RDWR)
        while True:
            fcntl.flock(mine, fcntl.LOCK_EX)
            os.write(b, b"got it")
            fcntl.flock(mine, fcntl.LOCK_UN)
            time.sleep(0.01)

    fcntl.flock(file, fcntl.LOCK_EX)
    fork(work)
    while True:
        step = yield None
        same("nobody got it", select.select([a], [], [], 0)[0], [])
        if step % 4 == 0:
            fcntl.flock(file, fcntl.LOCK_UN)
            same("a child got it", os.read(a, 6), b"got it")
            fcntl.flock(file, fcntl.LOCK_EX)
            while select.select([a], [], [], 0)[0]:
                os.read(a, 6)


@trait()
def lease(dice: random.Random) -> Look:
    """A lease on a file."""
    with open(here("leased"), "wb"):
        pass
    file = os.open(here("leased"), os.O_RDONLY)
    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    while True:
        yield None
        same("lease", fcntl.fcntl(file, fcntl.F_GETLEASE), fcntl.F_RDLCK)
