# SPDX-License-Identifier: Apache-2.0
"""The content of all files that the job has touched, taken while no process of the tree runs."""

from __future__ import annotations

import gc
import os
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from devproxy import procfs
from devproxy.checkpoint.files import xattrs
from devproxy.checkpoint.files.copying import check_same, copy_content
from devproxy.checkpoint.files.known import Known, Track
from devproxy.checkpoint.files.leases import borrowed
from devproxy.checkpoint.files.look import State, lstat, state_of
from devproxy.checkpoint.files.records import YOUNG_NS, FileEntry, unchanged
from devproxy.errors import DevproxyError

FILES_MAX_BYTES = 1 << 30
# A larger file that has just changed will have changed again at the cut: to copy it before would be in vain.
_LARGE_BYTES = 1 << 20
_LARGE_REST_NS = 5_000_000_000
_LEASES_EVERY = 64  # files; a lease may come while the job runs


class Cut:
    """One snapshot. What is the same as in `previous` takes its refs; else a copy lies at `staged`.

    prepare(), while the job still runs, does what it can of the work; take() then looks once at each file.
    """

    def __init__(
        self,
        staging_dir: str,
        previous: Iterable[FileEntry],
        files_max: int,
        shared: Callable[[str], bool],
    ) -> None:
        self.staging_dir = staging_dir
        self.older = {e.path: e for e in previous}
        self.files_max = files_max
        self.shared = shared
        self.leases = procfs.leases()
        self.inodes: dict[tuple[int, int], str] = {}
        self.entries: list[FileEntry] = []
        self._ready: dict[str, tuple[FileEntry, State]] = {}
        self._copies = 0

    def prepare(self, tracks: Iterable[tuple[str, Track]]) -> None:
        """Entries and copies of the files that rest. The job runs: what cannot be done now is left to take()."""
        for number, (path, track) in enumerate(tracks):
            if number % _LEASES_EVERY == 0:
                self.leases = procfs.leases()
            now_ns = time.time_ns()
            st = lstat(path)
            if st is None or not stat.S_ISREG(st.st_mode) or st.st_nlink != 1 or track.mapped:
                continue
            rests_ns = now_ns - max(st.st_mtime_ns, st.st_ctime_ns)
            if rests_ns <= (YOUNG_NS if st.st_size < _LARGE_BYTES else _LARGE_REST_NS):
                continue
            if st.st_size > self.files_max or (st.st_dev, st.st_ino) in self.leases:
                continue
            if self.shared(path):
                continue
            entry = _entry(path, track, st, now_ns)
            try:
                self._content(entry)
            except (OSError, DevproxyError):
                self._drop_copy(entry)
                continue
            if entry.kind == "present":
                self._ready[path] = entry, state_of(st)

    def take(self, known: Known) -> list[FileEntry]:
        """How each file looks goes into `known` too. Raises DevproxyError when a file cannot be copied; nothing of the job
        was changed then."""
        self.entries.append(FileEntry("", "mark", "?", size=len(known.renames)))
        self.leases = procfs.leases()
        rest = [path for path in known.tracks if path not in self._ready]
        now_ns = time.time_ns()
        collects = gc.isenabled()
        gc.disable()  # with hundreds of thousands of objects around, each collection takes long
        try:
            self._take_ready(known, rest, now_ns)
        finally:
            if collects:
                gc.enable()
        for path in sorted(rest):
            self._take(path, known.tracks[path])
        return self.entries

    def _take_ready(self, known: Known, rest: list[str], now_ns: int) -> None:
        """What has changed since prepare() goes into `rest`."""
        tracks, append = known.tracks, self.entries.append
        for path, (entry, state) in self._ready.items():
            if (track := tracks.get(path)) is None:
                self._drop_copy(entry)
            elif _as_prepared(entry, lstat(path)) and not track.mapped:
                entry.taken_ns, entry.first = now_ns, track.first
                track.state, track.noted = state, True
                append(entry)
            else:
                self._drop_copy(entry)
                rest.append(path)

    def _drop_copy(self, entry: FileEntry) -> None:
        if entry.staged:
            with suppress(OSError):
                os.unlink(entry.staged)
            entry.staged = ""

    def _take(self, path: str, track: Track) -> None:
        now_ns = time.time_ns()
        st = lstat(path)
        track.state, track.noted = state_of(st), True
        if st is None:
            self.entries.append(FileEntry(path, "absent", track.first, taken_ns=now_ns))
            return
        entry = _entry(path, track, st, now_ns)
        self.entries.append(entry)
        if self.shared(path):
            entry.kind, entry.why = "shared-fs", "it lies on a shared file system"
        elif stat.S_ISDIR(st.st_mode):
            entry.kind, entry.size = "directory", 0
            entry.xattrs = _of_folder(path, st)
        elif stat.S_ISLNK(st.st_mode):
            entry.kind, entry.target = "symlink", os.readlink(path)
        elif not stat.S_ISREG(st.st_mode):
            entry.kind, entry.why = "special", "it is not a regular file"
        elif st.st_size > self.files_max:
            entry.kind, entry.why = "too-large", f"{st.st_size} bytes are above --files-max"
        elif st.st_nlink > 1 and (leader := self.inodes.get((st.st_dev, st.st_ino))):
            entry.link = leader
        else:
            self.inodes[st.st_dev, st.st_ino] = path
            self._content(entry)

    def _content(self, entry: FileEntry) -> None:
        old = self.older.get(entry.path)
        stored = old is not None and old.xattrs is not None and (old.refs or not old.size)
        if old is not None and stored and unchanged(old, entry):
            entry.refs, entry.xattrs = list(old.refs), dict(old.xattrs or {})
            return
        if entry.size:
            entry.staged = os.path.join(self.staging_dir, f"file-{self._copies:06d}")
            self._copies += 1
        self._stage(entry)

    def _stage(self, entry: FileEntry) -> None:
        if holder := self.leases.get((entry.dev, entry.ino)):
            with borrowed(holder, entry.path, entry.dev, entry.ino) as source:
                self._copy(source, entry)
            return
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO may have come
        try:
            source = os.open(entry.path, flags | os.O_NOATIME)
        except PermissionError:
            try:
                source = os.open(entry.path, flags)
            except PermissionError as e:
                entry.kind, entry.staged = "special", ""
                entry.why = f"it cannot be read: {e.strerror}"
                return
        try:
            self._copy(source, entry)
        finally:
            os.close(source)

    def _copy(self, source: int, entry: FileEntry) -> None:
        try:
            # Its mode and owner were another's: the content of a file that only root may read would come back for all.
            check_same(source, entry.path, (entry.dev, entry.ino))
            entry.xattrs = xattrs.read(source)
            if not entry.staged:  # an empty file
                return
            target = os.open(
                entry.staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
            )
            try:
                copy_content(source, target, entry.size)
            finally:
                os.close(target)
        except OSError as e:
            raise DevproxyError(
                f"{entry.path}, a file of the job, cannot be copied to {entry.staged}: {e.strerror}",
                "make room there; the job goes on, no image was made",
                object=entry.path,
            ) from e


def _entry(path: str, track: Track, st: os.stat_result, now_ns: int) -> FileEntry:
    return FileEntry(
        path,
        "present",
        track.first,
        st.st_dev,
        st.st_ino,
        st.st_size,
        stat.S_IMODE(st.st_mode),
        st.st_uid,
        st.st_gid,
        st.st_mtime_ns,
        st.st_ctime_ns,
        now_ns,
        st.st_nlink,
        track.mapped,
    )


def _of_folder(path: str, st: os.stat_result) -> dict[str, str] | None:
    """Its attributes; None where another took its place."""
    try:
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        there = os.fstat(fd)
        if (there.st_dev, there.st_ino) != (st.st_dev, st.st_ino):
            return None
        return xattrs.read(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _as_prepared(entry: FileEntry, st: os.stat_result | None) -> bool:
    """True when nobody has changed the file since prepare(): it rested then, so a later change has a later ctime."""
    return (
        st is not None
        and st.st_ctime_ns == entry.ctime_ns
        and st.st_ino == entry.ino
        and st.st_dev == entry.dev
        and st.st_size == entry.size
        and st.st_mtime_ns == entry.mtime_ns
    )
