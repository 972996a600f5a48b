# SPDX-License-Identifier: Apache-2.0
"""Files on which a process holds a write lease (fcntl(2): F_SETLEASE).

Whoever opens one waits until its holder gives the lease back, and a frozen one never does; and the holder gets a signal
that may end it. So such a file is read through a copy of the holder's own descriptor.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from devproxy import procfs
from devproxy.errors import DevproxyError


@contextmanager
def borrowed(holder: int, path: str, device: int, inode: int) -> Iterator[int]:
    """The holder's descriptor, for reading. Precondition: the holder stands still, for it shares its file position, which
    is put back. Raises DevproxyError."""
    fd = _take(holder, device, inode)
    if fd < 0:
        raise DevproxyError(
            f"{path} cannot be read: process {holder} holds a lease on it (F_SETLEASE)",
            "let it open the file for reading too, or give the lease back; the job goes on, no image was made",
            object=path,
        )
    position = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        yield fd
    finally:
        os.lseek(fd, position, os.SEEK_SET)
        os.close(fd)


def _take(holder: int, device: int, inode: int) -> int:
    """-1: there is none that can be read."""
    try:
        for number, _ in procfs.descriptors(holder):
            there = os.stat(f"/proc/{holder}/fd/{number}")
            if (there.st_dev, there.st_ino) != (device, inode):
                continue
            fd = procfs.borrow(holder, number)
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
                return fd
            os.close(fd)
    except OSError:
        pass
    return -1
