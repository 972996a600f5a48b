# SPDX-License-Identifier: Apache-2.0
"""Which files a process has open for writing, or mapped shared and writable."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from devproxy import procfs
from devproxy.checkpoint.files.look import lstat


def open_for_writing(pid: int) -> Iterator[tuple[str, bool]]:
    """Regular files that have a name: (path, whether it is mapped)."""
    try:
        descriptors = procfs.descriptors(pid)
    except OSError:
        return  # it has ended
    for number, path in descriptors:
        info = procfs.fdinfo(pid, number) if path.startswith("/") else None
        if info is None or info.access == os.O_RDONLY:
            continue
        try:
            there = os.stat(f"/proc/{pid}/fd/{number}")
        except OSError:
            continue
        if _is_named(path, there.st_dev, there.st_ino):
            yield path, False
    for one in procfs.mappings(pid, b" rw-s "):
        if one.path.startswith("/") and _is_named(one.path, one.device, one.inode):
            yield one.path, True


def _is_named(path: str, device: int, inode: int) -> bool:
    st = lstat(path)
    return st is not None and stat.S_ISREG(st.st_mode) and (st.st_dev, st.st_ino) == (device, inode)
