# SPDX-License-Identifier: Apache-2.0
"""Who descends from a process, and who is stopped, out of /proc. A process that ends while we look is simply not there."""

from __future__ import annotations

import os
import signal
import socket
import struct

_EXIT_CODE = 49  # proc_pid_stat(5): field 52, counted from the third


def _stat(pid: int) -> tuple[int, str] | None:
    """(parent, state letter)"""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            tail = file.read().rsplit(b")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return int(tail[1]), tail[0].decode()


def parent(pid: int) -> int | None:
    """None: the process has ended."""
    info = _stat(pid)
    return info and info[0]


def stopped(pid: int) -> bool:
    """By a signal, as Ctrl-Z's, until SIGCONT; or by a debugger."""
    info = _stat(pid)
    return info is not None and info[1] in "Tt"


def listener(link: socket.socket) -> int:
    """The process that listens where the socket is connected to (unix(7): SO_PEERCRED)."""
    packed = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid: int = struct.unpack("iII", packed)[0]
    return pid


def stopped_words(pid: int) -> str:
    """Of a server that is stopped, behind its name."""
    return f"(process {pid}) is stopped, nothing is lost; it goes on after: kill -CONT {pid}"


def lives(pid: int) -> bool:
    """No zombie either."""
    info = _stat(pid)
    return info is not None and info[1] not in "ZX"


def _children(pid: int) -> list[int] | None:
    """By the kernel's own list; None where it was built without CONFIG_PROC_CHILDREN."""
    found: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())
        except FileNotFoundError:
            if os.path.exists(f"/proc/{pid}/task/{task}"):
                return None
        except OSError:
            pass
    return found


def children(pid: int) -> list[int]:
    """Its children that nobody has waited for yet, zombies too; oldest first as far as the kernel says."""
    found = _children(pid)
    return _all_children().get(pid, []) if found is None else found


def _all_children() -> dict[int, list[int]]:
    table: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (info := _stat(int(name))):
            table.setdefault(info[0], []).append(int(name))
    return table


def descendants(pid: int, without: frozenset[int] = frozenset()) -> list[int]:
    """All living descendants (no zombies), parents first; what is in `without` is left out with all below it."""
    return [p for p in _below(pid, without) if (info := _stat(p)) and info[1] != "Z"]


def killed(pid: int) -> set[int]:
    """Descendants that SIGKILL has ended and that nobody has waited for yet."""
    return {p for p in _below(pid, frozenset()) if _killed(p)}


def _killed(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            tail = file.read().rsplit(b")", 1)[1].split()
        return tail[0] == b"Z" and int(tail[_EXIT_CODE]) & 0x7F == signal.SIGKILL
    except (OSError, IndexError, ValueError):
        return False


def _below(pid: int, without: frozenset[int]) -> list[int]:
    table: dict[int, list[int]] | None = None
    found: list[int] = []
    todo = [pid]
    while todo:
        parent = todo.pop(0)
        if table is None:
            children = _children(parent)
            if children is None:
                table = _all_children()
                children = table.get(parent, [])
        else:
            children = table.get(parent, [])
        fresh = [c for c in children if c not in without and c not in found]
        todo += fresh
        found += fresh
    return found


def with_environment(mark: bytes) -> list[int]:
    """Living processes, but us, whose environment at their start held `mark` ("NAME=value" and a NUL byte)."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                text = b"\0" + file.read()
        except OSError:
            continue
        if b"\0" + mark in text:
            found.append(int(name))
    return found


def mapping(folder: str) -> bool:
    """Does a living process map a file below that folder? Processes that we may not look at do not count."""
    mark = f" {folder}/".encode()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/maps", "rb") as file:
                    if mark in file.read():
                        return True
            except OSError:
                pass
    return False
