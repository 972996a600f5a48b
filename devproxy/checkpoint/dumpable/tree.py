# SPDX-License-Identifier: Apache-2.0
"""Processes, and what a walk over their tree collects for the checks that look at all of it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from devproxy import procfs
from devproxy.checkpoint.dumpable.verdict import Obstacle


@dataclass(frozen=True)
class Process:
    """pid: as we see it; its own number is status.inner_pid."""

    pid: int
    status: procfs.Status


@dataclass(frozen=True)
class Socket:
    process: Process
    fd: int
    inode: int


class Tree:
    """What one walk over the tree has collected."""

    def __init__(self, root_pid: int) -> None:
        self.root_pid = root_pid
        self.processes: list[Process] = []
        self.sockets: list[Socket] = []
        self.pipes: dict[int, list[tuple[Process, int]]] = {}
        self.terminals: list[tuple[Process, int, int]] = []  # process, fd, index of the pty
        self.masters: set[int] = set()
        self.refusals: list[Obstacle] = []
        self.warnings: list[Obstacle] = []
        self._memfd_device: int | None = None

    def memfd_device(self) -> int:
        """st_dev of every memfd of normal pages."""
        if self._memfd_device is None:
            fd = os.memfd_create("devproxy", os.MFD_CLOEXEC)
            self._memfd_device = os.fstat(fd).st_dev
            os.close(fd)
        return self._memfd_device


def obstacle(
    process: Process, thing: str, what: str, why: str, remedy: str = "", transient: bool = False
) -> Obstacle:
    status = process.status
    return Obstacle(status.inner_pid, process.pid, status.name, thing, what, why, remedy, transient)


def process_of(pid: int) -> Process | None:
    status = procfs.status(pid)
    return None if status is None else Process(pid, status)


def name_of(pid: int) -> str:
    status = procfs.status(pid)
    return status.name if status else "gone"
