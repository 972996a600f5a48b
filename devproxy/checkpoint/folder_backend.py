# SPDX-License-Identifier: Apache-2.0
"""A store in a folder of this machine, or of a file server that it has mounted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import threading
import time
from collections.abc import Iterator

from devproxy import procfs
from devproxy.checkpoint.backend import Entry, classify, named
from devproxy.checkpoint.errors import StoreError, StoreGone
from devproxy.errors import Refused

# What a crash leaves here is removed by gc: at once where the writer is known to be dead, else when it is older than this.
LEFTOVER_S = 3600.0
_TMP = "tmp"
_ALIGN = 4096
_DIRECT_BYTES = 4 << 20
_DIRECT_FROM = 256 << 10  # smaller reads are not worth a request of their own


class LocalBackend:
    """A folder: 0700 folders, 0600 files, written under tmp/ and renamed."""

    clocks_ns = 0

    def __init__(self, root: str) -> None:
        self.root = root
        self.url = f"file://{root}"
        self._folders: set[str] = set()
        self._mu = threading.Lock()
        self._serial = 0

    def prepare(self, make: bool = True) -> None:
        """Makes the folders. Raises Refused for another user's store, StoreError when it cannot be made."""
        for folder in ("", "packs"):
            try:
                facts = os.stat(os.path.join(self.root, folder))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise classify("open", f"store {self.url}", error) from error
            if not stat.S_ISDIR(facts.st_mode):
                raise Refused(
                    f"store {self.url}: {folder or 'it'} is not a folder", "give another --store"
                )
            # A root that is shared and in which this user may write is no reason; packs/ is the store itself.
            if folder == "packs" and facts.st_uid != os.geteuid():
                raise Refused(f"store {self.url} belongs to user {facts.st_uid}, not to you",
                              "give another --store")  # fmt: skip
        if not make:
            return
        with named("open", f"store {self.url}"):
            for folder in (_TMP, "packs", "images", "jobs", "uploads", "gc"):
                try:
                    self._folder(folder)
                except FileNotFoundError as error:  # in /proc, no folder can be made
                    raise classify("open", f"store {self.url}", error) from error

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def _folder(self, folder: str) -> None:
        if folder not in self._folders:
            os.makedirs(self._path(folder), mode=0o700, exist_ok=True)
            self._folders.add(folder)

    def _gone(self, stage: str, obj: str) -> StoreGone:
        return StoreGone(stage, f"{obj} in store {self.url}", "its folder was removed")

    def list(self, folder: str) -> list[Entry]:
        found: list[Entry] = []
        with named("list", f"{folder}/ in store {self.url}"):
            try:
                with os.scandir(self._path(folder)) as entries:
                    for entry in entries:
                        try:
                            facts = entry.stat()
                            size = 0 if stat.S_ISDIR(facts.st_mode) else facts.st_size
                            found.append(Entry(entry.name, size, facts.st_mtime_ns))
                        except FileNotFoundError:
                            continue  # removed since
            except FileNotFoundError:
                if not os.path.isdir(self.root):
                    raise self._gone("list", f"{folder}/") from None
        return found

    def read(self, name: str, most_bytes: int | None = None) -> bytes:
        with named("read", f"{name} in store {self.url}"), open(self._open(name), "rb") as file:
            return file.read() if most_bytes is None else file.read(most_bytes + 1)

    def _open(self, name: str) -> int:
        """What is no file, a folder or a FIFO that somebody put there, is no object: as if it were not there."""
        path = self._path(name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
                raise FileNotFoundError(errno.ENOENT, "it is no file", path) from None
            raise
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "it is no file", path)

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        return bytes(self.view_range(name, offset, length))

    def view_range(self, name: str, offset: int, length: int) -> memoryview:
        with named("read", f"{name} in store {self.url}"):
            if length >= _DIRECT_FROM:
                direct = _read_direct(self._path(name), offset, length)
                if direct is not None:
                    return direct
            fd = self._open(name)
            try:
                data = os.pread(fd, length, offset)
                while 0 < len(data) < length:
                    more = os.pread(fd, length - len(data), offset + len(data))
                    if not more:
                        break
                    data += more
                return memoryview(data)
            finally:
                os.close(fd)

    def has_lost(self, error: StoreError) -> bool:
        """A bad sector. Some network file systems say the same of a server that does not answer."""
        return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO

    def write(self, name: str, data: bytes, *, stage: str, durable: bool = False) -> None:
        writer = LocalObject(self, name, stage, durable, direct=False)
        try:
            writer.append(data)
            writer.finish()
        except BaseException:
            writer.abandon()
            raise
        if durable:
            folder = os.path.dirname(name)
            self.sync(folder)
            self.sync(os.path.dirname(folder))

    def create(self, name: str, data: bytes, *, stage: str) -> bool:
        temporary = self._temporary()
        try:
            with named(stage, f"{name} in store {self.url}"):
                try:
                    self._folder(os.path.dirname(name))
                    fd = os.open(
                        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
                    )
                    with open(fd, "wb") as file:
                        file.write(data)
                        file.flush()
                        os.fsync(file.fileno())
                    os.link(temporary, self._path(name))
                    return True
                except FileExistsError:
                    return False
                except FileNotFoundError:
                    raise self._gone(stage, name) from None
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def remove(self, name: str) -> None:
        with named("remove", f"{name} in store {self.url}"):
            path = self._path(name)
            try:
                os.unlink(path)
            except FileNotFoundError:
                return
            folder = os.path.dirname(name)
            if folder.count("/"):  # images/<id>: no empty folder stays
                with contextlib.suppress(OSError):
                    os.rmdir(os.path.dirname(path))
                    self._folders.discard(folder)

    def new_object(self, name: str, *, stage: str) -> LocalObject:
        return LocalObject(self, name, stage, durable=True, direct=True)

    def sync(self, folder: str) -> None:
        with named("sync", f"{folder}/ in store {self.url}"):
            fd = os.open(self._path(folder), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def sweep(self) -> int:
        removed = 0
        before = time.time() - LEFTOVER_S
        for entry in self.list(_TMP):
            path = self._path(f"{_TMP}/{entry.name}")
            try:
                lives = _writer_lives(entry.name)
                if lives is None:
                    # A file that is being written has a recent mtime: a pack is 64 MiB, not an hour.
                    lives = os.stat(path).st_mtime >= before
                if not lives:
                    os.unlink(path)
                    removed += 1
            except FileNotFoundError:
                continue
        return removed

    def _temporary(self) -> str:
        with self._mu:
            self._serial += 1
            serial = self._serial
        return self._path(f"{_TMP}/{_namespace()}.{_process()}.{id(self):x}.{serial}")


def _namespace() -> str:
    """Which pids are meant: the boot and the pid namespace. "?" where the system does not say."""
    boot = procfs.boot_id()[:8]
    try:
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}" if boot else "?"
    except OSError:
        return "?"


def _process() -> str:
    """This one: its pid, and its start, since pids are used again."""
    pid = os.getpid()
    try:
        return f"{pid}-{procfs.started_ticks(pid)}"
    except OSError:
        return str(pid)


def _writer_lives(temporary: str) -> bool | None:
    """None where nothing is known of the writer: another boot or pid namespace. The clock has no say where something is."""
    namespace, process, *_ = temporary.split(".") + ["", ""]
    pid, _, started = process.partition("-")
    if namespace == "?" or namespace != _namespace() or not pid.isdigit():
        return None
    try:
        ticks = procfs.started_ticks(int(pid))
    except (FileNotFoundError, ProcessLookupError):
        return False
    except (OSError, ValueError):
        return None
    if not started:  # one of a version that did not write it
        return None
    return str(ticks) == started


class _Aligned(threading.local):
    """A page-aligned buffer per thread, as O_DIRECT wants it."""

    def __init__(self) -> None:
        self.area = mmap.mmap(-1, _DIRECT_BYTES + 2 * _ALIGN)


_aligned = _Aligned()


def _read_direct(path: str, offset: int, length: int) -> memoryview | None:
    """Past the page cache, into this thread's buffer. None where the file system does not do that."""
    if not 0 < length <= _DIRECT_BYTES:
        return None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_DIRECT)
    except FileNotFoundError:
        raise
    except OSError:
        return None
    try:
        start = offset // _ALIGN * _ALIGN
        size = -(-(offset + length - start) // _ALIGN) * _ALIGN
        area = memoryview(_aligned.area)
        try:
            have = os.preadv(fd, [area[:size]], start)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EISDIR, errno.ESPIPE):
                return None
            raise
        if have < offset + length - start:
            return None  # short: the plain way decides whether the file ends here
        return area[offset - start : offset - start + length]
    finally:
        os.close(fd)


class LocalObject:
    """Packs (direct) go past the page cache: a checkpoint would push the job's own files out of it, and where memory
    is given to the machine on demand (a VM), filling fresh cache pages costs several times the disk's own time.
    """

    def __init__(
        self, backend: LocalBackend, name: str, stage: str, durable: bool, direct: bool
    ) -> None:
        self.size = 0
        self._backend, self._name, self._stage, self._durable = backend, name, stage, durable
        self._label = f"{name} in store {backend.url}"
        self._temporary = backend._temporary()
        self._fd = -1
        self._buffer: mmap.mmap | None = None
        self._filled = 0
        with self._errors():
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(self._temporary, flags, 0o600)
            if direct and self._set_direct(True):
                self._buffer = mmap.mmap(-1, _DIRECT_BYTES)

    def _set_direct(self, on: bool) -> bool:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(
                self._fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT
            )
        except OSError:
            return False  # tmpfs and others
        return True

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with named(self._stage, self._label):
                yield
        except FileNotFoundError:
            raise self._backend._gone(self._stage, self._name) from None

    def append(self, data: bytes | memoryview) -> None:
        with self._errors():
            view = memoryview(data)
            self.size += len(view)
            if self._buffer is None:
                self._write(view)
                return
            while len(view):
                part = min(len(view), _DIRECT_BYTES - self._filled)
                self._buffer[self._filled : self._filled + part] = view[:part]
                self._filled += part
                view = view[part:]
                if self._filled == _DIRECT_BYTES:
                    self._drain()

    def _drain(self) -> None:
        """Writes what is buffered; after a piece that is not a whole number of blocks nothing may follow."""
        if self._buffer is None or not self._filled:
            return
        filled, self._filled = self._filled, 0
        with memoryview(self._buffer) as area, area[:filled] as view:
            if filled % _ALIGN:
                self._set_direct(False)
            self._write(view)

    def _write(self, view: memoryview) -> None:
        while len(view):
            try:
                done = os.write(self._fd, view)
            except OSError as error:
                # A file system that takes the flag and not the write, or a write that was short before.
                if (
                    error.errno != errno.EINVAL
                    or self._buffer is None
                    or not self._set_direct(False)
                ):
                    raise
                done = os.write(self._fd, view)
            view = view[done:]

    def finish(self) -> None:
        """Blocks until the bytes are on the disk (durable objects); then the name is there."""
        with self._errors():
            self._drain()
            if self._durable:
                os.fsync(self._fd)
            self._close()
            target = self._backend._path(self._name)
            try:
                os.rename(self._temporary, target)
            except FileNotFoundError:  # images/<id> is made with its first file
                if not os.path.isdir(self._backend.root):
                    raise
                os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
                os.rename(self._temporary, target)

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = -1
        self._buffer = None  # not closed: a traceback may still hold a slice of it

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            if self._fd >= 0:
                self._close()
            os.unlink(self._temporary)
