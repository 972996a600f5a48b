# SPDX-License-Identifier: Apache-2.0
"""devproxy/layout.py says the same as the C++ headers."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from devproxy import layout

WIRE = Path(__file__).resolve().parent.parent.parent / "devproxy" / "csrc" / "wire"


def constant(file: str, name: str) -> int:
    """The last definition: the one that is not for sanitizer builds."""
    text = (WIRE / file).read_text()
    values = re.findall(rf"\b{name}\s*=\s*([^;]+);", text)
    return int(eval(values[-1].replace("'", "").replace("u <<", "<<")))


def test_segment_numbers() -> None:
    pairs = {
        "kRangeBase": layout.RANGE_BASE,
        "kRangeBytes": layout.RANGE_BYTES,
        "kDeviceBytes": layout.DEVICE_BYTES,
        "kMaxSlots": layout.MAX_SLOTS,
        "kChunkBytes": layout.CHUNK_BYTES,
        "kChunks": layout.CHUNKS,
        "kRingBytes": layout.RING_BYTES,
        "kReplySlots": layout.REPLY_SLOTS,
        "kReplyBytes": layout.REPLY_BYTES,
    }
    assert {name: constant("segment.h", name) for name in pairs} == pairs


def test_attach_request() -> None:
    assert constant("attach.h", "kAttachMagic") == layout.ATTACH_MAGIC
    assert "kStats = 2" in (WIRE / "attach.h").read_text()
    assert f"kTrace = {layout.ATTACH_KIND_TRACE}" in (WIRE / "attach.h").read_text()
    assert struct.calcsize(layout.ATTACH_REQUEST) == 48


def test_device_ranges() -> None:
    assert layout.in_device_range(layout.RANGE_BASE)
    assert not layout.in_device_range(layout.RANGE_BASE - 1)
    assert not layout.in_device_range(layout.RANGE_BASE + layout.DEVICE_BYTES)  # pinned window
    assert layout.in_device_range(layout.RANGE_BASE + layout.RANGE_BYTES)
    end = layout.RANGE_BASE + layout.MAX_SLOTS * layout.RANGE_BYTES
    assert not layout.in_device_range(end)
