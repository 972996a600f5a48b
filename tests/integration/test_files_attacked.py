# SPDX-License-Identifier: Apache-2.0
"""Another user, a real one with a uid of its own, gets in the way of files that root puts back."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from devproxy import config, folders
from devproxy.checkpoint.files import cut
from devproxy.checkpoint.files.put_back import TEMPORARY
from devproxy.checkpoint.files.records import FileEntry
from devproxy.checkpoint.files.tracker import FilesTracker
from devproxy.checkpoint.files.undo import path_hash
from devproxy.errors import DevproxyError, Refused
from tests.integration.needs import missing

OTHER = 4242
SECRET = "only root reads this"
EXCHANGE = 2  # RENAME_EXCHANGE, renameat2(2)
TRIES = 60


class Scene:
    """theirs/d/x was the job's at the cut; victim/x is root's alone."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = root / "state"
        self.job = root / "job"
        self.victim = root / "victim"
        self.theirs = root / "theirs"
        for folder, mode in ((self.job, 0o700), (self.victim, 0o700), (self.theirs, 0o755)):
            folder.mkdir()
            folder.chmod(mode)
        (self.victim / "x").write_text(SECRET)
        (self.victim / "x").chmod(0o600)
        self.said: list[str] = []

    def tracker(self) -> FilesTracker:
        return FilesTracker(str(self.job), str(self.state), job_id="j")

    def put_back(self, *entries: FileEntry) -> None:
        self.tracker().put_back(entries, self.fetch, self.said.append, image_time=time.time())

    @staticmethod
    def fetch(entry: FileEntry, to: int) -> None:
        with open(to, "wb", closefd=False) as file:
            file.write(b"x" * entry.size)

    def unharmed(self) -> bool:
        info = (self.victim / "x").stat()
        right = (0, 0o600) == (info.st_uid, stat.S_IMODE(info.st_mode))
        return right and (self.victim / "x").read_text() == SECRET


@pytest.fixture
def scene() -> Iterator[Scene]:
    if os.geteuid() != 0:
        missing("root", "the test becomes another user")
    with tempfile.TemporaryDirectory(prefix="devproxy-attack-", dir="/tmp") as base:
        os.chmod(base, 0o755)  # the other user gets this far
        yield Scene(Path(base))


def as_other(work: Callable[[], None]) -> int:
    """The pid of a process of the other user that does it."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(OTHER, OTHER, OTHER)
            os.setresuid(OTHER, OTHER, OTHER)
            work()
        finally:
            os._exit(0)
    return pid


@contextmanager
def attacked(work: Callable[[], None]) -> Iterator[None]:
    """Again and again, until the block ends."""

    def for_ever() -> None:
        while os.getppid() != 1:
            work()

    pid = as_other(for_ever)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def exchange(a: Path, b: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.renameat2(-100, os.fsencode(a), -100, os.fsencode(b), EXCHANGE)


def entry_of(path: Path, kind: str = "present") -> FileEntry:
    return FileEntry(str(path), kind, "C", size=7, mode=0o666, uid=OTHER, gid=OTHER)


@pytest.mark.parametrize("kind", ["present", "absent"])
def test_a_folder_replaced_by_a_link_leads_nowhere(scene: Scene, kind: str) -> None:
    """Overwritten, or removed: neither reaches the victim, and a file that comes before is not put back either."""
    os.chown(scene.theirs, OTHER, OTHER)
    os.waitpid(as_other(lambda: os.symlink(scene.victim, scene.theirs / "d")), 0)
    assert (scene.theirs / "d").is_symlink()
    with pytest.raises(Refused, match=f"{scene.theirs} belongs to user {OTHER}"):
        scene.put_back(entry_of(scene.root / "a"), entry_of(scene.theirs / "d" / "x", kind))
    assert scene.unharmed()
    assert not (scene.root / "a").exists()


@pytest.mark.parametrize("kind", ["present", "absent"])
@pytest.mark.parametrize("sticky", [False, True], ids=["theirs", "sticky"])
def test_a_folder_exchanged_all_the_time(scene: Scene, kind: str, sticky: bool) -> None:
    if sticky:
        scene.theirs.chmod(0o1777)
    else:
        os.chown(scene.theirs, OTHER, OTHER)
    folder, link = scene.theirs / "d", scene.theirs / "l"

    def prepare() -> None:
        os.mkdir(folder)
        (folder / "x").write_text("longer than at the cut")
        os.symlink(scene.victim, link)

    os.waitpid(as_other(prepare), 0)
    assert link.is_symlink()
    with attacked(lambda: exchange(folder, link)):
        for _ in range(TRIES):
            with pytest.raises(Refused):
                scene.put_back(entry_of(folder / "x", kind))
            assert scene.unharmed()


def test_a_name_that_is_known_before(scene: Scene) -> None:
    """In a folder where all may make files, links stand ready under the temporary name."""
    scene.theirs.chmod(0o1777)
    path = scene.theirs / "x"
    ready = scene.theirs / f"{TEMPORARY}{path_hash(str(path))}"

    def plant() -> None:
        try:
            os.symlink(scene.victim / "x", ready)
        except FileExistsError:
            pass

    with attacked(plant):
        for _ in range(TRIES):
            path.unlink(missing_ok=True)
            scene.put_back(entry_of(path))
            assert scene.unharmed()
            assert path.read_text() == "x" * 7 and not path.is_symlink()


def test_another_name_of_roots_file_is_no_log_of_the_job(scene: Scene) -> None:
    """With the bytes of the cut at its start, it would be cut and get the log's mode and owner."""
    (scene.victim / "x").write_text("x" * 7)
    os.link(scene.victim / "x", scene.theirs / "x")
    entry = entry_of(scene.theirs / "x")
    entry.nlink = 2
    scene.put_back(entry)
    info = (scene.victim / "x").stat()
    assert (info.st_uid, stat.S_IMODE(info.st_mode)) == (0, 0o600)
    assert (scene.theirs / "x").stat().st_uid == OTHER


def test_roots_own_links_are_followed(scene: Scene) -> None:
    """A home or /var/run that lies elsewhere."""
    os.symlink("../theirs", scene.victim / "relative")
    os.symlink(scene.victim / "relative", scene.root / "home")
    scene.put_back(entry_of(scene.root / "home" / "new" / "y"))
    assert (scene.theirs / "new" / "y").read_text() == "x" * 7


def test_folders_that_are_trusted_by_name(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(scene.theirs, OTHER, OTHER)
    monkeypatch.setenv(config.TRUST_FOLDERS, f"/nowhere:{scene.theirs}")
    scene.put_back(entry_of(scene.theirs / "x"))
    assert (scene.theirs / "x").read_text() == "x" * 7


def test_who_called_us_by_sudo_is_no_stranger(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(scene.theirs, OTHER, OTHER)
    monkeypatch.setenv("SUDO_UID", str(OTHER))
    folders.check(str(scene.theirs))


@pytest.mark.parametrize(
    ("mode", "gid", "why"),
    [
        (0o775, OTHER, f"may be changed by group {OTHER}"),
        (0o775, 0, ""),  # root's own group, nobody else in it
        (0o757, 0, "may be changed by everybody"),
        (0o1777, OTHER, ""),
    ],
)
def test_modes(scene: Scene, mode: int, gid: int, why: str) -> None:
    os.chown(scene.theirs, 0, gid)
    scene.theirs.chmod(mode)
    if not why:
        folders.check(f"{scene.theirs}/not/there")
        return
    with pytest.raises(folders.Unsafe, match=f"{scene.theirs} {why}"):
        folders.check(f"{scene.theirs}/not/there")


def test_links_in_a_circle_end(scene: Scene) -> None:
    os.symlink(scene.root / "b", scene.root / "a")
    os.symlink(scene.root / "a", scene.root / "b")
    with pytest.raises(OSError, match="Too many levels"):
        folders.open_folder(str(scene.root / "a" / "x"))


def test_what_a_killed_restore_left_goes(scene: Scene) -> None:
    path = scene.theirs / "x"
    left = scene.theirs / f"{TEMPORARY}{path_hash(str(path))}-0123"
    of_another = scene.theirs / f"{TEMPORARY}{path_hash('/elsewhere')}-0123"
    in_the_way = scene.theirs / f"{TEMPORARY}{path_hash(str(path))}-4567"
    for each in (left, of_another):
        each.write_text("half")
    in_the_way.mkdir()
    scene.put_back(entry_of(path))
    assert path.exists() and not left.exists()
    assert of_another.exists() and in_the_way.exists()


def test_an_image_says_before_what_a_restore_refuses(scene: Scene) -> None:
    os.chown(scene.theirs, OTHER, OTHER)
    (scene.theirs / "x").write_text("1")
    (scene.job / "files.journal").write_text(f"C 0 0 {scene.theirs}/x\n")
    tracker = scene.tracker()
    (why,) = tracker.unsafe()
    assert f"{scene.theirs} belongs to user {OTHER}" in why
    entries = tracker.snapshot(str(scene.root / "staging"))
    back = [FileEntry.from_dict(json.loads(json.dumps(e.to_dict()))) for e in entries]
    assert tracker.unsafe(back) == [why]


@pytest.mark.parametrize("pipe", [False, True], ids=["file", "pipe"])
def test_another_file_in_the_moment_of_the_copy(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, pipe: bool
) -> None:
    """Root's file must not come into the image with the mode of the one that was looked at, and a FIFO not hold the cut."""
    path = scene.theirs / "x"
    path.write_text("for all")
    (scene.job / "files.journal").write_text(f"C 0 0 {path}\n")
    look = cut.lstat

    def then_exchanged(name: str) -> os.stat_result | None:
        found = look(name)
        path.unlink()
        if pipe:
            os.mkfifo(path)
        else:
            os.link(scene.victim / "x", path)
        return found

    # However slow the machine is, the file is not copied before the cut: then it is looked at once, and not exchanged between
    # two looks.
    monkeypatch.setattr(cut, "YOUNG_NS", 10**18)
    tracker = scene.tracker()
    prepared = tracker.prepare(str(scene.root / "staging"))
    monkeypatch.setattr(cut, "lstat", then_exchanged)
    with pytest.raises(DevproxyError, match="another file took its place"):
        tracker.snapshot(str(scene.root / "staging"), cut=prepared)
