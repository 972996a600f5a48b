"""Whose version of a file is there now, and what becomes of one that is not the job's."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable

from devproxy.checkpoint.files.copying import copy_file
from devproxy.checkpoint.files.known import Known
from devproxy.checkpoint.files.look import lstat, state_of
from devproxy.checkpoint.files.records import PutBack
from devproxy.checkpoint.files.undo import path_hash

# How long after the last note_state() the job may still have written: note_state runs every few seconds.
SLACK_NS = 6_000_000_000
KEPT = ".devproxy-kept-"


def utc() -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


class Owners:
    """Of the files that one restore replaces. What is kept is said, and noted in `done`."""

    def __init__(
        self,
        known: Known,
        image_ns: int,
        replaced_root: str,
        done: PutBack,
        report: Callable[[str], None],
    ) -> None:
        self.known = known
        self.image_ns = image_ns
        self.done = done
        self.report = report
        self.replaced_dir = ""  # made for the first one that is unsure
        self._replaced_root = replaced_root
        self._owners: dict[str, str] = {}

    def look(self, paths: Iterable[str]) -> None:
        """Before the first change: to remove one hard link changes the times of the others."""
        for path in paths:
            if (st := lstat(path)) is not None:
                self._owners[path] = self._decide_owner(path, st)

    def of(self, path: str) -> str:
        """job, other or unsure."""
        return self._owners.get(path, "other")  # came while we work: not the job's

    def _decide_owner(self, path: str, st: os.stat_result) -> str:
        """job, other or unsure: who made the version that is there now."""
        track = self.known.tracks.get(path)
        if track is not None and track.outsider_ns > self.image_ns:
            return "other"
        unsure = track is not None and track.unsure_ns > self.image_ns
        if track is not None and track.noted and track.state == state_of(st):
            return "unsure" if unsure else "job"
        if self.known.ended and track is not None and track.noted:
            return "other"
        last_ns = max(st.st_mtime_ns, st.st_ctime_ns)
        return "unsure" if last_ns <= self.known.alive_ns + SLACK_NS else "other"

    def keep(self, path: str, st: os.stat_result) -> None:
        """Before something else takes its name. A hard link where that works: nothing moves until the rename."""
        owner = self.of(path)
        if owner == "job":
            return
        if owner == "unsure":
            if not self.replaced_dir:
                self.replaced_dir = os.path.join(self._replaced_root, utc())
                os.makedirs(self.replaced_dir, mode=0o700, exist_ok=True)
            kept = os.path.join(
                self.replaced_dir, f"{path_hash(path)}-{os.path.basename(path)}"[:250]
            )
        else:
            folder, name = os.path.split(path)
            if self._kept_before(folder, name, st):
                return  # by a run that did not come to its end
            kept = os.path.join(folder, f"{name[:200]}{KEPT}{utc()}")
            while os.path.lexists(kept):
                kept += "-again"
        try:
            os.link(path, kept, follow_symlinks=False)
        except FileExistsError:
            return
        except OSError:
            if stat.S_ISLNK(st.st_mode):
                os.symlink(os.readlink(path), kept)
            elif stat.S_ISREG(st.st_mode):
                copy_file(path, f"{kept}.part")
                os.rename(f"{kept}.part", kept)
        if owner == "unsure":
            self.done.replaced.append(kept)
        else:
            self.done.kept.append(kept)
            self.report(
                f"{path} was changed by somebody else since the image; that version is kept as {kept}"
            )

    @staticmethod
    def _kept_before(folder: str, name: str, st: os.stat_result) -> bool:
        for other in os.listdir(folder):
            if other.startswith(f"{name[:200]}{KEPT}"):
                there = lstat(os.path.join(folder, other))
                if there is not None and (there.st_dev, there.st_ino) == (st.st_dev, st.st_ino):
                    return True
        return False
