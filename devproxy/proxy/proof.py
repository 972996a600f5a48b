# SPDX-License-Identifier: Apache-2.0
"""Looks at the job's processes while they run: does any of them hold the device itself?

A job process holds the device if it can touch device memory or talk to a device node. So for every process of the
job's tree we count its mappings in the device address ranges (each must be PROT_NONE), its descriptors of
/dev/nvidia*, and its descriptors and mappings of files that are a server's own device memory.
"""

from __future__ import annotations

import os

from devproxy import layout, procfs

FIRST_LOOKS = 10
FIRST_PAUSE_S = 0.5
PAUSE_S = 2.0


class Proof:
    """Counts over all looks. The job never held the device if `violations` is empty."""

    def __init__(self, server_pids: list[int]) -> None:
        self.server_pids = server_pids
        self.looks = 0
        self.processes: set[int] = set()
        self.device_ranges = 0  # the most that were seen at once, over all processes
        self.device_nodes = 0
        self.violations: set[str] = set()

    def pause_s(self) -> float:
        """Seconds until the next look: often at first, when the job sets itself up."""
        return FIRST_PAUSE_S if self.looks < FIRST_LOOKS else PAUSE_S

    def look(self, pids: list[int]) -> None:
        server_files = set[tuple[int, int]]().union(*map(_memory_files, self.server_pids))
        ranges = 0
        for pid in pids:
            ranges += self._look_at_maps(pid, server_files)
            self._look_at_descriptors(pid, server_files)
        self.device_ranges = max(self.device_ranges, ranges)
        self.processes.update(pids)
        self.looks += 1

    def _look_at_maps(self, pid: int, server_files: set[tuple[int, int]]) -> int:
        ranges = 0
        for one in procfs.mappings(pid):
            if layout.in_device_range(one.start):
                ranges += 1
                if not one.mode.startswith("---"):
                    self.violations.add(f"process {pid} can touch device memory at {one.start:#x}")
            elif (one.device, one.inode) in server_files:
                self.violations.add(f"process {pid} maps a server's memory at {one.start:#x}")
        return ranges

    def _look_at_descriptors(self, pid: int, server_files: set[tuple[int, int]]) -> None:
        for fd, target in _descriptors(pid):
            if target.startswith("/dev/nvidia"):
                self.device_nodes += 1
                self.violations.add(f"process {pid} holds {target}")
            elif target.startswith("/memfd:") and _identity(pid, fd) in server_files:
                self.violations.add(f"process {pid} holds a server's memory ({target})")

    def as_json(self) -> dict[str, object]:
        return {
            "looks": self.looks,
            "processes": len(self.processes),
            "device_ranges": self.device_ranges,
            "device_nodes": self.device_nodes,
            "held_device": bool(self.violations),
            "violations": sorted(self.violations),
        }


def _descriptors(pid: int) -> list[tuple[int, str]]:
    try:
        return procfs.descriptors(pid)
    except OSError:
        return []


def _identity(pid: int, fd: int) -> tuple[int, int] | None:
    try:
        info = os.stat(f"/proc/{pid}/fd/{fd}")
    except OSError:
        return None
    return info.st_dev, info.st_ino


def _memory_files(server_pid: int) -> set[tuple[int, int]]:
    """The anonymous files (memfd) that the server holds or maps: its device memory is among them."""
    maps = procfs.mappings(server_pid, b" /memfd:")
    files = {(one.device, one.inode) for one in maps if one.path.startswith("/memfd:")}
    for fd, target in _descriptors(server_pid):
        if target.startswith("/memfd:") and (identity := _identity(server_pid, fd)):
            files.add(identity)
    return files
