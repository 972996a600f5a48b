# SPDX-License-Identifier: Apache-2.0
"""Pipes of packets, and pipes that somebody outside of the tree holds too."""

from __future__ import annotations

import os

from devproxy import procfs
from devproxy.checkpoint.dumpable.tree import Process, Tree, name_of, obstacle


def check_pipes(tree: Tree, known: frozenset[int]) -> None:
    for holders in tree.pipes.values():
        process, fd = next((one for one in holders if _has_packets(*one)), (None, 0))
        if process is not None:
            what, why = "a pipe of packets (O_DIRECT)", "CRIU does not keep where each packet ends"
            remedy = "use a socket pair of type SOCK_SEQPACKET"
            tree.refusals.append(obstacle(process, f"fd {fd}", what, why, remedy))
    unknown = {inode for inode in tree.pipes if inode not in known}
    if not unknown:
        return
    for inode, outsider in _holders_outside(tree, unknown).items():
        process, fd = tree.pipes[inode][0]
        modes = {_access(p.pid, n) for p, n in tree.pipes[inode]}
        what = f"a pipe that process {outsider} ({name_of(outsider)}) outside of the job holds too"
        if len(modes) > 1 or os.O_RDWR in modes:
            why = "after a restore the two sides are no longer connected"
            tree.warnings.append(obstacle(process, f"fd {fd}", what, why))
        else:
            end = "end of file" if modes == {os.O_RDONLY} else "a broken pipe"
            why = f"after a restore the job would see {end} on it"
            remedy = "use a FIFO in the file system, or the job's standard streams"
            tree.refusals.append(obstacle(process, f"fd {fd}", what, why, remedy))


def _holders_outside(tree: Tree, inodes: set[int]) -> dict[int, int]:
    """inode -> a process outside of the tree that holds it."""
    inside = {process.pid for process in tree.processes}
    marks = {f"pipe:[{inode}]": inode for inode in inodes}
    found: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in inside or _is_new(tree, name):
            continue
        try:
            descriptors = procfs.descriptors(name)
        except OSError:
            continue
        for _, target in descriptors:
            # One that has ended since holds nothing; it may have been a worker that the job had just forked.
            if target in marks and os.path.exists(f"/proc/{name}"):
                found.setdefault(marks[target], int(name))
    return found


def _is_new(tree: Tree, pid: str) -> bool:
    """A process of the job that was not there yet when the tree was listed: its PID namespace is the job's own."""
    try:
        spaces = [os.readlink(f"/proc/{one}/ns/pid") for one in (pid, tree.root_pid, "self")]
    except OSError:
        return False
    return spaces[0] == spaces[1] != spaces[2]


def _has_packets(process: Process, fd: int) -> bool:
    info = procfs.fdinfo(process.pid, fd)
    return info is not None and bool(info.flags & os.O_DIRECT)


def _access(pid: int, fd: int) -> int:
    info = procfs.fdinfo(pid, fd)
    return os.O_RDWR if info is None else info.access
