# SPDX-License-Identifier: Apache-2.0
"""How a file looks: what stat says of it, and whether that is what it was."""

from __future__ import annotations

import os
import stat

from devproxy.checkpoint.files.records import FileEntry

# [dev, ino, size, mtime_ns, ctime_ns, mode], or None for a name that is not there
State = list[int] | None


def lstat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def state_of(st: os.stat_result | None) -> State:
    if st is None:
        return None
    if stat.S_ISDIR(st.st_mode):  # its size and times are those of its children
        return [st.st_dev, st.st_ino, 0, 0, 0, st.st_mode]
    return [st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns, st.st_mode]


def is_as_at_the_cut(entry: FileEntry) -> bool:
    """True when nobody can have touched the file since. Device numbers change with a reboot."""
    st = lstat(entry.path)
    return (
        st is not None
        and not entry.mapped
        and (st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns)
        == (entry.ino, entry.size, entry.mtime_ns, entry.ctime_ns)
    )
