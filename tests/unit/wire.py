# SPDX-License-Identifier: Apache-2.0
"""Protobuf messages as CRIU writes them, made by hand."""

from __future__ import annotations

import struct


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def message(**fields: int) -> bytes:
    """message(f1=5, f2=1): integer fields, behind the length."""
    body = b"".join(varint(int(n[1:]) << 3) + varint(v) for n, v in fields.items())
    return struct.pack("<I", len(body)) + body
