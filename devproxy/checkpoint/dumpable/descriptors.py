# SPDX-License-Identifier: Apache-2.0
"""What processes have open: files, devices, terminals, anonymous inodes. Pipes and sockets are only collected here."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import termios

from devproxy import procfs
from devproxy.checkpoint.dumpable.objects import (
    MEMORY_DEVICES,
    anonymous_obstacle,
    check_ghost,
    device_obstacle,
    secret_obstacle,
)
from devproxy.checkpoint.dumpable.tree import Process, Socket, Tree, obstacle

_TTY, _PTMX = os.makedev(5, 0), os.makedev(5, 2)
_PTS_MAJORS = range(136, 144)
_ANON_OK = {"eventfd", "eventpoll", "signalfd", "timerfd", "inotify", "fanotify", "pidfd"}


def check_descriptors(tree: Tree, process: Process, ghost_limit: int) -> None:
    try:
        descriptors = procfs.descriptors(process.pid)
    except OSError:
        if os.path.exists(f"/proc/{process.pid}/fd"):
            tree.refusals.append(
                obstacle(
                    process,
                    "",
                    "its descriptors cannot be read",
                    "we may not look at it",
                    "run devproxy as the job's user",
                )
            )
        return
    for fd, target in descriptors:
        _check_descriptor(tree, process, fd, target, ghost_limit)


def _check_descriptor(tree: Tree, process: Process, fd: int, target: str, ghost_limit: int) -> None:
    if target.startswith("socket:["):
        tree.sockets.append(Socket(process, fd, int(target[8:-1])))
    elif target.startswith("pipe:["):
        tree.pipes.setdefault(int(target[6:-1]), []).append((process, fd))
    elif target.startswith("anon_inode:"):
        kind = target[len("anon_inode:") :].strip("[]")
        if kind == "eventfd":
            _check_eventfd(tree, process, fd)
        elif kind == "inotify":
            _check_inotify(tree, process, fd)
        if kind not in _ANON_OK:
            tree.refusals.append(anonymous_obstacle(process, f"fd {fd}", kind))
    elif target.startswith("/"):
        _check_file(tree, process, fd, target, ghost_limit)
    elif not target.startswith(
        (
            "mnt:",
            "net:",
            "pid:",
            "user:",
            "uts:",
            "ipc:",
            "cgroup:",
            "time:",
            "pid_for_children:",
            "time_for_children:",
            "pidfd:",
            "memfd:",
        )
    ):
        tree.refusals.append(
            obstacle(
                process, f"fd {fd}", target, "CRIU knows no such object", "close it in the program"
            )
        )


def _check_eventfd(tree: Tree, process: Process, fd: int) -> None:
    """CRIU makes a plain counter of 32 bits."""
    event = procfs.eventfd(process.pid, fd)
    if event is None or not (event.semaphore or event.value >> 32):
        return
    what = "an eventfd semaphore (EFD_SEMAPHORE)"
    remedy = "use an eventfd without that flag, or a POSIX semaphore"
    if not event.semaphore:
        what, remedy = f"an eventfd with the value {event.value}", "read it"
    why = "a restore would make a plain counter of 32 bits of it"
    tree.refusals.append(obstacle(process, f"fd {fd}", what, why, remedy, not event.semaphore))


def _check_inotify(tree: Tree, process: Process, fd: int) -> None:
    try:
        copy = procfs.borrow(process.pid, fd)
    except OSError:
        return  # closed since, or not ours to look at
    try:
        unread = struct.unpack("i", fcntl.ioctl(copy, termios.FIONREAD, bytes(4)))[0]
    except OSError:
        return
    finally:
        os.close(copy)
    if unread:
        what = f"inotify with {unread} bytes of unread events"
        why, remedy = "CRIU takes none along, so a restore would lose them", "try again when the program has read them"  # fmt: skip
        tree.refusals.append(obstacle(process, f"fd {fd}", what, why, remedy, True))


def _check_file(tree: Tree, process: Process, fd: int, target: str, ghost_limit: int) -> None:
    if target.startswith(("/proc/", "/sys/")):
        return  # restored by name, also what belongs to a process that is gone
    try:
        info = os.stat(f"/proc/{process.pid}/fd/{fd}")
    except OSError:
        return
    thing = f"fd {fd}"
    if stat.S_ISCHR(info.st_mode):
        _check_character(tree, process, fd, target, info.st_rdev)
    elif stat.S_ISBLK(info.st_mode):
        tree.refusals.append(device_obstacle(process, thing, target))
    elif target.startswith("/secretmem"):
        tree.refusals.append(secret_obstacle(process, thing))
    elif target.startswith("/memfd:"):
        if info.st_dev != tree.memfd_device():
            why, remedy = (
                "CRIU cannot dump it",
                "use memory of normal pages, or close it once mapped",
            )
            tree.refusals.append(obstacle(process, thing, "a memfd of huge pages", why, remedy))
    elif _is_queue(process, target, info):
        what, why = f"{target}, a POSIX message queue", "CRIU cannot dump it"
        remedy = "use a pipe or a socket"
        tree.refusals.append(obstacle(process, thing, what, why, remedy))
    elif target.endswith(" (deleted)") and not _leads_to(tree, process, target, info):
        check_ghost(tree, process, thing, target, info, ghost_limit)
    elif stat.S_ISREG(info.st_mode):
        _check_name(tree, process, thing, target, info)


def _is_queue(process: Process, target: str, info: os.stat_result) -> bool:
    """A message queue looks like a file in the root folder, but its file system is another one."""
    if target.count("/") != 1 or not stat.S_ISREG(info.st_mode):
        return False
    try:
        return os.stat(f"/proc/{process.pid}/root/").st_dev != info.st_dev
    except OSError:
        return False


def _check_name(
    tree: Tree, process: Process, thing: str, target: str, info: os.stat_result
) -> None:
    """Is the file still what its name leads to? If not, CRIU fails, or makes a link that is gone at restore."""
    if _leads_to(tree, process, target, info):
        return
    why, remedy = "a mount or another file hides it, and it could not be opened again", "close it"
    tree.refusals.append(obstacle(process, thing, target, why, remedy))


def _leads_to(tree: Tree, process: Process, name: str, info: os.stat_result) -> bool:
    # Names are those of the mount namespace; a process in a chroot sees them from elsewhere, hence the second root.
    for pid in (process.pid, tree.root_pid):
        try:
            if os.path.samestat(os.stat(f"/proc/{pid}/root{name}"), info):
                return True
        except OSError:
            continue
    return False


def _check_character(tree: Tree, process: Process, fd: int, target: str, device: int) -> None:
    if device in MEMORY_DEVICES or device == _TTY:
        return
    if device == _PTMX:
        info = procfs.fdinfo(process.pid, fd)
        if info and info.tty_index is not None:
            tree.masters.add(info.tty_index)
    elif os.major(device) in _PTS_MAJORS:
        index_of = (os.major(device) - 136) * 256 + os.minor(device)
        tree.terminals.append((process, fd, index_of))
    else:
        tree.refusals.append(device_obstacle(process, f"fd {fd}", target))


def check_terminals(tree: Tree) -> None:
    for process, fd, index in tree.terminals:
        if index not in tree.masters:
            tree.refusals.append(
                obstacle(
                    process,
                    f"fd {fd}",
                    f"/dev/pts/{index}, a terminal",
                    "its other side is outside of the job",
                    "start the job through devproxy-run, which gives it a terminal of its own",
                )
            )
