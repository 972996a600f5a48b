# SPDX-License-Identifier: Apache-2.0
"""One run of the campaign `other-user`: root's job has files in folders where another user may do as they like, and does.

The seed gives the folders, the files and what the other user, a process with a uid of its own, does to them all the time:
links, exchanges, FIFOs, planted temporary names. Meanwhile root copies the files into images, puts them back, and puts
them below another folder. What is root's alone stays as it was; no word of it comes to where the other user can read it,
or into an image under another mode; each call ends, with an error of ours or without one.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from devproxy.checkpoint.files import apart
from devproxy.checkpoint.files.put_back import TEMPORARY
from devproxy.checkpoint.files.records import FileEntry
from devproxy.checkpoint.files.undo import path_hash
from devproxy.errors import DevproxyError
from tests.integration.test_files_attacked import OTHER, SECRET, Scene, attacked, exchange

ROUNDS = 40
CALL_S = 20  # in which each call ends
NAMES = ("a", "b", "c", "x")


def run(seed: int) -> dict[str, int]:
    """Raises AssertionError where the promise is broken. Returns what was done, to add up."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="devproxy-attack-", dir="/tmp") as base:
        os.chmod(base, 0o755)  # the other user gets this far
        field = _Field(Path(base), dice)
        before = field.victims()
        figures: dict[str, int] = {}
        signal.signal(signal.SIGALRM, _late)
        try:
            with attacked(field.attack(seed)):
                for _ in range(ROUNDS):
                    name, call = dice.choice(field.calls())
                    how = _outcome(call)
                    figures[f"{name}_{how}"] = figures.get(f"{name}_{how}", 0) + 1
                    assert field.victims() == before, f"after {name}"
                    field.check_no_secret()
        except BaseException as error:
            error.add_note(f"seed {seed}: {[str(path) for path in field.files]}")
            raise
        finally:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return figures


def _late(_number: int, _frame: object) -> None:
    raise AssertionError(f"no end within {CALL_S} s")


def _outcome(call: Callable[[], None]) -> str:
    signal.alarm(CALL_S)
    try:
        call()
    except (DevproxyError, OSError):
        return "refused"
    finally:
        signal.alarm(0)
    return "done"


class _Field(Scene):
    """Three folders: root's, one where all may make files, the other user's. Files of the job in them, and in folders below."""

    def __init__(self, root: Path, dice: random.Random) -> None:
        super().__init__(root)
        self.dice = dice
        (self.victim / "deep").mkdir(mode=0o700)
        for name in NAMES:
            for path in (self.victim / name, self.victim / "deep" / name):
                path.write_text(SECRET)
                path.chmod(0o600)
        self.own, self.shared = root / "own", root / "shared"
        self.own.mkdir()
        self.shared.mkdir()
        self.shared.chmod(0o1777)
        os.chown(self.theirs, OTHER, OTHER)
        self.files: list[Path] = []
        self.lines: list[str] = []
        # With one folder of theirs on the way, nothing at all is put back.
        self.trusting = dice.random() < 0.5
        for area in (self.own, self.shared, *([self.theirs] if self.trusting else [])):
            for _ in range(dice.randint(1, 3)):
                self._plant(area)
        self.rounds = 0

    def _plant(self, area: Path) -> None:
        folder, gone = area, self.dice.random() < 0.3
        for _ in range(self.dice.randint(0, 2)):
            folder /= self.dice.choice(("d", "deep"))
            if not folder.exists() and not gone:
                folder.mkdir()
                if self.trusting and area != self.own and self.dice.random() < 0.6:
                    os.chown(folder, OTHER, OTHER)
        path = folder / self.dice.choice(NAMES)
        if path in self.files:
            return
        if folder.exists():
            path.write_text("of the job")
            if area != self.own:
                os.chown(path, OTHER, OTHER)
        self.files.append(path)
        first = self.dice.choice("CW")
        with open(self.job / "files.journal", "a") as journal:
            journal.write(f"{first} 0 0 {path}\n")

    # -- root ------------------------------------------------------------------------------------------------------

    def calls(self) -> list[tuple[str, Callable[[], None]]]:
        return [("put_back", self._back), ("put_apart", self._apart), ("snapshot", self._image)]

    def _entries(self) -> list[FileEntry]:
        entries = []
        for path in self.dice.sample(self.files, self.dice.randint(1, len(self.files))):
            kind = self.dice.choice(("present", "present", "absent", "symlink", "directory"))
            entry = FileEntry(str(path), kind, "C", size=7, mode=0o644, uid=OTHER, gid=OTHER)
            entry.target = "x" if kind == "symlink" else ""
            entry.mtime_ns = time.time_ns()
            entries.append(entry)
        return entries

    def _back(self) -> None:
        self.put_back(*self._entries())

    def _apart(self) -> None:
        self.rounds += 1
        base = self.root / f"apart-{self.rounds}"
        made = apart.make_base(str(base))
        try:
            self.tracker().put_apart(
                self._entries(),
                str(base),
                self._fetch_many,
                self.said.append,
            )
        finally:
            if self.dice.random() < 0.5:
                apart.drop(str(base), made)

    def _fetch_many(self, files: Sequence[tuple[FileEntry, int]]) -> None:
        for entry, to in files:
            self.fetch(entry, to)

    def _image(self) -> None:
        staging = self.root / f"staging-{self.rounds}"
        self.rounds += 1
        staging.mkdir(mode=0o700)
        try:
            for entry in self.tracker().snapshot(str(staging)):
                if entry.staged and SECRET in Path(entry.staged).read_text():
                    assert (entry.mode, entry.uid) == (0o600, 0), entry
        finally:
            shutil.rmtree(staging)

    # -- the other user -------------------------------------------------------------------------------------------

    def attack(self, seed: int) -> Callable[[], None]:
        """One move of theirs. What they may not do fails, as it should."""
        dice = random.Random(-seed)
        paths = [p for p in self.files if self.own not in p.parents]
        folders = sorted({f for p in paths for f in p.parents if self.root in f.parents})
        targets = [self.victim, self.victim / "x", self.victim / "deep", Path("/etc")]

        def move() -> None:
            path = dice.choice(paths)
            at = dice.choice([path, path, dice.choice(folders), *_temporary(path)])
            beside = at.parent / f"made-{dice.randrange(3)}"
            with suppress(OSError):
                match dice.choice("eeeeeellLurdpwhc"):
                    case "e":
                        exchange(at, beside)
                    case "l":
                        beside.symlink_to(dice.choice(targets))
                    case "L":
                        at.symlink_to(dice.choice(targets))
                    case "u":
                        dice.choice((at, beside)).unlink()
                    case "r":
                        at.rename(beside)
                    case "d":
                        dice.choice((at, beside)).mkdir()
                    case "p":
                        os.mkfifo(dice.choice((at, beside)))
                    case "w":
                        fd = os.open(at, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK)
                        os.write(fd, b"longer than it was, by another hand")
                        os.close(fd)
                    case "h":
                        os.link(dice.choice(targets), at)
                    case "c":
                        at.chmod(dice.choice((0o777, 0o600, 0o4755)))

        return move

    # -- what must hold -------------------------------------------------------------------------------------------

    def victims(self) -> dict[str, tuple[object, ...]]:
        """All that is root's alone; of the folder where root has the job's files, that no link came."""
        found: dict[str, tuple[object, ...]] = {}
        for path in (self.victim, *sorted(self.victim.rglob("*"))):
            info = path.lstat()
            text = path.read_text() if stat.S_ISREG(info.st_mode) else ""
            found[str(path)] = (info.st_ino, info.st_mode, info.st_uid, info.st_mtime_ns, text)
        return found

    def check_no_secret(self) -> None:
        """Where the other user can read."""
        for area in (self.own, self.shared, self.theirs):
            fd = os.open(area, os.O_RDONLY | os.O_DIRECTORY)
            try:
                _look_for_secret(fd, str(area))
            finally:
                os.close(fd)


def _look_for_secret(folder: int, at: str) -> None:
    """By descriptors, and waiting for no FIFO: all is exchanged meanwhile."""
    for name in os.listdir(folder):
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        except OSError:
            continue
        try:
            mode = os.fstat(fd).st_mode
            if stat.S_ISDIR(mode):
                _look_for_secret(fd, f"{at}/{name}")
            elif stat.S_ISREG(mode):
                assert SECRET.encode() not in os.read(fd, 4096), f"{at}/{name}"
        finally:
            os.close(fd)


def _temporary(path: Path) -> list[Path]:
    """Names that root uses for a moment beside it: those that are known before, and those that are there now."""
    start = f"{TEMPORARY}{path_hash(str(path))}"
    with suppress(OSError):
        return [path.parent / start, *path.parent.glob(f"{TEMPORARY}*")]
    return []
