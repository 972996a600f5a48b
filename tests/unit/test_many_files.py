# SPDX-License-Identifier: Apache-2.0
"""Many files of a job: what a freeze does for each of them, and what a restore does for all at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from devproxy.checkpoint.files import copying, cut, put_back
from devproxy.checkpoint.files.records import FileEntry
from devproxy.checkpoint.files.tracker import FilesTracker

FILES = 300  # more than a restore fetches at once


class Scene:
    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "job").mkdir()
        self.tracker = FilesTracker(str(root / "job"), str(root / "state"))
        self.paths = [root / "data" / f"{n % 7}" / f"file-{n}" for n in range(FILES)]
        for n, path in enumerate(self.paths):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{n}" if n else "")
            self.tracker.mention(str(path), "C")
        time.sleep(0.1)  # what is younger is copied in the freeze

    def prepare(self, name: str, previous: Sequence[FileEntry] = ()) -> cut.Cut:
        return self.tracker.prepare(str(self.root / name), previous=previous)

    def snapshot(self, name: str, prepared: cut.Cut) -> dict[str, FileEntry]:
        found = self.tracker.snapshot(str(self.root / name), cut=prepared)
        return {entry.path: entry for entry in found}


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def staged(entry: FileEntry) -> str:
    return Path(entry.staged).read_text() if entry.staged else ""


def counted(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> list[object]:
    calls: list[object] = []
    real: Callable[..., object] = getattr(module, name)

    def call(*arguments: object, **more: object) -> object:
        calls.append(arguments)
        return real(*arguments, **more)

    monkeypatch.setattr(module, name, call)
    return calls


def test_a_freeze_looks_once_at_what_has_not_changed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = scene.prepare("one")
    scene.paths[5].write_text("new")
    looks, opens = counted(monkeypatch, cut, "lstat"), counted(monkeypatch, os, "open")
    saves = counted(monkeypatch, type(scene.tracker.known), "save")
    entries = scene.snapshot("one", prepared)
    opened = [call for call in opens if "file-" in str(call)]
    monkeypatch.undo()
    assert not saves
    assert len(looks) == FILES + 1  # the changed one twice
    assert {Path(str(call[0])).name for call in opened} == {"file-5", Path(entries[str(scene.paths[5])].staged).name}  # type: ignore[index]  # fmt: skip
    for n, path in enumerate(scene.paths):
        assert staged(entries[str(path)]) == ("new" if n == 5 else f"{n}" if n else "")
    assert (
        len(list((scene.root / "one").iterdir())) == FILES - 1
    )  # no copy of what changed, none of the empty one


@pytest.mark.parametrize("how", ["same size and time", "exchanged", "gone", "mapped", "mode"])
def test_what_changes_after_the_first_look(scene: Scene, how: str) -> None:
    """The mode is what it is in the freeze: whoever may not read the file then, may not read what comes back."""
    path = scene.paths[8]
    prepared = scene.prepare("one")
    before = path.stat()
    if how == "gone":
        path.unlink()
    elif how == "exchanged":
        other = scene.root / "other"
        other.write_text("x")
        other.rename(path)
    elif how == "mode":
        path.chmod(0o600)
    elif how == "mapped":
        scene.tracker.known.tracks[str(path)].mapped = True
    else:
        path.write_text("x")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    entry = scene.snapshot("one", prepared)[str(path)]
    assert entry.kind == ("absent" if how == "gone" else "present")
    if how in ("same size and time", "exchanged"):
        assert staged(entry) == "x"
    if how == "mode":
        assert entry.mode == 0o600
    assert entry.mapped == (how == "mapped")


def test_a_file_that_was_just_written_is_copied_in_the_freeze(scene: Scene) -> None:
    """Another write within one tick of the kernel's clock shows the same times."""
    path = scene.paths[3]
    path.write_text("a")
    prepared = scene.prepare("one")
    path.write_text("b")
    assert staged(scene.snapshot("one", prepared)[str(path)]) == "b"


def test_an_empty_file_is_no_work_for_the_next_image(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = list(scene.snapshot("one", scene.prepare("one")).values())
    opens = counted(monkeypatch, os, "open")
    for entry in first:
        entry.refs = ["a ref"] if entry.staged else []
    second = scene.snapshot("two", scene.prepare("two", first))
    assert not [call for call in opens if "file-" in str(call)]
    assert not [entry for entry in second.values() if entry.staged]


def test_the_state_is_kept_after_the_freeze(scene: Scene) -> None:
    prepared = scene.prepare("one")
    scene.paths[5].write_text("new")
    scene.snapshot("one", prepared)
    scene.tracker.keep_state()
    track = FilesTracker(str(scene.root / "job"), str(scene.root / "state")).known.tracks[
        str(scene.paths[5])
    ]
    assert track.state is not None
    assert track.state[1] == scene.paths[5].stat().st_ino
    assert track.state[4] == scene.paths[5].stat().st_ctime_ns


def test_a_restore_fetches_and_syncs_many_at_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing takes its place before it is durable."""
    entries = list(scene.snapshot("one", scene.prepare("one")).values())
    for path in scene.paths:
        path.unlink()
    events: list[str] = []
    fetched: list[int] = []

    def fetch_many(wanted: Sequence[tuple[FileEntry, int]]) -> None:
        events.append("fetch")
        fetched.append(len(wanted))
        for entry, to in wanted:
            os.write(to, staged(entry).encode())

    def one(entry: FileEntry, to: int) -> None:
        raise AssertionError

    def note(module: object, name: str) -> None:
        real: Callable[..., object] = getattr(module, name)

        def call(*arguments: object, **more: object) -> object:
            events.append(name)
            return real(*arguments, **more)

        monkeypatch.setattr(module, name, call)

    note(put_back, "sync_around")
    note(os, "rename")
    note(os, "fsync")
    done = scene.tracker.put_back(
        entries, one, lambda text: None, image_time=time.time(), fetch_many=fetch_many
    )
    monkeypatch.undo()
    assert len(done.restored) == FILES
    assert max(fetched) < FILES
    assert sum(fetched) == sum(entry.size > 0 for entry in entries) > 0
    assert events.count("fsync") + events.count("sync_around") <= 2 * len(fetched) + 16
    for n, event in enumerate(events):
        if event == "rename":
            last = max(i for i in range(n) if events[i] != "rename")
            assert events[last] in ("sync_around", "fsync")
    for n, path in enumerate(scene.paths):
        assert path.read_text() == (f"{n}" if n else "")


def test_a_restore_that_fails_in_the_middle_leaves_no_temporary(scene: Scene) -> None:
    entries = list(scene.snapshot("one", scene.prepare("one")).values())
    for path in scene.paths:
        path.write_text("later")

    def fetch(entry: FileEntry, to: int) -> None:
        if entry.path == str(scene.paths[200]):
            raise OSError(5, "an error")
        os.write(to, staged(entry).encode())

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="an error"):
        scene.tracker.put_back(entries, fetch, lambda text: None, image_time=time.time())
    assert len(os.listdir("/proc/self/fd")) == before
    assert not list((scene.root / "data").rglob(f"{put_back.TEMPORARY}*"))
    for n, path in enumerate(scene.paths):
        assert path.read_text() in ("later", f"{n}" if n else "")
    scene.tracker.put_back(
        entries,
        lambda entry, to: copying.copy_to(entry.staged, to) if entry.staged else None,
        lambda text: None,
        image_time=time.time(),
    )
    for n, path in enumerate(scene.paths):
        assert path.read_text() == (f"{n}" if n else "")
