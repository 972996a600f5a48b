# SPDX-License-Identifier: Apache-2.0
"""Files and kernel objects that are obstacles open as well as mapped."""

from __future__ import annotations

import os
import stat

from devproxy.checkpoint.dumpable.tree import Process, Tree, obstacle
from devproxy.checkpoint.dumpable.verdict import Obstacle

# null, zero, full, random, urandom, kmsg
MEMORY_DEVICES = {os.makedev(1, minor) for minor in (3, 5, 7, 8, 9, 11)}

_WHY_NOT = {
    "io_uring": (
        "io_uring cannot be dumped",
        "switch it off in that program; libraries fall back to epoll where io_uring_setup fails",
    ),
    "perf_event": ("performance counters cannot be dumped", "checkpoint without the profiler"),
    "userfaultfd": ("userfaultfd cannot be dumped", "run the job without that feature"),
}


def anonymous_obstacle(process: Process, thing: str, kind: str) -> Obstacle:
    """kind: of an anonymous inode, as "io_uring"."""
    why, remedy = _WHY_NOT.get(
        kind, ("CRIU cannot dump it", "run the program without that feature")
    )
    return obstacle(process, thing, kind, why, remedy)


def device_obstacle(process: Process, thing: str, target: str) -> Obstacle:
    if target.startswith("/dev/nvidia"):
        remedy = "the process reaches the real driver past the device proxy: run it with devproxy's libraries"
        return obstacle(process, thing, target, "the state of a device cannot be dumped", remedy)
    remedy = "close it in the program before the checkpoint"
    return obstacle(process, thing, target, "the state of a device cannot be dumped", remedy)


def secret_obstacle(process: Process, thing: str) -> Obstacle:
    why = "not even the kernel may read it"
    return obstacle(process, thing, "memfd_secret memory", why, "run without it")


def check_ghost(
    tree: Tree, process: Process, thing: str, target: str, info: os.stat_result, ghost_limit: int
) -> None:
    """st_nlink > 0: it has another name. CRIU makes a temporary third one and, where the job goes on, removes it again."""
    if stat.S_ISREG(info.st_mode) and info.st_nlink:
        what = f"{target.removesuffix(' (deleted)')} is deleted, open, and has another name (a hard link)"
        why, remedy = "CRIU cannot open it again at restore", "close it, or keep the name"
        tree.refusals.append(obstacle(process, thing, what, why, remedy))
        return
    size = info.st_blocks * 512
    if stat.S_ISREG(info.st_mode) and not info.st_nlink and size > ghost_limit:
        name = target.removesuffix(" (deleted)")
        tree.refusals.append(
            obstacle(
                process,
                thing,
                f"{name} is deleted, and open with {size / 2**20:.1f} MiB",
                f"CRIU takes at most {ghost_limit / 2**20:.0f} MiB of a deleted file along",
                "keep the file until the program has closed it",
            )
        )
