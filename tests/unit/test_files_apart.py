# SPDX-License-Identifier: Apache-2.0
"""A job's files below another folder: what an image would put back, and nothing of it in its own place."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from devproxy.checkpoint.files import apart
from devproxy.checkpoint.files.records import FileEntry
from devproxy.checkpoint.files.tracker import FilesTracker
from devproxy.folders import Unsafe


def look(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    found = {}
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        regular = stat.S_ISREG(info.st_mode)
        data = path.read_bytes() if regular else b""
        found[str(path.relative_to(folder))] = (
            info.st_mode,
            info.st_mtime_ns if regular else 0,
            data,
        )
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """With what a job has made of its files since the image."""
    out = tmp_path / "out"
    (out / "deep").mkdir(parents=True, mode=0o750)
    (out / "log").write_text("one\ntwo\nand more\n")
    (out / "deep" / "state").write_text("new")
    (out / "later").write_text("made after the image")
    (out / "link").symlink_to("state")
    return out


def test_everything_is_below_the_folder(place: Path, tmp_path: Path) -> None:
    contents = {str(place / "log"): b"one\ntwo\n", str(place / "deep" / "state"): b"old"}
    entries = [
        FileEntry("", "mark", "?"),
        FileEntry(str(place), "directory", "C", mode=0o700),
        FileEntry(str(place / "later"), "absent", "C"),
        FileEntry(str(place / "never"), "absent", "C"),
        FileEntry(str(place / "link"), "symlink", "C", target="deep/state"),
        FileEntry(str(place / "huge"), "too-large", "W"),
        *(
            FileEntry(path, "present", "C", size=len(data), mode=0o640, uid=os.geteuid(),
                      gid=os.getegid(), mtime_ns=10**18, nlink=1)
            for path, data in contents.items()
        ),
    ]  # fmt: skip
    before = look(place)
    base = tmp_path / "base"
    assert apart.make_base(str(base))
    tracker = FilesTracker(str(tmp_path / "job"), str(tmp_path / "state"), job_id="j")
    assert tracker.apart_needs(entries) == [str(place)]

    def fetch(files: Sequence[tuple[FileEntry, int]]) -> None:
        for entry, fd in files:
            os.write(fd, contents[entry.path.removeprefix(str(base))])

    assert tracker.put_apart(entries, str(base), fetch, print) == [str(place)]
    assert look(place) == before
    own = Path(f"{base}{place}")
    assert look(own) == {
        "deep": (before["deep"][0], 0, b""),
        "deep/state": (stat.S_IFREG | 0o640, 10**18, b"old"),
        "later": (stat.S_IFCHR, 0, b""),
        "link": (stat.S_IFLNK | 0o777, 0, b""),
        "log": (stat.S_IFREG | 0o640, 10**18, b"one\ntwo\n"),
    }
    assert os.readlink(own / "link") == "deep/state"
    assert (own / "later").lstat().st_rdev == 0
    assert own.stat().st_mode == place.stat().st_mode


def test_which_folders_need_an_overlay() -> None:
    found = apart.tops(["/a/b", "/a/b/c", "/a/bc", "/d e", "/a-b", "/a/b"])
    assert found == ["/a/b", "/a/bc", "/a-b", "/d e"]
    assert apart.tops(["/a", "/"]) == ["/"]
    assert apart.is_in("/a/b", "/a")
    assert not apart.is_in("/ab", "/a")


def test_the_folder(tmp_path: Path) -> None:
    base = tmp_path / "base"
    assert apart.make_base(str(base))
    assert stat.S_IMODE(base.stat().st_mode) == 0o700
    assert not apart.make_base(str(base))
    (base / "x").mkdir()
    (base / "y").symlink_to(tmp_path)
    with pytest.raises(FileExistsError, match="it is not empty"):
        apart.make_base(str(base))
    (tmp_path / "stays").write_text("x")
    apart.drop(str(base), made=False)
    assert not list(base.iterdir())
    apart.drop(str(base), made=True)
    assert not base.exists()
    assert (tmp_path / "stays").exists()
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(Unsafe):
        apart.make_base(str(open_to_all / "base"))
