# SPDX-License-Identifier: Apache-2.0
"""Packs: many chunk bodies in one object, and the index that says where each lies.

packs/<id>.pack   bodies back to back, nothing else: every byte is covered by the hash of a chunk
packs/<id>.idx    head, one record per body, BLAKE3 of all before it, HMAC-SHA256 of the pack's id and all before it,
                  under the user's key; written after the pack, so a pack without an index is half an upload and counts
                  as nothing
The id is <upload id>.<number>: whose pack it is can be read off its name (gc.py needs that).
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from devproxy.checkpoint.chunker import CHUNK_BYTES_MAX, digest

PACK_BYTES = 64 << 20
FOLDER = "packs"
_MAGIC = b"DPIDX\x02\r\n"
_MAGIC_UNSIGNED = b"DPIDX\x01\r\n"  # ends with the checksum
_HEAD = struct.Struct("<8sQI")  # magic, bytes of the pack, number of records
_RECORD = struct.Struct(
    "<32sQIIB"
)  # BLAKE3 of the raw bytes, offset, stored bytes, raw bytes, codec
_SUM_BYTES = _SIGNATURE_BYTES = 32
# A pack is closed with so many bodies; a reader takes more, and not what would fill its memory.
PACK_RECORDS = 1 << 16
_RECORDS_MAX = 1 << 20
INDEX_BYTES_MAX = _HEAD.size + _RECORDS_MAX * _RECORD.size + _SUM_BYTES + _SIGNATURE_BYTES


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
    ours: bool  # signed with the key that it was read with


def file_name(pack: str) -> str:
    """In FOLDER."""
    return f"{pack}.pack"


def pack_name(pack: str) -> str:
    return f"{FOLDER}/{file_name(pack)}"


def index_file_name(pack: str) -> str:
    """In FOLDER."""
    return f"{pack}.idx"


def index_name(pack: str) -> str:
    return f"{FOLDER}/{index_file_name(pack)}"


def owner(pack: str) -> str:
    """The upload that made the pack."""
    return pack.split(".", 1)[0]


def encode_index(pack: str, pack_bytes: int, records: Iterable[Record], key: bytes) -> bytes:
    rows = [_RECORD.pack(*record) for record in records]
    data = _HEAD.pack(_MAGIC, pack_bytes, len(rows)) + b"".join(rows)
    data += digest(data)
    return data + _signature(pack, data, key)


def _signature(pack: str, data: bytes, key: bytes) -> bytes:
    return hmac.digest(
        key, b"devproxy index 2 " + pack.encode(errors="replace") + b"\n" + data, "sha256"
    )


def decode_index(pack: str, data: bytes, key: bytes) -> PackIndex:
    """Raises DamagedIndex for any byte that is not as it was written, and for places that no pack of ours has.

    One without our signature, an older one or another user's, is good for reading, where each chunk's hash is checked. But
    whoever writes to the store can claim anything in it: so no upload and no gc relies on it.
    """
    if len(data) > INDEX_BYTES_MAX:
        raise DamagedIndex(f"index of pack {pack} is longer than any that devproxy writes")
    if len(data) < _HEAD.size + _SUM_BYTES:
        raise DamagedIndex(f"index of pack {pack} is too short")
    ours = False
    if not data.startswith(_MAGIC_UNSIGNED):
        data, signature = data[:-_SIGNATURE_BYTES], data[-_SIGNATURE_BYTES:]
        ours = hmac.compare_digest(signature, _signature(pack, data, key))
    body, total = data[:-_SUM_BYTES], data[-_SUM_BYTES:]
    if len(body) < _HEAD.size or digest(body) != total:
        raise DamagedIndex(f"index of pack {pack} has a wrong checksum")
    magic, pack_bytes, count = _HEAD.unpack_from(body)
    if magic not in (_MAGIC, _MAGIC_UNSIGNED) or len(body) != _HEAD.size + count * _RECORD.size:
        raise DamagedIndex(f"index of pack {pack} has an unknown layout")
    entries = {
        row[0]: Location(pack, row[1], row[2], row[3], row[4])
        for row in _RECORD.iter_unpack(memoryview(body)[_HEAD.size :])
    }
    if not all(_can_be(where, pack_bytes) for where in entries.values()):
        raise DamagedIndex(f"index of pack {pack} names places that cannot be")
    return PackIndex(pack, pack_bytes, entries, ours)


def _can_be(where: Location, pack_bytes: int) -> bool:
    """Compression is used only where it saves something (chunker.py)."""
    return (
        where.stored_bytes <= where.raw_bytes <= CHUNK_BYTES_MAX
        and where.offset + where.stored_bytes <= pack_bytes
    )
