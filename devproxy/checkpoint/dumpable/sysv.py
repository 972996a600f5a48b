# SPDX-License-Identifier: Apache-2.0
"""System V semaphores and message queues: no descriptor names them, and CRIU knows them only in an IPC namespace.

The kernel keeps the last users of each, those too that have ended. A number says little outside of the job's PID namespace:
another process may have got it since. Asked from within it, the kernel gives the number of a user that has ever been in it,
and 0 for any other. So the job's are:

- those of which a process of its PID namespace, living or not, was the last user: of a semaphore, or the last to send to or
  receive from a queue;
- those that nobody has used yet, and that the job's user has made since the job began. Who made them the kernel does not say.

What a process of the job has used and somebody else used last is not seen.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from devproxy import procfs
from devproxy.checkpoint.dumpable.tree import Process, Tree, obstacle
from devproxy.checkpoint.dumpable.verdict import Obstacle

_SETS, _QUEUES = "/proc/sysvipc/sem", "/proc/sysvipc/msg"
_GETPID = 11  # semctl(2)
_ASK_S = 10
_CLOCK_SLACK_S = 1.0

# Prints the last users of each set and queue as that PID namespace numbers them. setns(2) puts only children into it, and a
# reader of /proc/sysvipc gets the numbers of its own namespace.
_ASK = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
if libc.setns(os.open(f"/proc/{sys.argv[1]}/ns/pid", os.O_RDONLY), 0x20000000) != 0:
    sys.exit(2)
child = os.fork()
if child != 0:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
def rows(path):
    with open(path) as file:
        return [line.split() for line in file][1:]
for row in rows("/proc/sysvipc/sem"):
    print("sem", row[1], *{libc.semctl(int(row[1]), one, 11, 0) for one in range(int(row[3]))})
for row in rows("/proc/sysvipc/msg"):
    print("msg", row[1], row[5], row[6])
sys.stdout.flush()
os._exit(0)
"""


@dataclass(frozen=True)
class _Kind:
    name: str
    why: str
    remedy: str
    option: str  # ipcrm(1)


_KINDS = {
    "sem": _Kind(
        "semaphore set",
        "they go into no image, so a restore would lose their state",
        "use POSIX semaphores",
        "-s",
    ),
    "msg": _Kind(
        "message queue",
        "it goes into no image, so a restore would lose what is in it",
        "use pipes or sockets",
        "-q",
    ),
}


@dataclass(frozen=True)
class _Thing:
    """A set or a queue."""

    kind: str  # sem or msg
    number: int
    what: str
    maker: int  # uid
    made_s: int  # or changed; wall clock
    used: bool

    @property
    def name(self) -> str:
        return f"{_KINDS[self.kind].name} {self.number}"


def check_sysv(tree: Tree) -> None:
    things = [*_sets(), *_queues()]
    if not things or not tree.processes:
        return
    members = {process.status.inner_pid: process for process in tree.processes}
    users, of_the_job_alone = _last_users(tree.root_pid)
    if not of_the_job_alone:
        members = {process.pid: process for process in tree.processes}
    uids = {uid for process in tree.processes for uid in process.status.uids}
    began_s = _began_s(tree.root_pid)
    for thing in things:
        those = users.get((thing.kind, thing.number), set()) - {-1, 0}
        living = sorted(those & members.keys())
        if living:
            tree.refusals.append(_refusal(members[living[0]], thing, "", False))
        elif those and of_the_job_alone:
            how = ", last used by a process of the job that has ended"
            tree.refusals.append(_refusal(None, thing, how, False))
        elif not thing.used and thing.maker in uids and thing.made_s >= began_s:
            how = ", made by the job's user since the job began, and used by nobody yet"
            tree.refusals.append(_refusal(None, thing, how, True))


def _refusal(process: Process | None, thing: _Thing, how: str, transient: bool) -> Obstacle:
    kind = _KINDS[thing.kind]
    if process is not None:
        return obstacle(process, thing.name, thing.what + how, kind.why, kind.remedy, transient)
    remedy = f"{kind.remedy}, or remove what is left behind: ipcrm {kind.option} {thing.number}"
    return Obstacle(0, 0, "", thing.name, thing.what + how, kind.why, remedy, transient)


def _rows(path: str) -> list[list[str]]:
    try:
        with open(path, encoding="ascii") as file:
            return [line.split() for line in file.readlines()[1:]]
    except OSError:
        return []  # a kernel without them


def _sets() -> Iterator[_Thing]:
    """key semid perms nsems uid gid cuid cgid otime ctime"""
    libc = ctypes.CDLL(None)
    for row in _rows(_SETS):
        number, count = int(row[1]), int(row[3])
        # Where the time of the last semop is 0, somebody may still have set a value.
        used = int(row[8]) != 0 or any(
            libc.semctl(number, one, _GETPID, 0) > 0 for one in range(count)
        )
        what = f"{count} System V semaphore(s)"
        yield _Thing("sem", number, what, int(row[6]), int(row[9]), used)


def _queues() -> Iterator[_Thing]:
    """key msqid perms cbytes qnum lspid lrpid uid gid cuid cgid stime rtime ctime"""
    for row in _rows(_QUEUES):
        used = any(int(row[column]) != 0 for column in (4, 5, 6, 11, 12))
        what = f"a System V message queue with {row[4]} message(s)"
        yield _Thing("msg", int(row[1]), what, int(row[9]), int(row[13]), used)


def _last_users(root_pid: int) -> tuple[dict[tuple[str, int], set[int]], bool]:
    """By kind and number; and whether they are all of the job's PID namespace, as that numbers them.

    Else they are as we see them: of a job in our own namespace, or where the kernel did not answer. Then a number tells of a
    living process alone.
    """
    if os.readlink("/proc/self/ns/pid") != _namespace(root_pid):
        command = [sys.executable, "-c", _ASK, str(root_pid)]
        try:
            asked = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S)
        except subprocess.TimeoutExpired:
            asked = None
        if asked is not None and asked.returncode == 0:
            return _parsed(asked.stdout), True
    libc = ctypes.CDLL(None)
    seen: dict[tuple[str, int], set[int]] = {}
    for row in _rows(_SETS):
        number = int(row[1])
        every = {libc.semctl(number, one, _GETPID, 0) for one in range(int(row[3]))}
        seen["sem", number] = every
    for row in _rows(_QUEUES):
        seen["msg", int(row[1])] = {int(row[5]), int(row[6])}
    return seen, False


def _parsed(text: str) -> dict[tuple[str, int], set[int]]:
    found: dict[tuple[str, int], set[int]] = {}
    for line in text.splitlines():
        kind, number, *pids = line.split()
        found[kind, int(number)] = set(map(int, pids))
    return found


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""  # it has ended


def _began_s(pid: int) -> float:
    """Wall clock; the kernel's times of sets and queues are in whole seconds."""
    try:
        ticks = procfs.started_ticks(pid)
    except OSError:
        return time.time()
    lives_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - lives_s - _CLOCK_SLACK_S
