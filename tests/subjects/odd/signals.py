# SPDX-License-Identifier: Apache-2.0
"""Traits of signals and timers."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import struct
import threading
import time

from tests.subjects.odd.shared import (
    PATIENCE_S,
    Look,
    Wrong,
    call,
    libc,
    mapped,
    same,
    trait,
    wait_for,
)


def _take(number: int) -> tuple[int, int, int]:
    """Code, sender and value of the first that waits."""
    info = ctypes.create_string_buffer(128)
    mask = struct.pack("Q", 1 << (number - 1)) + bytes(120)
    call("sigtimedwait", mask, info, struct.pack("qq", 0, 0))
    _, _, code, _, pid, _, value = struct.unpack_from("iiiiiIq", info)
    return code, pid, value


@trait()
def pending_signals(dice: random.Random) -> Look:
    """Signals of the process that are blocked and wait, in their order and with their values."""
    number, put, got = signal.SIGRTMIN + 3, 0, 0
    os.kill(os.getpid(), signal.SIGUSR1)
    while True:
        while put - got < 5:
            call("sigqueue", os.getpid(), number, ctypes.c_void_p(put))
            put += 1
        yield got
        same("the plain one", signal.SIGUSR1 in signal.sigpending(), True)
        for _ in range(dice.randrange(1, 5)):
            same("the next one", _take(number), (-1, os.getpid(), got))  # SI_QUEUE
            got += 1


@trait()
def thread_signals(dice: random.Random) -> Look:
    """Signals that wait at one thread, which blocks them, with its own mask."""
    number = signal.SIGRTMIN + 4
    asked, answered = threading.Semaphore(0), threading.Semaphore(0)
    seen: list[object] = []

    def work() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})
        while True:
            answered.release()
            asked.acquire()
            blocked = signal.SIGCONT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
            seen.append((_take(number)[0], blocked))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while True:
        same("the thread comes", answered.acquire(timeout=PATIENCE_S), True)
        same("signal at a thread, and its mask", seen, seen[:1] and [(0, True)])
        seen.clear()
        assert thread.ident is not None
        signal.pthread_kill(thread.ident, number)
        yield None
        same("not at this thread", number in signal.sigpending(), False)
        asked.release()


@trait()
def signal_actions(dice: random.Random) -> Look:
    """What each of the 64 signals does, the stack for handlers, and the mask."""
    size = 1 << 16
    stack = mapped(size, 0x22)
    call("sigaltstack", struct.pack("QiiQ", stack, 0, 0, size), None)
    signal.signal(signal.SIGRTMIN + 11, signal.SIG_IGN)
    signal.signal(signal.SIGURG, lambda *_: None)
    signal.siginterrupt(signal.SIGURG, False)

    def look() -> list[object]:
        found: list[object] = []
        for number in range(1, 65):
            action = ctypes.create_string_buffer(32)
            if libc.syscall(13, number, None, action, 8) == 0:
                found.append((number, action.raw))
        alternate = ctypes.create_string_buffer(24)
        call("sigaltstack", None, alternate)
        return [*found, alternate.raw, sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))]

    wanted: list[object] = []
    while True:
        yield None
        wanted = wanted or look()  # after every trait's set-up
        for found, before in zip(look(), wanted):
            same("signal", found, before)


@trait()
def interval_timers(dice: random.Random) -> Look:
    """All three interval timers, which tick, and whose ticks interrupt everything else."""
    timers = {signal.SIGALRM: 0, signal.SIGVTALRM: 1, signal.SIGPROF: 2}
    ticks = dict.fromkeys(timers, 0)

    def tick(number: int, frame: object) -> None:
        ticks[signal.Signals(number)] += 1

    for number, which in timers.items():
        signal.signal(number, tick)
        signal.setitimer(which, 0.003, 0.004)
    while True:
        yield None
        before, give_up = dict(ticks), time.monotonic() + PATIENCE_S
        while any(ticks[number] == before[number] for number in timers):
            if time.monotonic() > give_up:
                raise Wrong(f"waited for ticks: {ticks}, before {before}")
        for which in timers.values():
            # Not by ==: another trait may have changed how floats are rounded.
            same("interval", abs(signal.getitimer(which)[1] - 0.004) < 1e-9, True)


def make_timer(clock: int, how: int, number: int) -> int:
    held = ctypes.c_int()
    event = struct.pack("qiii", 4711, number, how, threading.get_native_id()) + bytes(44)
    call("syscall", 222, clock, event, ctypes.byref(held))
    return held.value


@trait()
def posix_timers(dice: random.Random) -> Look:
    """Timers with numbers that have a hole, one far off, one that has expired, and one that ticks."""
    number = signal.SIGRTMIN + 5
    hole, far = make_timer(1, 1, 0), make_timer(0, 0, number)
    call("syscall", 226, hole)
    over, ticks = make_timer(1, 0, number + 1), make_timer(7, 0, number + 2)
    call("syscall", 223, far, 0, struct.pack("qqqq", 500, 0, 4000, 0), None)
    call("syscall", 223, over, 0, struct.pack("qqqq", 0, 0, 0, 1), None)
    call("syscall", 223, ticks, 0, struct.pack("qqqq", 0, 2_000_000, 0, 2_000_000), None)
    left = ctypes.create_string_buffer(32)
    while True:
        yield None
        call("syscall", 224, far, left)
        every, _, rest, _ = struct.unpack("qqqq", left)
        same("the one far off", (every, 3000 < rest <= 4000), (500, True))
        wait_for(lambda: number + 1 in signal.sigpending(), "the one that is over")
        for _ in range(2):
            wait_for(lambda: number + 2 in signal.sigpending(), "a tick")
            same("value of a tick", _take(number + 2)[::2], (-2, 4711))  # SI_TIMER
