# SPDX-License-Identifier: Apache-2.0
"""What a trait is, and what the traits of an odd job share."""

from __future__ import annotations

import ast
import ctypes
import errno
import mmap
import os
import random
import signal
import socket
import time
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Look = Generator[object, int, None]
HOME = os.getcwdb()
PAGE = mmap.PAGESIZE
PATIENCE_S = 60
# Blocked in every thread from the start; each trait that needs some has its own.
HELD = {signal.SIGUSR1, signal.SIGUSR2, *range(signal.SIGRTMIN + 1, signal.SIGRTMIN + 12)}

libc = ctypes.CDLL(None, use_errno=True)
for _name in ("mmap", "mremap"):
    getattr(libc, _name).restype = ctypes.c_size_t
TRACES = "process \\d+ \\(.*\\) traces it"


class Wrong(Exception):
    """Something is not what it was."""


@dataclass(frozen=True)
class Trait:
    """gpu: only after the driver is up. late: after the others, which it would hinder. root: needs to be root."""

    make: Callable[[random.Random], Look]
    may: str
    must: str
    gpu: bool
    late: bool
    root: bool
    apart: str


TRAITS: dict[str, Trait] = {}


def trait(
    *,
    may: str = "",
    must: str = "",
    gpu: bool = False,
    late: bool = False,
    root: bool = False,
    apart: str = "",
) -> Callable[[Callable[[random.Random], Look]], Callable[[random.Random], Look]]:
    def add(make: Callable[[random.Random], Look]) -> Callable[[random.Random], Look]:
        TRAITS[make.__name__] = Trait(make, may, must, gpu, late, root, apart)
        return make

    return add


def same(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise Wrong(f"{what}: {found!r:.300}, not {wanted!r:.300}")


def call(name: str, *arguments: Any) -> int:
    """A function of libc that says -1; OSError then."""
    while (result := getattr(libc, name)(*arguments)) in (-1, 2**64 - 1):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, f"{name}: {os.strerror(number)}")
    return int(result)


def flow(begin: int, count: int) -> bytes:
    """Bytes begin.. of an endless text."""
    return bytes((i * 31 + (i >> 8)) & 255 for i in range(begin, begin + count))


def here(name: str) -> bytes:
    """A path in the folder that the job was started in."""
    return HOME + b"/" + name.encode()


def fork(work: Callable[[], object]) -> int:
    pid = os.fork()
    if not pid:
        try:
            work()
        except BrokenPipeError:
            os._exit(
                0
            )  # the job has ended; where it has not, the other end sees that nobody is there
        except BaseException:
            traceback.print_exc()
            print("FAILED in a child", flush=True)
            os._exit(9)
        os._exit(0)
    return pid


def sleep_for_ever() -> None:
    while True:
        time.sleep(1000)


def status(pid: int, key: str, thread: int | None = None) -> str:
    """A field of /proc/PID/status."""
    for line in Path(f"/proc/{pid}/task/{thread or pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return line.split(":", 1)[1].strip()
    raise Wrong(f"{pid} has no {key}")


def wait_for(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            raise Wrong(f"waited for {what}")
        time.sleep(0.001)


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


class Child:
    """A forked process that answers questions: ask(word) gives answer(word) of there."""

    def __init__(self, answer: Callable[[str], object], first: Callable[[], object] | None = None):
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def work() -> None:
            self.ours.close()
            if first:
                first()
            while word := theirs.recv(1 << 16):
                theirs.send(repr(answer(word.decode())).encode())

        self.pid = fork(work)
        theirs.close()
        self.ours.settimeout(PATIENCE_S)
        self.ask()

    def ask(self, word: str = "-") -> Any:
        self.ours.send(word.encode())
        return ast.literal_eval(self.ours.recv(1 << 16).decode() or "'nothing'")


def mapped(size: int, flags: int, fd: int = -1, protection: int = 3, offset: int = 0) -> int:
    at = ctypes.c_size_t
    return call("mmap", None, at(size), protection, flags, fd, ctypes.c_long(offset))


def peek(at: int, count: int) -> bytes:
    return ctypes.string_at(at, count)


def poke(at: int, data: bytes) -> None:
    ctypes.memmove(at, data, len(data))


def smaps(at: int) -> tuple[str, str]:
    """Mode and flags of the mapping there, without what only says whether it was written to."""
    found = ""
    for line in Path("/proc/self/smaps").read_text(errors="replace").splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head and not head.endswith(":"):
            begin, last = (int(word, 16) for word in head.split("-"))
            found = line.split()[1] if begin <= at < last else ""
        elif found and line.startswith("VmFlags:"):
            return found, " ".join(word for word in line.split()[1:] if word != "sd")
    raise Wrong(f"nothing is mapped at {at:x}")
