# SPDX-License-Identifier: Apache-2.0
"""Where a store's objects lie: a folder, or whatever fsspec reaches (s3://...).

Names are relative to the root, with "/". An object appears whole or not at all, and is never changed in place.
Every error is a StoreError that names stage, object and cause.
"""

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
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from devproxy import procfs
from devproxy.checkpoint.errors import StoreError, StoreFull, StoreGone
from devproxy.errors import DevproxyError, Refused

# What a crash leaves here is removed by gc: at once where the writer is known to be dead, else when it is older than this.
LEFTOVER_S = 3600.0
_TMP = "tmp"
_ALIGN = 4096
_DIRECT_BYTES = 4 << 20
_DIRECT_FROM = 256 << 10  # smaller reads are not worth a request of their own
_FULL = (errno.ENOSPC, errno.EDQUOT)
_GONE = (
    errno.EIO,
    errno.ESTALE,
    errno.ENOTCONN,
    errno.ECONNREFUSED,
    errno.ETIMEDOUT,
    errno.EROFS,
    errno.ENODEV,
)


@dataclass(frozen=True, slots=True)
class Entry:
    name: str  # without the folder
    size: int  # bytes; 0 for a folder
    written_ns: int = 0  # when it was written last, by the clock of the store; 0: not known


class ObjectWriter(Protocol):
    """One object being written. It can be seen under its name only after finish()."""

    size: int

    def append(self, data: bytes | memoryview) -> None: ...
    def finish(self) -> None: ...
    def abandon(self) -> None: ...


class Backend(Protocol):
    url: str
    clocks_ns: int  # by how much two times of it may be in the wrong order

    def prepare(self, make: bool = True) -> None:
        """Looks at the store's place, and makes what is missing there unless told not to."""
        ...

    def list(self, folder: str) -> list[Entry]: ...
    def read(self, name: str, most_bytes: int | None = None) -> bytes:
        """Of a longer one, most_bytes and one more. Raises FileNotFoundError, or StoreError."""
        ...

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """May be shorter at the end. Raises FileNotFoundError, or StoreError."""
        ...

    def view_range(self, name: str, offset: int, length: int) -> memoryview:
        """read_range without a copy: good until this thread reads from a backend again."""
        ...

    def has_lost(self, error: StoreError) -> bool:
        """Whether a read failed with it because what stood there is lost, and other reads may succeed."""
        ...

    def write(self, name: str, data: bytes, *, stage: str, durable: bool = False) -> None: ...
    def create(self, name: str, data: bytes, *, stage: str) -> bool:
        """Makes an object that did not exist; False when it does. Two callers never both get True."""
        ...

    def remove(self, name: str) -> None:
        """Removing what is not there is no error."""
        ...

    def new_object(self, name: str, *, stage: str) -> ObjectWriter: ...
    def sync(self, folder: str) -> None:
        """After this the names in the folder survive a power cut."""
        ...

    def sweep(self) -> int:
        """Removes half-written objects of the dead; their number."""
        ...


@contextlib.contextmanager
def named(stage: str, obj: str) -> Iterator[None]:
    """Turns what the system or a client library raises into the store's errors; FileNotFoundError passes."""
    try:
        yield
    except (DevproxyError, FileNotFoundError):
        raise
    except OSError as error:
        raise classify(stage, obj, error) from error
    except Exception as error:  # botocore, aiohttp and others have trees of their own
        cause = f"{type(error).__name__}: {error}"
        if _says_gone(cause):
            raise StoreGone(stage, obj, cause) from error
        raise StoreError(stage, obj, cause) from error


def _attempts() -> int:
    text = os.environ.get("AWS_MAX_ATTEMPTS") or str(ATTEMPTS)
    if not text.isdecimal() or int(text) == 0:
        raise Refused(f"AWS_MAX_ATTEMPTS is {text!r}", "give a number from 1 on, or unset it")
    return int(text)


def _says_gone(cause: str) -> bool:
    words = ("Connect", "Timeout", "timeout", "Endpoint", "endpoint", "NoSuchBucket")
    return any(word in cause for word in words)


def classify(stage: str, obj: str, error: OSError) -> StoreError:
    cause = error.strerror or str(error)
    if error.errno in _FULL:
        return StoreFull(stage, obj, cause)
    # s3fs makes an OSError without a number of what it does not know.
    unknown = error.errno is None and _says_gone(cause)
    if error.errno in _GONE or isinstance(error, ConnectionError | TimeoutError) or unknown:
        return StoreGone(stage, obj, cause)
    return StoreError(stage, obj, cause)


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


# Of S3. A request that brings no byte for so long is tried again, by botocore with its back-off, and all of that once more
# by s3fs: an endpoint that hangs is given up after a minute and a half. $AWS_MAX_ATTEMPTS sets another number.
ANSWER_S = 15.0
ATTEMPTS = 3
ROUNDS = 2
# A request as a whole: botocore has no limit for a peer that stops reading in the middle of an object.
REQUEST_S = 120.0
SLOWEST_BYTES_PER_S = 256 << 10  # slower than this is no progress


class FsspecBackend:
    """Any file system of fsspec. An object is put in one request, so it is whole or absent there as well.

    The time until an object is seen by a list must be zero: true for S3 since 2020 and for S3-like servers in use.
    """

    clocks_ns = 60_000_000_000  # a server may be many machines

    def __init__(self, url: str) -> None:
        import fsspec  # an import of half a second: not for stores in a folder

        self.url = url.rstrip("/")
        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        if url.startswith("s3://"):
            attempts = _attempts()
            options["config_kwargs"] = {
                "connect_timeout": ANSWER_S,
                "read_timeout": ANSWER_S,
                "retries": {"mode": "standard", "total_max_attempts": attempts},
            }
            if os.environ.get("AWS_ENDPOINT_URL"):
                options["endpoint_url"] = os.environ["AWS_ENDPOINT_URL"]
        try:
            fs, root = fsspec.core.url_to_fs(self.url, **options)
        except (ImportError, ValueError) as error:
            raise Refused(
                f"store {url} cannot be reached: {error}", "s3:// needs the package s3fs"
            ) from None
        if url.startswith("s3://"):
            fs.retries = ROUNDS
        self.fs: Any = fs
        self.root: str = str(root).rstrip("/")

    def prepare(self, make: bool = True) -> None:
        with named("open", f"store {self.url}"):
            try:
                self._ask("ls", self.root, detail=False)
                return
            except FileNotFoundError:
                pass
            except PermissionError as error:
                raise Refused(f"store {self.url}: {error}", "check the credentials") from None
            if not self.url.startswith("s3://"):
                if make:
                    self.fs.makedirs(self.root, exist_ok=True)
                return
            bucket = self.root.split("/")[0]
            try:
                # Not exists(): it takes a server that does not answer for a bucket that is not there.
                self._ask("call_s3", "head_bucket", Bucket=bucket)
            except FileNotFoundError:
                raise Refused(
                    f"store {self.url}: there is no bucket {bucket}", "make it first"
                ) from None
            except PermissionError:
                pass  # it may be listed, and that is what counts

    def _ask(self, call: str, *arguments: Any, size: int = 0, **more: Any) -> Any:
        """One call of the file system, with a limit where it has a loop of its own. size: bytes that it moves."""
        if not getattr(self.fs, "async_impl", False):
            return getattr(self.fs, call)(*arguments, **more)
        from fsspec import asyn  # loaded with fsspec

        limit_s = REQUEST_S + size / SLOWEST_BYTES_PER_S
        began = time.monotonic()
        try:
            return asyn.sync(
                self.fs.loop, getattr(self.fs, f"_{call}"), *arguments, timeout=limit_s, **more
            )
        except TimeoutError as error:
            if time.monotonic() - began < limit_s:
                raise
            raise TimeoutError(errno.ETIMEDOUT, f"no end of it after {limit_s:.0f} s") from error

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def list(self, folder: str) -> list[Entry]:
        with named("list", f"{folder}/ in store {self.url}"):
            self.fs.invalidate_cache()
            path = self._path(folder)
            try:
                rows = self._ask("ls", path, detail=True)
            except FileNotFoundError:
                return []
            return [
                Entry(
                    row["name"].rstrip("/").rsplit("/", 1)[-1],
                    int(row.get("size") or 0),
                    _time_ns(row.get("LastModified")),
                )
                for row in rows
                if row["name"].rstrip("/") != path
            ]

    def read(self, name: str, most_bytes: int | None = None) -> bytes:
        end = None if most_bytes is None else most_bytes + 1
        with named("read", f"{name} in store {self.url}"):
            return bytes(self._ask("cat_file", self._path(name), end=end))

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        with named("read", f"{name} in store {self.url}"):
            end = offset + length
            return bytes(
                self._ask("cat_file", self._path(name), start=offset, end=end, size=length)
            )

    def view_range(self, name: str, offset: int, length: int) -> memoryview:
        return memoryview(self.read_range(name, offset, length))

    def has_lost(self, error: StoreError) -> bool:
        del error
        return False  # the server's business

    def write(self, name: str, data: bytes, *, stage: str, durable: bool = False) -> None:
        del durable  # a put that was answered is durable
        with named(stage, f"{name} in store {self.url}"):
            try:
                self._parents(name)
                self._ask("pipe_file", self._path(name), data, size=len(data))
            except FileNotFoundError as error:
                raise StoreGone(stage, f"{name} in store {self.url}", str(error)) from error

    def create(self, name: str, data: bytes, *, stage: str) -> bool:
        with named(stage, f"{name} in store {self.url}"):
            self._parents(name)
            try:
                # S3: a put with If-None-Match: *, which the server decides.
                self._ask("pipe_file", self._path(name), data, mode="create", size=len(data))
                return True
            except FileExistsError:
                return False

    def _parents(self, name: str) -> None:
        if not self.url.startswith("s3://"):
            self.fs.makedirs(self._path(name).rsplit("/", 1)[0], exist_ok=True)

    def remove(self, name: str) -> None:
        with named("remove", f"{name} in store {self.url}"):
            try:
                self._ask("rm_file", self._path(name))
            except FileNotFoundError:
                return

    def new_object(self, name: str, *, stage: str) -> ObjectWriter:
        return _BufferedObject(self, name, stage)

    def sync(self, folder: str) -> None:
        del folder

    def sweep(self) -> int:
        return 0  # nothing is half-written here


class _BufferedObject:
    def __init__(self, backend: FsspecBackend, name: str, stage: str) -> None:
        self._backend, self._name, self._stage = backend, name, stage
        self._parts: list[bytes] = []
        self.size = 0

    def append(self, data: bytes | memoryview) -> None:
        self._parts.append(bytes(data))
        self.size += len(data)

    def finish(self) -> None:
        data = b"".join(self._parts)
        self._parts = []
        self._backend.write(self._name, data, stage=self._stage)

    def abandon(self) -> None:
        self._parts = []


def _time_ns(when: Any) -> int:
    return int(when.timestamp() * 1e9) if isinstance(when, datetime) else 0


def open_backend(url: str) -> Backend:
    """A plain path or file:// is a folder; everything else goes through fsspec."""
    if url.startswith("file://"):
        return LocalBackend(os.path.abspath(url.removeprefix("file://")))
    if "://" not in url:
        return LocalBackend(os.path.abspath(os.path.expanduser(url)))
    return FsspecBackend(url)


def try_to_write(url: str) -> None:
    """Makes the store where there is none, writes an object and removes it. Raises StoreError or Refused."""
    backend = open_backend(url)
    backend.prepare()
    name = f"uploads/{os.urandom(8).hex()}.try"  # gc looks at its .json alone
    backend.write(name, b"", stage="try")
    backend.remove(name)
