# SPDX-License-Identifier: Apache-2.0
"""System V semaphores: no descriptor names them, and CRIU knows them only in an IPC namespace."""

from __future__ import annotations

import ctypes
import subprocess
import sys

from devproxy.checkpoint.dumpable.tree import Tree, obstacle

_GETPID = 11  # semctl(2)
_MOST_LOOKED_AT = 256  # of one set
_ASK_S = 10

# Exits with 0 where the kernel says there that nobody of that PID namespace was the last to use one of the set. setns(2)
# puts only children into a PID namespace.
_ASK = """
import ctypes, os, sys
pid, number, count, getpid = map(int, sys.argv[1:])
libc = ctypes.CDLL(None)
if libc.setns(os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY), 0x20000000) != 0:
    sys.exit(2)
child = os.fork()
if child == 0:
    os._exit(int(any(libc.semctl(number, one, getpid, 0) != 0 for one in range(count))))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def check_semaphores(tree: Tree) -> None:
    """A set is the job's where one of its processes was the last to use one of it."""
    processes = {process.pid: process for process in tree.processes}
    try:
        with open("/proc/sysvipc/sem", encoding="ascii") as file:
            rows = [line.split() for line in file.readlines()[1:]]
    except OSError:
        return  # a kernel without them
    libc = ctypes.CDLL(None)
    for row in rows:
        number, count = int(row[1]), int(row[3])
        looked_at = min(count, _MOST_LOOKED_AT)
        users = {libc.semctl(number, one, _GETPID, 0) for one in range(looked_at)}
        for pid in sorted(users & processes.keys()):
            if not _is_users_own(pid, number, looked_at):
                continue
            tree.refusals.append(
                obstacle(
                    processes[pid],
                    f"semaphore set {number}",
                    f"{count} System V semaphore(s)",
                    "they go into no image, so a restore would lose their state",
                    "use POSIX semaphores",
                )
            )
            break


def _is_users_own(pid: int, number: int, count: int) -> bool:
    """The kernel keeps the number of a user that has died, and a process of the job may have got the same number since.
    Within the process's own PID namespace such a user has no number."""
    command = [sys.executable, "-c", _ASK, *map(str, (pid, number, count, _GETPID))]
    try:
        return subprocess.run(command, capture_output=True, timeout=_ASK_S).returncode != 0
    except subprocess.TimeoutExpired:
        return True
