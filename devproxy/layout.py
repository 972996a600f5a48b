# SPDX-License-Identifier: Apache-2.0
"""The numbers of csrc/wire/{segment,attach}.h that the Python side needs. tests/unit/test_layout.py compares them."""

from __future__ import annotations

RANGE_BASE = 0x2000_0000_0000
RANGE_BYTES = 0x40_0000_0000
DEVICE_BYTES = 0x30_0000_0000
MAX_SLOTS = 128
CHUNK_BYTES = 512 << 10
CHUNKS = 64
RING_BYTES = 1 << 20
REPLY_SLOTS = 256
REPLY_BYTES = 4096

ATTACH_MAGIC = 0x41505044
ATTACH_KIND_STATS = 2
ATTACH_KIND_TRACE = 7
ANY_SLOT = 0xFFFF_FFFF
ABI_BYTES = 32
# AttachRequest: magic, kind, abi_id, pid, wanted_slot
ATTACH_REQUEST = "<II32sII"

# A client's segment: chunks, ring, replies, and at most 256 KiB of control page and stream table.
SEGMENT_BYTES = CHUNK_BYTES * CHUNKS + RING_BYTES + REPLY_SLOTS * REPLY_BYTES + (256 << 10)


def in_device_range(address: int) -> bool:
    """True for an address in the device part of any process slot."""
    offset = address - RANGE_BASE
    return 0 <= offset < MAX_SLOTS * RANGE_BYTES and offset % RANGE_BYTES < DEVICE_BYTES
