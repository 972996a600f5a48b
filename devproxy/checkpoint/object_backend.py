# SPDX-License-Identifier: Apache-2.0
"""A store behind fsspec: S3, and whatever else it reaches."""

from __future__ import annotations

import errno
import os
import time
from datetime import datetime
from typing import Any

from devproxy.checkpoint.backend import Entry, ObjectWriter, named
from devproxy.checkpoint.errors import StoreError, StoreGone
from devproxy.errors import Refused

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


def _attempts() -> int:
    text = os.environ.get("AWS_MAX_ATTEMPTS") or str(ATTEMPTS)
    if not text.isdecimal() or int(text) == 0:
        raise Refused(f"AWS_MAX_ATTEMPTS is {text!r}", "give a number from 1 on, or unset it")
    return int(text)
