# SPDX-License-Identifier: Apache-2.0
"""What a restore has to change: the files of the image, and those that the job first touched after the cut."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable

from devproxy.checkpoint.files.known import Known
from devproxy.checkpoint.files.look import is_as_at_the_cut, lstat
from devproxy.checkpoint.files.places import Places
from devproxy.checkpoint.files.records import FileEntry, PutBack
from devproxy.checkpoint.files.undo import Undo


class Plan:
    """wanted: by path, each file as it is to be. copies: where the content of those lies that are in no image."""

    def __init__(self, known: Known, undo: Undo, entries: Iterable[FileEntry]) -> None:
        self.known = known
        self.undo = undo
        every = list(entries)
        self.renames_at_cut = next((e.size for e in every if e.kind == "mark"), None)
        self.wanted = {e.path: e for e in every if e.kind != "mark"}
        self.copies: dict[str, str] = {}

    def would_change(self) -> list[str]:
        """Paths that putting back would touch now, sorted. Changes nothing."""
        if self.renames_at_cut is not None and len(self.known.renames) > self.renames_at_cut:
            return sorted({new for _, new in self.known.renames[self.renames_at_cut :]})
        found = []
        for entry in self.wanted.values():
            st = lstat(entry.path)
            if entry.kind == "absent":
                differs = st is not None
            elif entry.kind == "directory":
                differs = st is None or not stat.S_ISDIR(st.st_mode)
            elif entry.kind in ("present", "symlink"):
                differs = not is_as_at_the_cut(entry)
            else:
                differs = False
            if differs:
                found.append(entry.path)
        for path, track in self.known.tracks.items():
            if path not in self.wanted and (track.first != "C" or lstat(path) is not None):
                found.append(path)
        return sorted(found)

    def touches(self) -> set[str]:
        """Every path that putting back may change, as far as its folder is concerned."""
        found = {entry.path for entry in self.wanted.values() if not entry.listed_only}
        for path, track in self.known.tracks.items():
            if track.first == "C" or lstat(self.undo.copy_of(path)) is not None:
                found.add(path)
        if self.renames_at_cut is not None:
            for pair in self.known.renames[self.renames_at_cut :]:
                found.update(pair)
        return found

    def take_renames_back(self, places: Places) -> None:
        """Directory renames after the cut, last first. One whose old name is taken or new name is gone is done."""
        if self.renames_at_cut is None:
            return
        for old, new in reversed(self.known.renames[self.renames_at_cut :]):
            st = lstat(new)
            if st is not None and stat.S_ISDIR(st.st_mode) and lstat(old) is None:
                places.rename(new, old)
            if lstat(new) is None and lstat(old) is not None:
                self._move_states(old, new)

    def _move_states(self, old: str, new: str) -> None:
        """What was seen last under the new name is what lies under the old one; also after a crash behind the rename."""
        tracks = self.known.tracks
        for path in [p for p in tracks if p.startswith(new + "/")]:
            source, target = tracks[path], tracks.get(old + path[len(new) :])
            if target is not None and source.state is not None:
                target.state, target.noted = source.state, source.noted
                target.outsider_ns = max(target.outsider_ns, source.outsider_ns)
                target.unsure_ns = max(target.unsure_ns, source.unsure_ns)
                source.state = None

    def add_touched_since(self, done: PutBack, report: Callable[[str], None]) -> None:
        """What the job made goes; what it changed comes back from its copy, and without one stays, with a line about it."""
        renamed = self.known.renames[self.renames_at_cut or 0 :]
        for path, track in self.known.tracks.items():
            if path in self.wanted:
                continue
            if track.first == "C":
                self.wanted[path] = FileEntry(path, "absent", "C")
                continue
            copy = self.undo.copy_of(path)
            st = lstat(copy)
            if st is None:
                if not any(path == old or path.startswith(old + "/") for old, _ in renamed):
                    done.not_rolled_back.append(path)
                    report(
                        f"{path} was first changed by the job after the image, and no copy of it was kept: it stays as it is"
                    )
                continue
            kind = "directory" if stat.S_ISDIR(st.st_mode) else "present"
            entry = FileEntry(
                path, kind, "W", 0, 0, st.st_size, stat.S_IMODE(st.st_mode), st.st_uid, st.st_gid
            )
            entry.mtime_ns = st.st_mtime_ns
            if stat.S_ISLNK(st.st_mode):
                entry.kind, entry.target = "symlink", os.readlink(copy)
            else:
                entry.xattrs = self._attributes(path, report)
            self.wanted[path] = entry
            self.copies[path] = copy

    def _attributes(self, path: str, report: Callable[[str], None]) -> dict[str, str] | None:
        try:
            return self.undo.attributes_of(path, report)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            report(
                f"{path} comes back without the ACL and the attributes that it had: {self.undo.copy_of(path)}.x cannot be "
                f"read: {why}"
            )
            return None
