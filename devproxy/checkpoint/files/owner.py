# SPDX-License-Identifier: Apache-2.0
"""Whose version of a file is there now, and what becomes of one that is not the job's."""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable

from devproxy import folders
from devproxy.checkpoint.files.copying import copy_to, new_file
from devproxy.checkpoint.files.known import Known
from devproxy.checkpoint.files.look import lstat, state_of
from devproxy.checkpoint.files.places import Places
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
        places: Places,
    ) -> None:
        self.known = known
        self.places = places
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
        folder, name = self.places.of(path)
        if owner == "unsure":
            if not self.replaced_dir:
                self.replaced_dir = os.path.join(self._replaced_root, utc())
            beside = self.replaced_dir
            kept = f"{path_hash(path)}-{name}"[:250]
            to = folders.open_folder(beside, make=True, mode=0o700)
        else:
            if self._kept_before(folder, name, st):
                return  # by a run that did not come to its end
            beside = os.path.dirname(path)
            kept = f"{name[:200]}{KEPT}{utc()}"
            to = os.dup(folder)
        try:
            while owner == "other" and kept in folders.names_in(to):
                kept += "-again"
            if not self._keep_as(folder, name, st, to, kept):
                return
        finally:
            os.close(to)
        kept = os.path.join(beside, kept)
        if owner == "unsure":
            self.done.replaced.append(kept)
        else:
            self.done.kept.append(kept)
            self.report(
                f"{path} was changed by somebody else since the image; that version is kept as {kept}"
            )

    @staticmethod
    def _keep_as(folder: int, name: str, st: os.stat_result, to: int, kept: str) -> bool:
        """False: it was kept under that name before."""
        try:
            os.link(name, kept, src_dir_fd=folder, dst_dir_fd=to, follow_symlinks=False)
        except FileExistsError:
            return False
        except OSError:
            if stat.S_ISLNK(st.st_mode):
                os.symlink(os.readlink(name, dir_fd=folder), kept, dir_fd=to)
            elif stat.S_ISREG(st.st_mode):
                part = f"{KEPT}{secrets.token_hex(8)}"
                fd = new_file(part, to)
                try:
                    copy_to(name, fd, folder=folder)
                finally:
                    os.close(fd)
                os.rename(part, kept, src_dir_fd=to, dst_dir_fd=to)
        return True

    @staticmethod
    def _kept_before(folder: int, name: str, st: os.stat_result) -> bool:
        for other in folders.names_in(folder):
            if other.startswith(f"{name[:200]}{KEPT}"):
                there = os.lstat(other, dir_fd=folder)
                if (there.st_dev, there.st_ino) == (st.st_dev, st.st_ino):
                    return True
        return False
