# SPDX-License-Identifier: Apache-2.0
"""Traits of terminals."""

from __future__ import annotations

import fcntl
import os
import random
import select
import signal
import struct
import termios

from tests.subjects.odd.shared import (
    PAGE,
    Child,
    Look,
    fork,
    mapped,
    peek,
    poke,
    same,
    sleep_for_ever,
    trait,
    wait_for,
)


@trait()
def terminal(dice: random.Random) -> Look:
    """A pseudoterminal with odd settings, a size, and a line that nobody has read."""
    master, slave = os.openpty()
    settings = termios.tcgetattr(slave)
    settings[0], settings[3] = termios.INLCR, 0  # iflag, lflag
    settings[6][termios.VMIN] = 3
    termios.tcsetattr(slave, termios.TCSANOW, settings)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 5, 6))
    wanted = termios.tcgetattr(slave)
    name = os.ttyname(slave)
    while True:
        step = yield None
        same("settings", termios.tcgetattr(slave), wanted)
        size = fcntl.ioctl(master, termios.TIOCGWINSZ, bytes(8))
        same("size", struct.unpack("HHHH", size), (33, 77, 5, 6))
        os.write(master, b"%05d" % step)
        same("typed", os.read(slave, 99), b"%05d" % step)
        same("name", os.ttyname(slave), name)


@trait()
def terminal_unread(dice: random.Random) -> Look:
    """A pseudoterminal with bytes in both directions that nobody has read."""
    master, slave = os.openpty()
    settings = termios.tcgetattr(slave)
    settings[0] = settings[1] = settings[3] = 0  # iflag, oflag, lflag
    termios.tcsetattr(slave, termios.TCSANOW, settings)
    os.write(master, b"%05d" % 0)
    os.write(slave, b"%05d" % 0)
    while True:
        step = yield None
        same("typed", select.select([slave], [], [], 5)[0] and os.read(slave, 99), b"%05d" % (step - 1))  # fmt: skip
        same("shown", select.select([master], [], [], 5)[0] and os.read(master, 99), b"%05d" % (step - 1))  # fmt: skip
        os.write(master, b"%05d" % step)
        os.write(slave, b"%05d" % step)


@trait()
def controlling_terminal(dice: random.Random) -> Look:
    """A session with a terminal, a group in its foreground and one in its background; Ctrl-C reaches the first."""
    master, slave = os.openpty()
    caught = mapped(PAGE, 0x21)

    def on_interrupt(number: int, frame: object) -> None:
        poke(caught, bytes([peek(caught, 1)[0] + 1]))

    def first() -> None:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, on_interrupt)
        back = fork(sleep_for_ever)
        os.setpgid(back, back)

    def look(word: str) -> object:
        os.close(os.open("/dev/tty", os.O_RDWR))
        return os.tcgetpgrp(slave), os.getpid(), os.getsid(0)

    child = Child(look, first)
    wanted = child.ask()
    while True:
        step = yield None
        same("who has the terminal", child.ask(), wanted)
        os.write(master, b"\x03")
        # To ask wakes it: it may have been about to wait when the signal came.
        wait_for(lambda: child.ask() and peek(caught, 1)[0] == step % 256, "Ctrl-C")
        while select.select([master], [], [], 0)[0]:
            os.read(master, 99)
