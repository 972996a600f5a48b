# SPDX-License-Identifier: Apache-2.0
"""CRIU's image files, read without pycriu, whose import brings all of their formats.

Two u32 magics (files of version 1: one), then messages, each behind its length as u32 (criu/protobuf.c, version 4.2).
Messages are protobuf's wire format.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from devproxy.errors import DevproxyError

_U32 = struct.Struct("<I")
# The first magic of a file with two (criu/include/magic.h): images, and statistics.
_TWO_MAGICS = (_U32.pack(0x54564319), _U32.pack(0x55105940))
_REMAP_GHOST = 1  # images/remap-file-path.proto: remap_type


class ImageFileError(DevproxyError):
    """An image file of CRIU cannot be understood."""

    def __init__(self, path: str, cause: str) -> None:
        super().__init__(
            f"CRIU's image {os.path.basename(path)} cannot be understood: {cause}", "use CRIU 4.2"
        )


class Message:
    """A protobuf message by the numbers of its fields. Of a repeated one integer() and text() give the last value.

    Raises ImageFileError where it is no message, or a field is not of the kind that is asked for.
    """

    def __init__(self, path: str, data: bytes) -> None:
        self._path = path
        self._fields: dict[int, list[int | bytes]] = {}
        at = 0
        while at < len(data):
            tag, at = self._varint(data, at)
            number, kind = tag >> 3, tag & 7
            if kind == 0:
                value, at = self._varint(data, at)
                self._fields.setdefault(number, []).append(value)
                continue
            if kind == 2:
                size, at = self._varint(data, at)
            elif kind in (1, 5):
                size = 8 if kind == 1 else 4
            else:
                raise ImageFileError(path, f"field of kind {kind}")
            if at + size > len(data):
                raise ImageFileError(path, "an entry is cut off")
            if kind == 2:
                self._fields.setdefault(number, []).append(data[at : at + size])
            at += size

    def _varint(self, data: bytes, at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            if at >= len(data):
                raise ImageFileError(self._path, "an entry is cut off")
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7

    def __contains__(self, number: int) -> bool:
        return number in self._fields

    def integer(self, number: int) -> int:
        """0 where it is missing."""
        value = self._fields.get(number, [0])[-1]
        if not isinstance(value, int):
            raise ImageFileError(self._path, f"field {number} is no integer")
        return value

    def integers(self, number: int) -> list[int]:
        """Of a repeated field that is not packed."""
        values = self._fields.get(number, [])
        found = [value for value in values if isinstance(value, int)]
        if len(found) != len(values):
            raise ImageFileError(self._path, f"field {number} is no integer")
        return found

    def text(self, number: int) -> bytes:
        """Empty where it is missing."""
        value = self._fields.get(number, [b""])[-1]
        if not isinstance(value, bytes):
            raise ImageFileError(self._path, f"field {number} is no text")
        return value

    def message(self, number: int) -> Message:
        """Empty where it is missing."""
        return Message(self._path, self.text(number))


def messages(path: str) -> Iterator[Message]:
    """The messages of an image file, in order. Raises ImageFileError and OSError."""
    for entry in _entries(path, Path(path).read_bytes()):
        yield Message(path, entry)


def _entries(path: str, data: bytes) -> Iterator[bytes]:
    at = 8 if data[:4] in _TWO_MAGICS else 4
    while at < len(data):
        begin = end = at + 4
        if begin <= len(data):
            end += _U32.unpack_from(data, at)[0]
        if end > len(data):
            raise ImageFileError(path, "it ends in the middle of an entry")
        yield data[begin:end]
        at = end


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


# images/mnt.proto: mnt_entry
_MNT_ID, _MNT_PARENT, _MNT_POINT = 2, 4, 7
_TMPFS = 5  # of an external mount no file system is made


def add_mounts(images_dir: str, mounts: Sequence[tuple[str, str]]) -> None:
    """(folder, key) each: a mount there that is external (criu(8): --external mnt[KEY]:PATH). Raises ImageFileError, OSError.

    Precondition: nothing is mounted below the folder.
    """
    names = [name for name in os.listdir(images_dir) if name.startswith("mountpoints-")]
    if len(names) != 1:
        raise ImageFileError("mountpoints-*.img", f"there are {len(names)}")
    path = os.path.join(images_dir, names[0])
    known = list(messages(path))
    parents = {(m.integer(_MNT_PARENT), m.text(_MNT_POINT)) for m in known}
    number = max((m.integer(_MNT_ID) for m in known), default=0)
    with open(path, "ab") as file:
        for folder, key in mounts:
            # The mount that shows the folder: the deepest on the way, and of several at one place the one on top.
            above = [m for m in known if _is_in(folder, os.fsdecode(m.text(_MNT_POINT)))]
            above = [m for m in above if (m.integer(_MNT_ID), m.text(_MNT_POINT)) not in parents]
            if not above:
                raise ImageFileError(path, f"no mount shows {folder}")
            parent = max(above, key=lambda m: len(m.text(_MNT_POINT)))
            number += 1
            fields: list[tuple[int, int | bytes]] = [
                (1, _TMPFS), (_MNT_ID, number), (3, 0), (_MNT_PARENT, parent.integer(_MNT_ID)), (5, 0),
                (6, b"/"), (_MNT_POINT, os.fsencode(folder)), (8, b"devproxy"), (9, b""),
                (10, 0), (11, 0), (17, 0), (18, key.encode()),
            ]  # fmt: skip
            entry = b"".join(_field(*one) for one in fields)
            file.write(_U32.pack(len(entry)) + entry)


# images/fdinfo.proto: file_entry; images/timerfd.proto: timerfd_entry
_FILE_TYPE, _FILE_ID, _FILE_TIMER = 1, 2, 12
_TICKS, _NEXT_S, _NEXT_NS, _EVERY_S, _EVERY_NS = 5, 7, 8, 9, 10


def wind_up_timers(images_dir: str) -> int:
    """A periodic timerfd goes on after a restore also where it had expired unread. How many had. Raises ImageFileError, OSError.

    The kernel stops such a timer until it is read, so CRIU finds no time of its next expiration, and would leave it
    stopped for ever. Its next one comes one interval from the restore on. One that the program has stopped has no ticks.
    """
    path = os.path.join(images_dir, "files.img")
    data = Path(path).read_bytes()
    found = [data[: 8 if data[:4] in _TWO_MAGICS else 4]]
    stopped = 0
    for entry in _entries(path, data):
        file = Message(path, entry)
        timer = file.message(_FILE_TIMER)
        every = [timer.integer(n) for n in (_EVERY_S, _EVERY_NS)]
        waits = any(timer.integer(n) for n in (_NEXT_S, _NEXT_NS))
        if any(every) and timer.integer(_TICKS) and not waits:
            stopped += 1
            wound = file.text(_FILE_TIMER) + _field(_NEXT_S, every[0]) + _field(_NEXT_NS, every[1])
            entry = b"".join(
                [
                    *(_field(number, file.integer(number)) for number in (_FILE_TYPE, _FILE_ID)),
                    _field(_FILE_TIMER, wound),  # of a field that comes twice, the last counts
                ]
            )
        found.append(_U32.pack(len(entry)) + entry)
    if stopped:
        fresh = f"{path}.new"
        Path(fresh).write_bytes(b"".join(found))
        os.replace(fresh, path)
    return stopped


class NamedFile(NamedTuple):
    """A file, folder or FIFO that is open, mapped or worked in, as CRIU wants it back. bytes: None where CRIU compares no length
    (appended to, as a log is)."""

    path: str
    bytes: int | None
    mode: int | None  # its type among it


def named_files(images_dir: str) -> list[NamedFile]:
    """Those that have a name, as the job names them. Raises ImageFileError and OSError."""
    # Of a file that was deleted the image has the old name, which may be another file's; orig_id = 1.
    remaps = os.path.join(images_dir, "remap-fpath.img")
    deleted = {m.integer(1) for m in messages(remaps)} if os.path.exists(remaps) else set()
    # images/fdinfo.proto: file_entry has reg = 3; images/regfile.proto: id = 1, name = 6, size = 8, mode = 10
    found = []
    for entry in messages(os.path.join(images_dir, "files.img")):
        if 3 not in entry:
            continue
        file = entry.message(3)
        if file.integer(1) in deleted:
            continue
        size = file.integer(8) if 8 in file else None
        mode = file.integer(10) if 10 in file else None
        found.append(NamedFile(os.fsdecode(file.text(6)), size, mode))
    return found


class BoundSocket(NamedTuple):
    """kind: SOCK_*. local: (address, port) of a UDP socket; else the name of a unix socket: a path, or NUL and bytes."""

    family: int
    kind: int
    local: tuple[str, int] | bytes


def bound_sockets(images_dir: str) -> list[BoundSocket]:
    """UDP sockets with a port and unix sockets with a name, each once. Raises ImageFileError and OSError."""
    found: dict[BoundSocket, None] = {}
    # images/fdinfo.proto: file_entry has isk = 4, usk = 16
    for entry in messages(os.path.join(images_dir, "files.img")):
        if 4 in entry:
            # images/sk-inet.proto: family = 3, type = 4, proto = 5, src_port = 7, src_addr = 11
            one = entry.message(4)
            family, kind, port = one.integer(3), one.integer(4), one.integer(7)
            words = b"".join(struct.pack("=I", word) for word in one.integers(11))
            size = {socket.AF_INET: 4, socket.AF_INET6: 16}.get(socket.AddressFamily(family), 0)
            if one.integer(5) == socket.IPPROTO_UDP and port and size and len(words) >= size:
                local = socket.inet_ntop(family, words[:size]), port
                found[BoundSocket(family, kind, local)] = None
        elif 16 in entry:
            # images/sk-unix.proto: type = 3, name = 11, name_dir = 14, deleted = 15
            one = entry.message(16)
            name = one.text(11)
            if not name or one.integer(15):
                continue
            if name[:1] != b"\0":  # the kernel counts the NUL at a path's end to the name
                name = os.path.join(one.text(14), name.rstrip(b"\0"))
            found[BoundSocket(socket.AF_UNIX, one.integer(3), name)] = None
    return list(found)


def mount_points(images_dir: str) -> list[str]:
    """Where the tree had mounts. Raises ImageFileError and OSError."""
    return [
        os.fsdecode(message.text(_MNT_POINT))
        for name in os.listdir(images_dir)
        if name.startswith("mountpoints-")
        for message in messages(os.path.join(images_dir, name))
    ]


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def ghosts(images_dir: str) -> list[str]:
    """Where a restore may make a file for each one that was deleted and open, as the job names it (absolute).

    "NAME.cr.ID.ghost" beside where it was, or beside the nearest folder above that is still there (criu/files-reg.c:
    ghost_path, create_ghost). CRIU takes them away at the end, and not where it is ended before.
    Raises ImageFileError and OSError.
    """
    remaps = os.path.join(images_dir, "remap-fpath.img")
    if not os.path.exists(remaps):
        return []
    # images/remap-file-path.proto: orig_id = 1, remap_id = 2, remap_type = 3
    ids = [(m.integer(1), m.integer(2)) for m in messages(remaps) if m.integer(3) == _REMAP_GHOST]
    # images/fdinfo.proto: file_entry has reg = 3; images/regfile.proto: id = 1, name = 6
    regular = [m.message(3) for m in messages(os.path.join(images_dir, "files.img"))]
    names = {m.integer(1): m.text(6) for m in regular}
    found: dict[str, None] = {}
    for file_id, ghost_id in ids:
        path = Path(os.fsdecode(names.get(file_id, b"")))
        if path.is_absolute():
            for above in path.parents:
                found[str(above / f"{path.name}.cr.{ghost_id:x}.ghost")] = None
    return list(found)
