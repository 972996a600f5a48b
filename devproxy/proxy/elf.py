# SPDX-License-Identifier: Apache-2.0
"""Reads one exported constant out of a shared library without loading it: the client's ABI id."""

from __future__ import annotations

import struct

from devproxy.errors import Refused

_SECTION_DYNSYM = 11
_PROGRAM_LOAD = 1


def exported_bytes(path: str, symbol: str, size: int) -> bytes | None:
    """The first `size` bytes of the exported object `symbol`; None where the library does not export it.

    Raises Refused when the file is missing or no 64-bit little-endian ELF file.
    """
    try:
        with open(path, "rb") as file:
            image = file.read()
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}", "build devproxy: make build") from None
    if image[:6] != b"\x7fELF\x02\x01":
        raise Refused(f"{path} is not a shared library of this machine", "build again: make build")
    try:
        return _find(image, symbol.encode(), size)
    except (struct.error, IndexError, ValueError):
        raise Refused(f"{path} is damaged", "build again: make build") from None


def _find(image: bytes, name: bytes, size: int) -> bytes | None:
    program_at, section_at = struct.unpack_from("<QQ", image, 32)
    program_size, programs, section_size, sections = struct.unpack_from("<HHHH", image, 54)
    tables = [
        struct.unpack_from("<IIQQQQIIQQ", image, section_at + i * section_size)
        for i in range(sections)
    ]
    for table in tables:
        if table[1] != _SECTION_DYNSYM:
            continue
        strings = tables[table[6]]
        text = image[strings[4] : strings[4] + strings[5]]
        wanted = text.find(b"\0" + name + b"\0") + 1
        if not wanted:
            return None
        for entry in struct.iter_unpack("<IBBHQQ", image[table[4] : table[4] + table[5]]):
            if entry[0] == wanted and entry[3]:
                return _at_address(image, program_at, program_size, programs, entry[4], size)
    return None


def _at_address(
    image: bytes, program_at: int, program_size: int, programs: int, address: int, size: int
) -> bytes:
    for i in range(programs):
        kind, _, offset, start, _, in_file = struct.unpack_from(
            "<IIQQQQ", image, program_at + i * program_size
        )
        if kind == _PROGRAM_LOAD and start <= address and address + size <= start + in_file:
            at = offset + address - start
            return image[at : at + size]
    raise ValueError("symbol outside every segment")
