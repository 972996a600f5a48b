# SPDX-License-Identifier: Apache-2.0
"""The content of all files that the job has touched, taken while no process of the tree runs."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable

from devproxy import procfs
from devproxy.checkpoint.files import xattrs
from devproxy.checkpoint.files.copying import check_same, copy_content
from devproxy.checkpoint.files.known import Known, Track
from devproxy.checkpoint.files.leases import borrowed
from devproxy.checkpoint.files.look import lstat
from devproxy.checkpoint.files.records import FileEntry, unchanged
from devproxy.errors import DevproxyError

FILES_MAX_BYTES = 1 << 30


class Cut:
    """One snapshot. What is the same as in `previous` takes its refs; else a copy lies at `staged`."""

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

    def take(self, known: Known) -> list[FileEntry]:
        """Raises DevproxyError when a file cannot be copied; nothing of the job was changed then."""
        self.entries.append(FileEntry("", "mark", "?", size=len(known.renames)))
        for path in sorted(known.tracks):
            self._take(path, known.tracks[path])
        return self.entries

    def _take(self, path: str, track: Track) -> None:
        now_ns = time.time_ns()
        st = lstat(path)
        if st is None:
            self.entries.append(FileEntry(path, "absent", track.first, taken_ns=now_ns))
            return
        entry = FileEntry(
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
        self.entries.append(entry)
        if self.shared(path):
            entry.kind, entry.why = "shared-fs", "it lies on a shared file system"
        elif stat.S_ISDIR(st.st_mode):
            entry.kind, entry.size = "directory", 0
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
            old = self.older.get(path)
            if old is not None and old.refs and unchanged(old, entry):
                entry.refs, entry.xattrs = list(old.refs), dict(old.xattrs)
            else:
                entry.staged = os.path.join(self.staging_dir, f"file-{len(self.entries):06d}")
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
