# SPDX-License-Identifier: Apache-2.0
"""A flat profile of other processes' threads, by perf_event_open(2)'s clock: a machine with a GPU may have no profiler.

A sample is an address. It is counted for the library that it lies in; which function of it, whoever has the library's
symbols can find out from the offsets that come most often.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import mmap
import os
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from devproxy import procfs

PERF_EVENT_OPEN = 298  # x86-64
SOFTWARE, CPU_CLOCK, SAMPLE_IP, RECORD_SAMPLE = 1, 0, 1, 9  # linux/perf_event.h
ATTRIBUTES = struct.Struct(
    "=IIQQQQQ"
)  # type, size, config, period, sample type, read format, flags
ATTRIBUTE_BYTES = 128
PERIOD_NS = 250_000
PAGES = 32  # of each thread's ring, a power of two
HEAD, TAIL = 1024, 1032  # offsets in perf_event_mmap_page

_libc = ctypes.CDLL(None, use_errno=True)


class Thread:
    """One thread under the clock. Raises OSError where the kernel does not let us."""

    def __init__(self, pid: int, tid: int) -> None:
        self.pid = pid
        self.name = Path(f"/proc/{pid}/task/{tid}/comm").read_text().strip()
        words = ATTRIBUTES.pack(SOFTWARE, ATTRIBUTE_BYTES, CPU_CLOCK, PERIOD_NS, SAMPLE_IP, 0, 0)
        attributes = ctypes.create_string_buffer(words, ATTRIBUTE_BYTES)
        self.fd = _libc.syscall(PERF_EVENT_OPEN, attributes, tid, -1, -1, 0)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.ring = mmap.mmap(self.fd, (1 + PAGES) * mmap.PAGESIZE)
        self.counts: collections.Counter[tuple[int, bool]] = collections.Counter()

    def take(self) -> None:
        """Counts what the kernel has written since."""
        (head,) = struct.unpack_from("=Q", self.ring, HEAD)
        (tail,) = struct.unpack_from("=Q", self.ring, TAIL)
        size = PAGES * mmap.PAGESIZE
        while tail < head:
            at = mmap.PAGESIZE + tail % size  # a record of ours has 16 bytes, so none wraps
            kind, mode, length = struct.unpack_from("=IHH", self.ring, at)
            if kind == RECORD_SAMPLE:
                (address,) = struct.unpack_from("=Q", self.ring, at + 8)
                self.counts[address, mode & 7 == 1] += 1
            tail += max(8, length)
        struct.pack_into("=Q", self.ring, TAIL, tail)

    def close(self) -> None:
        self.ring.close()
        os.close(self.fd)


def profile(pids: Iterable[int], seconds: float) -> dict[str, Any]:
    """By thread's name: how much of the time it ran, the libraries that it ran in, and the addresses that came most."""
    threads, libraries = [], {}
    for pid in pids:
        libraries[pid] = executable_maps(pid)
        for tid in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                threads.append(Thread(pid, int(tid)))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.02)
        for thread in threads:
            thread.take()
    found: dict[str, Any] = {}
    for thread in threads:
        thread.close()
        total = sum(thread.counts.values())
        if total * PERIOD_NS < 0.02e9 * seconds:
            continue
        where: collections.Counter[str] = collections.Counter()
        hot: collections.Counter[str] = collections.Counter()
        for (address, in_kernel), count in thread.counts.items():
            name, offset = ("kernel", address) if in_kernel else place(libraries[thread.pid], address)  # fmt: skip
            where[name] += count
            hot[f"{name}+{offset & ~63:#x}"] += count
        found[f"{thread.name} {thread.pid}"] = {
            "busy": round(total * PERIOD_NS / 1e9 / seconds, 3),
            "libraries_%": {name: round(100 * n / total, 1) for name, n in where.most_common(12)},
            "hottest_%": {name: round(100 * n / total, 1) for name, n in hot.most_common(90)},
        }
    return found


def executable_maps(pid: int) -> list[tuple[int, int, int, str]]:
    """Begin, end, offset in the file, its name."""
    return [
        (one.start, one.end, one.offset, os.path.basename(one.path) or "memory")
        for one in procfs.mappings(pid)
        if one.mode[2] == "x"
    ]


def place(maps: list[tuple[int, int, int, str]], address: int) -> tuple[str, int]:
    for begin, end, offset, name in maps:
        if begin <= address < end:
            return name, address - begin + offset
    return "elsewhere", address
