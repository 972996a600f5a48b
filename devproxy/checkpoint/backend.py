# SPDX-License-Identifier: Apache-2.0
"""What a store asks of the place where its objects lie, and its errors in the store's words.

Names are relative to the root, with "/". An object appears whole or not at all, and is never changed in place.
Every error is a StoreError that names stage, object and cause.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from devproxy.checkpoint.errors import StoreError, StoreFull, StoreGone
from devproxy.errors import DevproxyError

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
