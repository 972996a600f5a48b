# SPDX-License-Identifier: Apache-2.0
"""System V semaphores: no descriptor names them, and CRIU knows them only in an IPC namespace."""

from __future__ import annotations

import ctypes

from devproxy.checkpoint.dumpable.tree import Tree, obstacle

_GETPID = 11  # semctl(2)
_MOST_LOOKED_AT = 256  # of one set


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
        users = {libc.semctl(number, one, _GETPID, 0) for one in range(min(count, _MOST_LOOKED_AT))}
        for pid in sorted(users & processes.keys()):
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
