"""Looks at the job's processes while they run: does any of them hold the device itself?

A job process holds the device if it can touch device memory or talk to a device node. So for every process of the
job's tree we count its mappings in the device address ranges (each must be PROT_NONE), its descriptors of
/dev/nvidia*, and its descriptors and mappings of files that are a server's own device memory.
"""

from __future__ import annotations

import os

from devproxy import layout

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
        for start, protection, file, _ in _maps(pid):
            if layout.in_device_range(start):
                ranges += 1
                if protection != "---":
                    self.violations.add(f"process {pid} can touch device memory at {start:#x}")
            elif file in server_files:
                self.violations.add(f"process {pid} maps a server's memory at {start:#x}")
        return ranges

    def _look_at_descriptors(self, pid: int, server_files: set[tuple[int, int]]) -> None:
        folder = f"/proc/{pid}/fd"
        for name in _list(folder):
            try:
                target = os.readlink(f"{folder}/{name}")
            except OSError:
                continue
            if target.startswith("/dev/nvidia"):
                self.device_nodes += 1
                self.violations.add(f"process {pid} holds {target}")
            elif target.startswith("/memfd:") and _identity(f"{folder}/{name}") in server_files:
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


def _list(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _identity(path: str) -> tuple[int, int] | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino


def _maps(pid: int) -> list[tuple[int, str, tuple[int, int], str]]:
    """(start address, "rwx" letters, (device, inode), name) of each mapping; empty when the process is gone."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            lines = file.readlines()
    except OSError:
        return []
    found = []
    for line in lines:
        part = line.split(None, 5)
        major, minor = part[3].split(":")
        file_id = (os.makedev(int(major, 16), int(minor, 16)), int(part[4]))
        start = int(part[0].split("-")[0], 16)
        found.append((start, part[1][:3], file_id, part[5].strip() if len(part) > 5 else ""))
    return found


def _memory_files(server_pid: int) -> set[tuple[int, int]]:
    """The anonymous files (memfd) that the server holds or maps: its device memory is among them."""
    files = {file for _, _, file, name in _maps(server_pid) if name.startswith("/memfd:")}
    folder = f"/proc/{server_pid}/fd"
    for name in _list(folder):
        try:
            if os.readlink(f"{folder}/{name}").startswith("/memfd:"):
                identity = _identity(f"{folder}/{name}")
                if identity:
                    files.add(identity)
        except OSError:
            pass
    return files
