# SPDX-License-Identifier: Apache-2.0
"""A job's files below another folder: what an image would put back, and nothing of it in its own place."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from devproxy import runtime
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


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel lets root alone mark a folder as opaque; another user tries the rest with an attribute of his own."""
    if os.geteuid() != 0:
        monkeypatch.setattr(apart, "_HIDES", "user.overlay.opaque")


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


def put(tmp_path: Path, entries: list[FileEntry], contents: dict[str, bytes], top: Path) -> Path:
    """The folder that has what the image would put back below `top`."""
    base = tmp_path / "base"
    assert apart.make_base(str(base))
    tracker = FilesTracker(str(tmp_path / "job"), str(tmp_path / "state"), job_id="j")
    assert tracker.apart_needs(entries) == [str(top)]

    def fetch(files: Sequence[tuple[FileEntry, int]]) -> None:
        for entry, fd in files:
            os.write(fd, contents[entry.path.removeprefix(str(base))])

    before = look(top)
    over = tracker.put_apart(entries, str(base), fetch, print)
    assert look(top) == before
    own = Path(f"{base}{top}")
    assert over == {str(top): "." in hiding(own)}
    return own


def hiding(folder: Path) -> set[str]:
    """Of the folders below, those that hide what is in their own place."""
    found = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    return {str(path.relative_to(folder)) for path in found if apart._HIDES in os.listxattr(path)}


def present(path: Path, data: bytes) -> FileEntry:
    return FileEntry(str(path), "present", "C", size=len(data), mode=0o640, uid=os.geteuid(),
                     gid=os.getegid(), mtime_ns=10**18, nlink=1)  # fmt: skip


@pytest.mark.parametrize("others", [False, True], ids=["alone", "others"])
def test_everything_is_below_the_folder(place: Path, tmp_path: Path, others: bool) -> None:
    if others:
        (place / "script.py").write_text("somebody else's")
    contents = {str(place / "log"): b"one\ntwo\n", str(place / "deep" / "state"): b"old"}
    entries = [
        FileEntry("", "mark", "?"),
        FileEntry(str(place), "directory", "C", mode=0o700),
        FileEntry(str(place / "later"), "absent", "C"),
        FileEntry(str(place / "never"), "absent", "C"),
        FileEntry(str(place / "link"), "symlink", "C", target="deep/state"),
        FileEntry(str(place / "huge"), "too-large", "W"),
        *(present(Path(path), data) for path, data in contents.items()),
    ]
    before = look(place)
    own = put(tmp_path, entries, contents, place)
    absent = {"later": (stat.S_IFCHR, 0, b"")} if others else {}
    assert look(own) == absent | {
        "deep": (before["deep"][0], 0, b""),
        "deep/state": (stat.S_IFREG | 0o640, 10**18, b"old"),
        "link": (stat.S_IFLNK | 0o777, 0, b""),
        "log": (stat.S_IFREG | 0o640, 10**18, b"one\ntwo\n"),
    }
    assert os.readlink(own / "link") == "deep/state"
    assert not others or (own / "later").lstat().st_rdev == 0
    assert own.stat().st_mode == place.stat().st_mode
    assert hiding(own) == ({"deep"} if others else {".", "deep"})


@pytest.mark.parametrize("kept", ["", "too large", "empty folder"])
def test_a_folder_that_came_after_the_image(place: Path, tmp_path: Path, kept: str) -> None:
    """What is in it needs no word of its own. What the image does not put back stays to be seen."""
    new = place / "new" / "newer"
    new.mkdir(parents=True)
    (new / "file").write_text("x")
    entries = [
        *(FileEntry(str(path), "absent", "C") for path in (new.parent, new, new / "file")),
        *(FileEntry(str(place / name), "absent", "C") for name in ("later", "link", "log")),
        FileEntry(str(place / "deep" / "state"), "absent", "C"),
    ]
    if kept == "too large":
        (place / "huge").write_text("x")
        entries.append(FileEntry(str(place / "huge"), "too-large", "C"))
    elif kept:
        (place / "empty").mkdir()
    own = put(tmp_path, entries, {}, place)
    hidden = {str(path.relative_to(own)) for path in own.rglob("*") if not path.is_dir()}
    assert hidden == ({"new", "later", "link", "log"} if kept else set())
    assert hiding(own) == ({"deep"} if kept else {".", "deep"})


def test_a_folder_that_the_image_has_and_nobody_else(place: Path, tmp_path: Path) -> None:
    """It is dressed when all in it is there: devproxy opens no folder of another user."""
    gone = place / "gone"
    other = 4242 if os.geteuid() == 0 else os.geteuid()
    entries = [
        FileEntry(str(folder), "directory", "C", mode=0o750, uid=other, gid=os.getegid(), xattrs={"user.note": "31"})
        for folder in (gone, gone / "below")
    ]  # fmt: skip
    files = [gone / "file", gone / "below" / "file"]
    entries += [present(path, b"1") for path in files]
    (place / "script.py").write_text("somebody else's")
    own = put(tmp_path, entries, {str(path): b"1" for path in files}, place)
    for folder in (own / "gone", own / "gone" / "below"):
        info = folder.stat()
        assert (info.st_uid, stat.S_IMODE(info.st_mode)) == (other, 0o750)
        assert os.listxattr(folder) == ["user.note"]
        assert (folder / "file").read_text() == "1"


def test_the_journal_is_read_after_the_names(place: Path, tmp_path: Path) -> None:
    """A file that the living job makes meanwhile is the job's, not somebody else's."""
    (tmp_path / "job").mkdir()
    entries = [present(place / name, b"") for name in ("log", "later", "link", "deep/state")]
    listed = apart.listed
    made = place / "meanwhile"

    def late(plan: object) -> dict[str, set[str]]:
        (tmp_path / "job" / runtime.JOURNAL).write_text(f"C 1 1 {made}\n")
        made.write_text("x")
        return listed(plan)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apart, "listed", late)
        base = tmp_path / "base"
        assert apart.make_base(str(base))
        tracker = FilesTracker(str(tmp_path / "job"), str(tmp_path / "state"), job_id="j")
        tracker.put_apart(entries, str(base), lambda files: None, print)
    assert "." in hiding(Path(f"{base}{place}"))


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
