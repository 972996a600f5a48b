# SPDX-License-Identifier: Apache-2.0
"""What processes have mapped."""

from __future__ import annotations

import os
import stat

from devproxy import procfs
from devproxy.checkpoint.dumpable.objects import (
    MEMORY_DEVICES,
    anonymous_obstacle,
    check_ghost,
    device_obstacle,
    secret_obstacle,
)
from devproxy.checkpoint.dumpable.tree import Process, Tree, obstacle


def check_mappings(tree: Tree, process: Process, ghost_limit: int) -> None:
    seen: set[tuple[int, int, str]] = set()
    # System V segments are "/SYSV00000000 (deleted)".
    for one in procfs.mappings(process.pid, b" (deleted)", b" /dev/", b" anon_inode:"):
        key = (one.device, one.inode, one.path)
        if key not in seen and (one.deleted or one.path.startswith(("/dev/", "anon_inode:"))):
            seen.add(key)
            _check_mapping(tree, process, one, ghost_limit)


def _check_mapping(tree: Tree, process: Process, mapping: procfs.Mapping, limit: int) -> None:
    thing, path = f"mapping {mapping.range}", mapping.path
    if path.startswith("/SYSV"):
        tree.refusals.append(
            obstacle(
                process,
                thing,
                "System V shared memory",
                "CRIU dumps it only in an IPC namespace",
                "use POSIX shared memory",
            )
        )
    elif path.startswith("/secretmem"):
        tree.refusals.append(secret_obstacle(process, thing))
    elif path.startswith("anon_inode:"):
        kind = path[len("anon_inode:") :].strip("[]")
        tree.refusals.append(anonymous_obstacle(process, thing, kind))
    elif path.startswith("/[aio]"):
        # Restored through /dev/null, which a process in another root may not have. A child has its parent's mapping too.
        if not os.path.exists(f"/proc/{process.pid}/root/dev/null"):
            what, why = "an AIO context, in a root without /dev/null", "CRIU cannot make it again at restore"  # fmt: skip
            remedy = "make /dev/null in that root (mknod), or call io_setup after the fork"
            tree.refusals.append(obstacle(process, thing, what, why, remedy))
    elif path.startswith(("/memfd:", "/dev/zero")):
        return  # anonymous shared memory is called /dev/zero (deleted)
    elif mapping.deleted:
        try:
            info = os.stat(f"/proc/{process.pid}/map_files/{mapping.map_file}")
        except OSError:
            return
        if stat.S_ISREG(info.st_mode):
            check_ghost(tree, process, thing, path, info, limit)
    elif not path.startswith("/dev/shm/"):
        try:
            info = os.stat(f"/proc/{process.pid}/map_files/{mapping.map_file}")
        except OSError:
            return
        if not stat.S_ISREG(info.st_mode) and info.st_rdev not in MEMORY_DEVICES:
            tree.refusals.append(device_obstacle(process, thing, path))
