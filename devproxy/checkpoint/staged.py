# SPDX-License-Identifier: Apache-2.0
"""Device memory in a staging folder, in which equal blocks of a tree's ranks lie once.

Whoever makes the folder makes blocks.index, over which the servers find one another's blocks
(csrc/server/block_index.h). A client's gpuK-N.dev then has holes, and gpuK-N.refs says in which file their bytes lie
(csrc/server/staged_dump.h). Without an index there are no lists, and each file has all of its bytes.

A list is written last. So a reference into a file that has none leads to a dump that came to no end, and is refused.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from devproxy.checkpoint.errors import StoreError

INDEX = "blocks.index"
REFS_SUFFIX = ".refs"
BLOCK_BYTES = 1 << 20

_INDEX_HEADER = struct.Struct("<8sQ192s")
_INDEX_MAGIC = b"DPBLOCK1"
_SLOTS_AT = 4096
_SLOT_BYTES = 32
_LEAST_SLOTS, _MOST_SLOTS = 1 << 10, 1 << 22
_REFS_HEADER = struct.Struct("<8sQ")
_REFS_MAGIC = b"DPREFS01"
_REF = struct.Struct("<QQIIQ")
_ZEROS_GPU = 0xFFFFFFFF  # the bytes are zero, and lie nowhere


def expected_blocks(clients: list[dict[str, Any]]) -> int:
    """At most, of all clients together (ControlChannel.can_dump). Servers of older builds do not count ranges."""
    return sum(
        client["live_bytes"] // BLOCK_BYTES + max(0, client.get("ranges", 0)) for client in clients
    )


def make_index(folder: str, blocks: int) -> None:
    """For one dump into the folder. Blocks beyond twice that number are not found again, and that is all."""
    slots = 1 << max(2 * blocks - 1, 1).bit_length()
    slots = min(max(slots, _LEAST_SLOTS), _MOST_SLOTS)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(os.path.join(folder, INDEX), flags, 0o600)
    try:
        # Servers map it: a page that the file system has no room for would kill them.
        os.posix_fallocate(fd, 0, _SLOTS_AT + slots * _SLOT_BYTES)
        os.pwrite(fd, _INDEX_HEADER.pack(_INDEX_MAGIC, slots, os.urandom(192)), 0)
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class Ref:
    """Bytes of a file that lie in another place: in gpu<gpu>-<client>.dev of the same folder."""

    offset: int
    bytes: int
    gpu: int
    client: int
    there: int

    @property
    def zeros(self) -> bool:
        return self.gpu == _ZEROS_GPU

    @property
    def file(self) -> str:
        return f"gpu{self.gpu}-{self.client}.dev"


def read_refs(path: str) -> list[Ref]:
    """Of a gpuK-N.refs, in the order of their offsets. Raises StoreError."""
    with open(path, "rb") as file:
        data = file.read()
    problem = ""
    refs: list[Ref] = []
    if len(data) < _REFS_HEADER.size:
        problem = "it is too short"
    else:
        magic, count = _REFS_HEADER.unpack_from(data)
        if magic != _REFS_MAGIC or len(data) != _REFS_HEADER.size + count * _REF.size:
            problem = "it is none, or not all of it"
        else:
            refs = [Ref(*row) for row in _REF.iter_unpack(data[_REFS_HEADER.size :])]
            ends = [0, *(ref.offset + ref.bytes for ref in refs)]
            if any(ref.offset < end for ref, end in zip(refs, ends, strict=False)):
                problem = "its references overlap"
    if problem:
        raise StoreError("read a staged dump", path, problem)
    return refs


@dataclass
class StagedFile:
    """A gpuK-N.dev as if all of its bytes stood in it. Slices must be gone when its context ends."""

    path: str
    size: int
    _own: memoryview
    _refs: list[Ref]
    _others: dict[str, memoryview] = field(default_factory=dict)

    def slices(self, offset: int, length: int, step: int) -> Iterator[memoryview]:
        """Those bytes in pieces of `step` from their own start: each a view, or a copy where it lies in several places."""
        for start in range(offset, offset + length, step):
            parts = list(self._parts(start, min(step, offset + length - start)))
            yield parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def _parts(self, offset: int, length: int) -> Iterator[memoryview]:
        end = offset + length
        at = bisect.bisect_right(self._refs, offset, key=lambda ref: ref.offset + ref.bytes)
        while offset < end:
            ref = self._refs[at] if at < len(self._refs) else None
            if ref is None or ref.offset >= end:
                yield self._own[offset:end]
                return
            if offset < ref.offset:
                yield self._own[offset : ref.offset]
                offset = ref.offset
            stop = min(end, ref.offset + ref.bytes)
            there = ref.there + offset - ref.offset
            if ref.zeros:
                yield memoryview(bytes(stop - offset))
            else:
                yield self._others[ref.file][there : there + stop - offset]
            offset = stop
            at += 1


@contextlib.contextmanager
def staged_file(path: str) -> Iterator[StagedFile]:
    """Raises StoreError where the dump is not whole, and OSError."""
    refs_path = path.removesuffix(".dev") + REFS_SUFFIX
    refs = read_refs(refs_path) if path.endswith(".dev") and os.path.exists(refs_path) else []
    folder = os.path.dirname(path)
    with contextlib.ExitStack() as maps:
        own = maps.enter_context(_mapped_file(path))
        found = StagedFile(path, len(own), own, refs)
        for name in {ref.file for ref in refs if not ref.zeros}:
            other = os.path.join(folder, name)
            if not os.path.exists(other.removesuffix(".dev") + REFS_SUFFIX):
                raise StoreError(
                    "read a staged dump",
                    path,
                    f"it needs bytes of {name}, whose dump came to no end",
                )
            found._others[name] = maps.enter_context(_mapped_file(other))
        for ref in refs:
            if not ref.zeros and ref.there + ref.bytes > len(found._others[ref.file]):
                raise StoreError("read a staged dump", path, f"a reference leads beyond {ref.file}")
            if ref.offset + ref.bytes > len(own):
                raise StoreError("read a staged dump", path, "a reference lies beyond its end")
        yield found


@contextlib.contextmanager
def _mapped_file(path: str) -> Iterator[memoryview]:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            yield memoryview(b"")
            return
        with mapped(file.fileno(), size) as view:
            yield view


@contextlib.contextmanager
def mapped(fd: int, size: int) -> Iterator[memoryview]:
    """A read-only map of the file. Every slice of it must be gone at the end: they are released with it."""
    area = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    try:
        area.madvise(mmap.MADV_SEQUENTIAL)
        yield memoryview(area)
    finally:
        # Slices may live on in a traceback; closing would raise then, and the last of them unmaps anyway.
        with contextlib.suppress(BufferError):
            area.close()
