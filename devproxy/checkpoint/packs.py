# SPDX-License-Identifier: Apache-2.0
"""Packs: many chunk bodies in one object, and the index that says where each lies.

packs/<id>.pack   bodies back to back, nothing else: every byte is covered by the hash of a chunk
packs/<id>.idx    head, one record per body, BLAKE3 of all before it; written after the pack, so a pack without an
                  index is half an upload and counts as nothing
The id is <upload id>.<number>: whose pack it is can be read off its name (gc.py needs that).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from devproxy.checkpoint.chunker import CHUNK_BYTES_MAX, digest

PACK_BYTES = 64 << 20
FOLDER = "packs"
_MAGIC = b"DPIDX\x01\r\n"
_HEAD = struct.Struct("<8sQI")  # magic, bytes of the pack, number of records
_RECORD = struct.Struct(
    "<32sQIIB"
)  # BLAKE3 of the raw bytes, offset, stored bytes, raw bytes, codec
_SUM_BYTES = 32
# A pack is closed with so many bodies; a reader takes more, and not what would fill its memory.
PACK_RECORDS = 1 << 16
_RECORDS_MAX = 1 << 20
INDEX_BYTES_MAX = _HEAD.size + _RECORDS_MAX * _RECORD.size + _SUM_BYTES


class Location(NamedTuple):
    """Where a chunk's body lies."""

    pack: str
    offset: int
    stored_bytes: int
    raw_bytes: int
    codec: int


class Record(NamedTuple):
    digest: bytes
    offset: int
    stored_bytes: int
    raw_bytes: int
    codec: int


class DamagedIndex(ValueError):
    """The bytes of an index are not those that were written."""


@dataclass(frozen=True)
class PackIndex:
    pack: str
    pack_bytes: int
    entries: dict[bytes, Location]


def pack_name(pack: str) -> str:
    return f"{FOLDER}/{pack}.pack"


def index_name(pack: str) -> str:
    return f"{FOLDER}/{pack}.idx"


def owner(pack: str) -> str:
    """The upload that made the pack."""
    return pack.split(".", 1)[0]


def encode_index(pack_bytes: int, records: Iterable[Record]) -> bytes:
    rows = [_RECORD.pack(*record) for record in records]
    data = _HEAD.pack(_MAGIC, pack_bytes, len(rows)) + b"".join(rows)
    return data + digest(data)


def decode_index(pack: str, data: bytes) -> PackIndex:
    """Raises DamagedIndex for any byte that is not as it was written, and for places that no pack of ours has.

    The checksum is no signature: whoever writes to the store can claim anything. A claim costs no more memory than a chunk.
    """
    if len(data) > INDEX_BYTES_MAX:
        raise DamagedIndex(f"index of pack {pack} is longer than any that devproxy writes")
    if len(data) < _HEAD.size + _SUM_BYTES:
        raise DamagedIndex(f"index of pack {pack} is too short")
    body, total = data[:-_SUM_BYTES], data[-_SUM_BYTES:]
    if digest(body) != total:
        raise DamagedIndex(f"index of pack {pack} has a wrong checksum")
    magic, pack_bytes, count = _HEAD.unpack_from(body)
    if magic != _MAGIC or len(body) != _HEAD.size + count * _RECORD.size:
        raise DamagedIndex(f"index of pack {pack} has an unknown layout")
    entries = {
        row[0]: Location(pack, row[1], row[2], row[3], row[4])
        for row in _RECORD.iter_unpack(memoryview(body)[_HEAD.size :])
    }
    if not all(_can_be(where, pack_bytes) for where in entries.values()):
        raise DamagedIndex(f"index of pack {pack} names places that cannot be")
    return PackIndex(pack, pack_bytes, entries)


def _can_be(where: Location, pack_bytes: int) -> bool:
    """Compression is used only where it saves something (chunker.py)."""
    return (
        where.stored_bytes <= where.raw_bytes <= CHUNK_BYTES_MAX
        and where.offset + where.stored_bytes <= pack_bytes
    )
