# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of a process in /proc/PID: its mappings, mounts, status and descriptors, as typed records.

The one place that knows these texts (proc(5)). Each reader comes in two halves: one takes a process, the other a text, so
that tests run on recorded ones. A process that ends meanwhile has no mappings, no mounts and no status; that is no error.
Who descends from whom is devproxy.proctree's matter.
"""

from __future__ import annotations

import ctypes
import os
import re
from typing import NamedTuple

Pid = (
    int | str
)  # a number, or "self": in a foreign PID namespace our own number may name somebody else in /proc

_PIDFD_GETFD = 438  # the same number on every architecture
_ESCAPED = re.compile(rb"\\([0-7]{3})")


class Mapping(NamedTuple):
    """One line of /proc/PID/maps. mode: "rw-s". path: a file, or "[heap]" and the like, or "" for anonymous memory."""

    start: int
    end: int
    mode: str
    offset: int
    device: int
    inode: int
    path: str

    @property
    def range(self) -> str:
        """As the kernel spells it in maps."""
        return f"{self.start:08x}-{self.end:08x}"

    @property
    def map_file(self) -> str:
        """Its name in /proc/PID/map_files, where the kernel leaves leading zeros out."""
        return f"{self.start:x}-{self.end:x}"

    @property
    def deleted(self) -> bool:
        return self.path.endswith(" (deleted)")

    @property
    def shared_writable(self) -> bool:
        return self.mode[1] == "w" and self.mode[3] == "s"


class Mount(NamedTuple):
    """One line of /proc/PID/mountinfo. tags: shared:N and the like. kind: the type of the file system."""

    number: int
    parent: int
    device: str
    root: str
    point: str
    options: str
    tags: tuple[str, ...]
    kind: str
    source: str
    super_options: str


class Status(NamedTuple):
    """What devproxy reads of /proc/PID/status.

    inner_pid, inner_group, inner_session: the numbers in the process's own PID namespace; 0 for a group or session whose
    leader lives outside of it (fs/proc/array.c). uids: real, effective, saved, file system.
    """

    name: str
    state: str
    tracer: int
    uids: tuple[int, ...]
    threads: int
    inner_pid: int
    inner_group: int
    inner_session: int
    capabilities: int
    anonymous_bytes: int  # of memory: private, shared and swapped out

    def has_capability(self, number: int) -> bool:
        """Is it effective? number: as in linux/capability.h."""
        return bool(self.capabilities >> number & 1)


class FdInfo(NamedTuple):
    """What devproxy reads of /proc/PID/fdinfo/N. tty_index: of a pty's master, else None."""

    flags: int
    tty_index: int | None

    @property
    def access(self) -> int:
        """os.O_RDONLY, os.O_WRONLY or os.O_RDWR."""
        return self.flags & os.O_ACCMODE


# --- mappings ---


def mappings(pid: Pid, *marks: bytes) -> list[Mapping]:
    """The mappings of a process; with marks only those whose line has one of them.

    Most jobs map a thousand ranges, and a caller wants a few: to search for a mark in C is far cheaper than to parse.
    """
    text = _read(f"/proc/{pid}/maps")
    if marks and not any(mark in text for mark in marks):
        return []
    return parse_maps(text, *marks)


def parse_maps(text: bytes, *marks: bytes) -> list[Mapping]:
    found = []
    for line in text.split(b"\n"):
        if not line or (marks and not any(mark in line for mark in marks)):
            continue
        words = line.split(None, 5)
        start, _, end = words[0].partition(b"-")
        major, _, minor = words[3].partition(b":")
        # In maps only a newline is escaped.
        path = words[5].replace(b"\\012", b"\n") if len(words) == 6 else b""
        found.append(
            Mapping(
                int(start, 16),
                int(end, 16),
                words[1].decode(),
                int(words[2], 16),
                os.makedev(int(major, 16), int(minor, 16)),
                int(words[4]),
                os.fsdecode(path),
            )
        )
    return found


# --- mounts ---


def mounts(pid: Pid) -> list[Mount]:
    """The mounts that a process sees; one on top of another comes behind it."""
    return parse_mountinfo(_read(f"/proc/{pid}/mountinfo"))


def parse_mountinfo(text: bytes) -> list[Mount]:
    found = []
    for line in text.split(b"\n"):
        left, _, right = line.partition(b" - ")
        words, behind = left.split(b" "), right.split(b" ", 2)
        if len(words) < 6 or len(behind) < 3:
            continue
        found.append(
            Mount(
                int(words[0]),
                int(words[1]),
                words[2].decode(),
                _unescaped(words[3]),
                _unescaped(words[4]),
                words[5].decode(),
                tuple(tag.decode() for tag in words[6:]),
                behind[0].decode(),
                _unescaped(behind[1]),
                os.fsdecode(behind[2]),
            )
        )
    return found


def _unescaped(name: bytes) -> str:
    """Blanks, tabs, newlines and backslashes are octal there (fs/seq_file.c, mangle_path)."""
    return os.fsdecode(_ESCAPED.sub(lambda match: bytes([int(match[1], 8)]), name))


# --- status ---


def status(pid: Pid, thread: int | None = None) -> Status | None:
    """Of a process, or of one of its threads. None: it has ended, or we may not look at it."""
    text = _read(f"/proc/{pid}/status" if thread is None else f"/proc/{pid}/task/{thread}/status")
    return parse_status(text) if text else None


def parse_status(text: bytes) -> Status:
    lines = text.decode(errors="replace").splitlines()
    facts = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def innermost(name: str, otherwise: str) -> int:
        """Kernels without PID namespaces have no such line."""
        return int(facts.get(name, otherwise).split()[-1])

    def kilobytes(name: str) -> int:
        return int(facts.get(name, "0").split()[0])

    return Status(
        name=facts["Name"],
        state=facts["State"][:1],
        tracer=int(facts["TracerPid"]),
        uids=tuple(map(int, facts["Uid"].split())),
        threads=int(facts.get("Threads", "1")),
        inner_pid=innermost("NSpid", facts["Pid"]),
        inner_group=innermost("NSpgid", "1"),
        inner_session=innermost("NSsid", "1"),
        capabilities=int(facts.get("CapEff", "0"), 16),
        anonymous_bytes=1024 * sum(map(kilobytes, ("RssAnon", "RssShmem", "VmSwap"))),
    )


# --- descriptors ---


def descriptors(pid: Pid) -> list[tuple[int, str]]:
    """(number, what the link in /proc/PID/fd says) of each. Raises OSError where the process is gone or not ours to read."""
    folder = f"/proc/{pid}/fd"
    found = []
    for name in os.listdir(folder):
        try:
            found.append((int(name), os.readlink(f"{folder}/{name}")))
        except OSError:
            continue  # closed while we looked
    return found


def fdinfo(pid: Pid, fd: int) -> FdInfo | None:
    """None: it is closed."""
    text = _read(f"/proc/{pid}/fdinfo/{fd}")
    return parse_fdinfo(text) if text else None


def parse_fdinfo(text: bytes) -> FdInfo:
    facts = {
        name: value.strip() for name, _, value in (x.partition(b":") for x in text.split(b"\n"))
    }
    index = facts.get(b"tty-index")
    return FdInfo(int(facts[b"flags"], 8), None if index is None else int(index))


class Eventfd(NamedTuple):
    value: int
    semaphore: bool  # kernels before 6.5 do not say so


def eventfd(pid: Pid, fd: int) -> Eventfd | None:
    """None: it is closed, or no eventfd."""
    return parse_eventfd(_read(f"/proc/{pid}/fdinfo/{fd}"))


def parse_eventfd(text: bytes) -> Eventfd | None:
    value = re.search(rb"^eventfd-count:\s*([0-9a-f]+)$", text, re.M)
    semaphore = re.search(rb"^eventfd-semaphore:\s*1$", text, re.M)
    return Eventfd(int(value[1], 16), bool(semaphore)) if value else None


def thread_timers(pid: Pid) -> int:
    """How many POSIX timers of the process signal one of its threads."""
    return _read(f"/proc/{pid}/timers").count(b"/tid.")


def borrow(pid: int, fd: int) -> int:
    """A copy of another process's descriptor (pidfd_getfd(2)): it shares the file position. Raises OSError."""
    pidfd = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        copy = int(libc.syscall(_PIDFD_GETFD, pidfd, fd, 0))
        if copy < 0:
            raise OSError(
                ctypes.get_errno(), os.strerror(ctypes.get_errno()), f"/proc/{pid}/fd/{fd}"
            )
        return copy
    finally:
        os.close(pidfd)


# --- locks ---


def lock_holder(fd: int) -> int:
    """Who took the flock on that open file; 0 where nobody is known."""
    facts = os.fstat(fd)
    return parse_locks(_read("/proc/locks"), "FLOCK").get((facts.st_dev, facts.st_ino), 0)


def parse_locks(text: bytes, kind: str) -> dict[tuple[int, int], int]:
    """(device, inode) of each lock for writing of that kind (FLOCK, LEASE), and its holder."""
    found = {}
    for line in text.decode(errors="replace").splitlines():
        words = line.split()
        if len(words) < 6 or words[1] != kind or words[3] != "WRITE":
            continue
        major, minor, inode = words[5].split(":")
        found[os.makedev(int(major, 16), int(minor, 16)), int(inode)] = int(words[4])
    return found


def leases() -> dict[tuple[int, int], int]:
    """(device, inode) of each write lease on this machine, and its holder."""
    return parse_locks(_read("/proc/locks"), "LEASE")


def started_ticks(pid: Pid) -> int:
    """When the process started, in clock ticks since the boot: with its pid, a name for it alone. Raises FileNotFoundError
    and ProcessLookupError where there is none, and other OSErrors."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


# --- the machine ---


def boot_id() -> str:
    """Another one after each start of the machine; "" where the system does not say."""
    return _read("/proc/sys/kernel/random/boot_id").decode(errors="replace").strip()


def _read(path: str) -> bytes:
    """All of it; empty where the process has ended, or is not ours to look at."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
