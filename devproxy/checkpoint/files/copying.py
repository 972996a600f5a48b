"""The bytes of files: copied with their holes, compared, and made durable."""

from __future__ import annotations

import errno
import fcntl
import os

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


def copy_file(source: str, target: str) -> None:
    a = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        b = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            copy_content(a, b, os.fstat(a).st_size)
        finally:
            os.close(b)
    finally:
        os.close(a)


def same_start(a: str, b: str, count: int) -> bool:
    """True when both files begin with the same `count` bytes."""
    with open(a, "rb", buffering=0) as x, open(b, "rb", buffering=0) as y:
        while count > 0:
            left, right = x.read(min(count, 1 << 20)), y.read(min(count, 1 << 20))
            if left != right or not left:
                return False
            count -= len(left)
    return True


def sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError:
        pass  # not every file system knows it; the content itself was synced
    finally:
        os.close(fd)
