# SPDX-License-Identifier: Apache-2.0
"""Cutting, hashing and compressing: pure functions over bytes, safe in any thread.

A chunk is named by the BLAKE3 of its raw bytes. A chunk of zeros is not stored: its reference is ("zero", bytes).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import zstandard
from blake3 import blake3

Kind = Literal["device", "host", "file", "shared", "build"]
KINDS: tuple[Kind, ...] = ("device", "host", "shared", "file", "build")
ChunkRef = tuple[str, int]  # (64 hex digits or "zero", raw bytes)

KIB = 1 << 10
MIB = 1 << 20
ZERO = "zero"
# Device buffers change as a whole from step to step: big chunks cost little there. What a process changes in its
# memory or in a data base is scattered: small chunks.
CHUNK_BYTES: dict[Kind, int] = {
    "device": MIB,
    "host": 64 * KIB,
    "shared": 64 * KIB,
    "file": 256 * KIB,
    "build": MIB,
}
CHUNK_BYTES_MAX = max(CHUNK_BYTES.values())

RAW, ZSTD = 0, 1
LEVEL = 1
# Compression must pay for itself at restore too. Weights in fp32 shrink by 7-8 % at a tenth of the disk's speed.
PAYS = 0.875
SAMPLE_BYTES = 32 * KIB
_BATCH_BYTES = MIB

_local = threading.local()


@dataclass(frozen=True, slots=True)
class Encoded:
    """A chunk ready to be stored. body is None when it need not be: zeros, or known already."""

    digest: bytes
    raw_bytes: int
    codec: int
    body: bytes | memoryview | None
    zero: bool = False


def digest(data: bytes | memoryview) -> bytes:
    return blake3(data).digest()


def cut(view: memoryview, chunk_bytes: int) -> Iterator[memoryview]:
    for start in range(0, len(view), chunk_bytes):
        yield view[start : start + chunk_bytes]


def batches(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Groups small chunks, so that handing them to a thread does not cost more than hashing them."""
    batch: list[memoryview] = []
    size = 0
    for view in views:
        if batch and size + len(view) > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(view)
        size += len(view)
    if batch:
        yield batch


@lru_cache(maxsize=4096)
def zero_digest(raw_bytes: int) -> bytes:
    hasher = blake3()
    block = bytes(min(raw_bytes, MIB))
    left = raw_bytes
    while left > 0:
        hasher.update(block[:left])
        left -= len(block)
    return hasher.digest()


def is_zero(view: bytes | memoryview, hashed: bytes) -> bool:
    """Whether all bytes are zero: a few are looked at, and only if they are, the hash decides."""
    size = len(view)
    if view[0] or view[-1] or view[size // 2] or view[size // 3]:
        return False
    return hashed == zero_digest(size)


def compress(view: memoryview) -> tuple[int, bytes | memoryview]:
    """(codec, body). A sample from the middle decides for big chunks, so that noise costs almost nothing."""
    tools = _local.__dict__
    compressor = tools.get("compressor")
    if compressor is None:
        compressor = tools["compressor"] = zstandard.ZstdCompressor(
            level=LEVEL, write_checksum=False
        )
    if len(view) < 64:
        return RAW, view
    if len(view) >= 4 * SAMPLE_BYTES:
        middle = len(view) // 2
        if len(compressor.compress(view[middle : middle + SAMPLE_BYTES])) > PAYS * SAMPLE_BYTES:
            return RAW, view
    body: bytes = compressor.compress(view)
    return (ZSTD, body) if len(body) <= PAYS * len(view) else (RAW, view)


def decompress(codec: int, body: bytes | memoryview, raw_bytes: int) -> bytes | memoryview | None:
    """The raw bytes, or None where the body cannot be one of that many bytes."""
    if codec == RAW:
        return body if len(body) == raw_bytes else None
    if codec != ZSTD:
        return None
    tools = _local.__dict__
    decompressor = tools.get("decompressor")
    if decompressor is None:
        decompressor = tools["decompressor"] = zstandard.ZstdDecompressor()
    try:
        # The frame says its own size; a damaged one must not make us allocate what it likes.
        if zstandard.frame_content_size(body) != raw_bytes:
            return None
        data: bytes = decompressor.decompress(body, max_output_size=raw_bytes)
    except zstandard.ZstdError:
        return None
    return data if len(data) == raw_bytes else None
