# SPDX-License-Identifier: Apache-2.0
"""Which files a restore makes for deleted ones, from CRIU's own images; and images that are none."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from devproxy.checkpoint.criu_image import (
    ImageFileError,
    Message,
    add_mounts,
    ghosts,
    messages,
    mount_points,
    named_files,
    wind_up_timers,
)
from tests.unit.wire import message, varint

GHOST, LINKED = 1, 0


def file_entry(number: int, name: str, more: bytes = b"") -> bytes:
    regular = b"\x08" + varint(number) + b"\x32" + varint(len(name)) + name.encode() + more
    entry = b"\x08\x01\x10" + varint(number) + b"\x1a" + varint(len(regular)) + regular
    return struct.pack("<I", len(entry)) + entry


def image(path: Path, *entries: bytes) -> None:
    path.write_bytes(struct.pack("<II", 0x54564319, 0x56303138) + b"".join(entries))


def test_where_ghosts_are_made(tmp_path: Path) -> None:
    assert ghosts(str(tmp_path)) == []  # a job without deleted files
    image(
        tmp_path / "files.img",
        file_entry(5, "/tmp/a/gone"),
        file_entry(6, "/dev/shm/sem.x"),
        file_entry(7, "/there"),
        file_entry(300, "/linked"),
        struct.pack("<I", 4) + b"\x08\x02\x10\x09",  # a socket: no regular file inside
    )
    image(
        tmp_path / "remap-fpath.img",
        message(f1=5, f2=1, f3=GHOST),
        message(f1=6, f2=26, f3=GHOST),
        message(f1=300, f2=7, f3=LINKED),
        message(f1=77, f2=2, f3=GHOST),  # of no file that is known
    )
    assert ghosts(str(tmp_path)) == [
        "/tmp/a/gone.cr.1.ghost",
        "/tmp/gone.cr.1.ghost",  # CRIU goes up where the folder has gone too
        "/gone.cr.1.ghost",
        "/dev/shm/sem.x.cr.1a.ghost",
        "/dev/sem.x.cr.1a.ghost",
        "/sem.x.cr.1a.ghost",
    ]


def timer(
    number: int, next_s: int, next_ns: int, every_s: int, every_ns: int, ticks: int = 3
) -> bytes:
    about = {
        "f1": number,
        "f4": 1,
        "f5": ticks,
        "f7": next_s,
        "f8": next_ns,
        "f9": every_s,
        "f10": every_ns,
    }
    inner = message(**about)[4:]
    entry = b"\x08\x11\x10" + varint(number) + b"\x62" + varint(len(inner)) + inner
    return struct.pack("<I", len(entry)) + entry


def test_a_periodic_timer_that_had_expired_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "files.img"
    others = [
        file_entry(5, "/a"),
        timer(6, 0, 7, 0, 9),
        timer(7, 0, 0, 0, 0),
        timer(8, 3, 0, 9, 0),
        timer(9, 0, 0, 4, 0, ticks=0),
    ]
    image(path, *others, timer(300, 0, 0, 2, 500), file_entry(10, "/b"))
    before = list(messages(str(path)))
    assert wind_up_timers(str(tmp_path)) == 1
    after = list(messages(str(path)))
    assert len(after) == len(before)
    found = [tuple(one.message(12).integer(n) for n in (1, 4, 5, 7, 8, 9, 10)) for one in after]
    assert found[1:6] == [
        (6, 1, 3, 0, 7, 0, 9),
        (7, 1, 3, 0, 0, 0, 0),
        (8, 1, 3, 3, 0, 9, 0),
        (9, 1, 0, 0, 0, 4, 0),
        (300, 1, 3, 2, 500, 2, 500),
    ]
    assert [one.integer(2) for one in after] == [5, 6, 7, 8, 9, 300, 10]
    assert named_files(str(tmp_path))[1].path == "/b"
    whole = path.read_bytes()
    assert wind_up_timers(str(tmp_path)) == 0
    assert path.read_bytes() == whole


def test_what_is_known_of_open_files(tmp_path: Path) -> None:
    image(
        tmp_path / "files.img",
        file_entry(5, "/data", b"\x40" + varint(4096) + b"\x50" + varint(0o100640)),
        struct.pack("<I", 4) + b"\x08\x02\x10\x09",  # a socket
        file_entry(6, "/log", b"\x50" + varint(0o100644)),
        file_entry(7, "/empty", b"\x40\x00"),
        file_entry(8, "/data", b"\x40\x07"),  # deleted: another file than /data
    )
    image(tmp_path / "remap-fpath.img", message(f1=8, f2=1, f3=GHOST))
    assert named_files(str(tmp_path)) == [
        ("/data", 4096, 0o100640),
        ("/log", None, 0o100644),
        ("/empty", 0, None),
    ]


def mount(number: int, parent: int, point: str) -> bytes:
    body = b"\x10" + varint(number) + b"\x20" + varint(parent)
    body += b"\x3a" + varint(len(point.encode())) + point.encode()
    return struct.pack("<I", len(body)) + body


def test_mounts_that_are_added(tmp_path: Path) -> None:
    """Each on the mount that shows its folder: the deepest on the way, and of two at one place the upper one."""
    path = tmp_path / "mountpoints-12.img"
    tree = [(300, 299, "/"), (301, 300, "/data"), (302, 301, "/data"), (303, 300, "/database")]
    image(path, *(mount(*one) for one in tree))
    add_mounts(str(tmp_path), [("/data/ä/out", "files0"), ("/data", "files1"), ("/home", "files2")])
    added = list(messages(str(path)))[len(tree) :]
    assert [(m.integer(2), m.integer(4), m.text(7).decode(), m.text(18)) for m in added] == [
        (304, 302, "/data/ä/out", b"files0"),
        (305, 302, "/data", b"files1"),
        (306, 300, "/home", b"files2"),
    ]
    assert mount_points(str(tmp_path)) == [
        *(point for _, _, point in tree),
        *("/data/ä/out", "/data", "/home"),
    ]
    image(path)
    with pytest.raises(ImageFileError, match="no mount shows /home"):
        add_mounts(str(tmp_path), [("/home", "files0")])
    path.unlink()
    with pytest.raises(ImageFileError, match="there are 0"):
        add_mounts(str(tmp_path), [("/home", "files0")])


def test_damage_is_said(tmp_path: Path) -> None:
    path = tmp_path / "remap-fpath.img"
    whole = message(f1=5, f2=1, f3=GHOST)
    for data in (whole[:-1], whole[:2], whole + b"\x01"):
        image(path, data)
        with pytest.raises(ImageFileError, match=r"remap-fpath\.img cannot be understood"):
            list(messages(str(path)))
    for text in (b"\x08", b"\x08\xff", b"\x32\x05abc", b"\x0b"):
        with pytest.raises(ImageFileError):
            Message("x.img", text)
    entry = Message("x.img", b"\x08\x05\x32\x01a\x39" + bytes(8))
    assert (entry.integer(1), entry.text(6), entry.integer(2), entry.text(3)) == (5, b"a", 0, b"")
    with pytest.raises(ImageFileError, match="field 6 is no integer"):
        entry.integer(6)
    with pytest.raises(ImageFileError, match="field 1 is no text"):
        entry.message(1)
