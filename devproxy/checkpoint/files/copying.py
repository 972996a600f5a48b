# SPDX-License-Identifier: Apache-2.0
"""The bytes of files: copied with their holes, compared, and made durable."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat

_FICLONE = 0x40049409


def copy_content(source: int, target: int, size_bytes: int) -> None:
    """`size_bytes` of one descriptor into another: by reflink, else extent by extent, holes stay holes."""
    try:
        if os.fstat(source).st_size == size_bytes:
            fcntl.ioctl(target, _FICLONE, source)
            return
    except OSError:
        pass
    os.ftruncate(target, size_bytes)
    at = 0
    while at < size_bytes:
        try:
            data = os.lseek(source, at, os.SEEK_DATA)
            end = min(os.lseek(source, data, os.SEEK_HOLE), size_bytes)
        except OSError as e:
            if e.errno == errno.ENXIO:
                return
            data, end = at, size_bytes
        at = data
        while at < end:
            done = _copy_some(source, target, at, end - at)
            if done == 0:  # it became shorter meanwhile: the rest reads as zeros
                return
            at += done


def _copy_some(source: int, target: int, at: int, count: int) -> int:
    try:
        return os.copy_file_range(source, target, min(count, 1 << 30), at, at)
    except OSError as e:
        if e.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    block = os.pread(source, min(count, 4 << 20), at)
    view, to = memoryview(block), at
    while view:
        n = os.pwrite(target, view, to)
        view, to = view[n:], to + n
    return len(block)


def new_file(name: str, folder: int) -> int:
    """A file that was not there, in a folder by its descriptor. Open for reading and writing, for us alone."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, 0o600, dir_fd=folder)


def open_same(name: str, folder: int, st: os.stat_result, flags: int) -> int:
    """The file that `st` is of, or OSError: another may have taken its name, also a link or a FIFO."""
    more = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(name, flags | more, dir_fd=folder)
    try:
        check_same(fd, name, (st.st_dev, st.st_ino))
    except OSError:
        os.close(fd)
        raise
    return fd


def check_same(fd: int, name: str, file: tuple[int, int]) -> None:
    """OSError where it is not that regular file, by its device and inode. A new FIFO may get the number of a file that went."""
    there = os.fstat(fd)
    if (there.st_dev, there.st_ino) != file or not stat.S_ISREG(there.st_mode):
        raise OSError(errno.ESTALE, "another file took its place meanwhile", name)


def copy_to(source: str, target: int, *, folder: int | None = None) -> None:
    """All of a file, by its name in `folder`, to a descriptor."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO may have come
    fd = os.open(source, flags, dir_fd=folder)
    try:
        copy_content(fd, target, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def same_start(a: int, b: int, count: int) -> bool:
    """True when both files begin with the same `count` bytes."""
    at = 0
    while at < count:
        want = min(count - at, 1 << 20)
        left, right = os.pread(a, want, at), os.pread(b, want, at)
        if left != right or not left:
            return False
        at += len(left)
    return True


def sync_around(fd: int) -> None:
    """All of the file system that the descriptor is on, content and names. Raises OSError where some could not be written."""
    own = -1
    try:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_PATH:
            fd = own = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        if own >= 0:
            os.close(own)


def sync_folder(folder: int) -> None:
    """One that is open with O_PATH."""
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.fsync(fd)
    except OSError:
        pass  # not every file system knows it; the content itself was synced
    finally:
        os.close(fd)
