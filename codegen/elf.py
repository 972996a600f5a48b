# SPDX-License-Identifier: Apache-2.0
"""The dynamic symbols of an ELF file with their versions. Pure: bytes in (a map of the file will do), names out."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

DYNAMIC, DYNSYM = 6, 11  # sh_type, gabi
VERDEF, VERNEED, VERSYM = 0x6FFF_FFFD, 0x6FFF_FFFE, 0x6FFF_FFFF  # sh_type, the GNU versions
NEEDED, SONAME = 1, 14  # d_tag
OBJECT, TLS = 1, 6  # type in st_info


@dataclass(frozen=True)
class Symbol:
    """version: its node; library: the file that the linker wrote beside that node (imports only), else ""."""

    name: str
    version: str
    library: str
    is_function: bool


@dataclass(frozen=True)
class Dynamic:
    """What the loader sees of one file."""

    soname: str
    needed: tuple[str, ...]
    imports: tuple[Symbol, ...]
    exports: tuple[Symbol, ...]


def read(path: Path) -> Dynamic:
    """Raises ValueError for what is no 64-bit little-endian ELF file with section headers."""
    with open(path, "rb") as file:
        if path.stat().st_size < 64:
            raise ValueError(f"{path} is no ELF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
            if image[:6] != b"\x7fELF\x02\x01":
                raise ValueError(f"{path} is no 64-bit ELF file")
            return _Reader(image).dynamic()


class _Reader:
    def __init__(self, image: mmap.mmap) -> None:
        self.image = image
        (at,) = struct.unpack_from("<Q", image, 40)
        size, count = struct.unpack_from("<HH", image, 58)
        self.sections: list[tuple[int, ...]] = [
            struct.unpack_from("<IIQQQQIIQQ", image, at + i * size) for i in range(count)
        ]

    def dynamic(self) -> Dynamic:
        soname, needed = "", []
        for tag, value in struct.iter_unpack("<qQ", self.bytes_of(DYNAMIC)):
            if tag == NEEDED:
                needed.append(self.text(DYNAMIC, value))
            elif tag == SONAME:
                soname = self.text(DYNAMIC, value)
        nodes = self.needed_nodes() | self.defined_nodes()
        versions = [v for (v,) in struct.iter_unpack("<H", self.bytes_of(VERSYM))]
        imports: list[Symbol] = []
        exports: list[Symbol] = []
        for number, entry in enumerate(struct.iter_unpack("<IBBHQQ", self.bytes_of(DYNSYM))):
            name_at, info, _, section, _, _ = entry
            if name_at == 0 or info >> 4 == 0:  # no name, or local
                continue
            node, library = nodes.get(versions[number] & 0x7FFF if versions else 0, ("", ""))
            kind = info & 15
            name = self.text(DYNSYM, name_at)
            symbol = Symbol(name, node, library, kind not in (OBJECT, TLS))
            (exports if section else imports).append(symbol)
        return Dynamic(soname, tuple(needed), tuple(imports), tuple(exports))

    def section(self, kind: int) -> tuple[int, ...] | None:
        return next((s for s in self.sections if s[1] == kind), None)

    def bytes_of(self, kind: int) -> bytes:
        found = self.section(kind)
        return self.image[found[4] : found[4] + found[5]] if found else b""

    def text(self, kind: int, offset: int) -> str:
        """A string of the table that belongs to the section of this kind."""
        found = self.section(kind)
        assert found is not None
        at = self.sections[found[6]][4] + offset
        return self.image[at : self.image.find(b"\0", at)].decode()

    def needed_nodes(self) -> dict[int, tuple[str, str]]:
        """Version index -> (node, library); the lists are chained by offsets (Elf64_Verneed, Elf64_Vernaux)."""
        out, data, at = {}, self.bytes_of(VERNEED), 0
        while data:
            _, _, file, aux, following = struct.unpack_from("<HHIII", data, at)
            entry = at + aux
            while True:
                _, _, index, name, step = struct.unpack_from("<IHHII", data, entry)
                out[index & 0x7FFF] = (self.text(VERNEED, name), self.text(VERNEED, file))
                if step == 0:
                    break
                entry += step
            if following == 0:
                break
            at += following
        return out

    def defined_nodes(self) -> dict[int, tuple[str, str]]:
        """Version index -> (node, ""); the first is the file's own name and no node (VER_FLG_BASE)."""
        out, data, at = {}, self.bytes_of(VERDEF), 0
        while data:
            _, flags, index, _, _, aux, following = struct.unpack_from("<HHHHIII", data, at)
            (name,) = struct.unpack_from("<I", data, at + aux)
            if not flags & 1:
                out[index] = (self.text(VERDEF, name), "")
            if following == 0:
                break
            at += following
        return out
