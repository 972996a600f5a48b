# SPDX-License-Identifier: Apache-2.0
"""A restore's changes of files, each whole or not done."""

from __future__ import annotations

import errno
import os
import resource
import secrets
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from devproxy import fault, folders
from devproxy.checkpoint.files import xattrs
from devproxy.checkpoint.files.copying import (
    copy_to,
    new_file,
    open_same,
    same_start,
    sync_around,
    sync_folder,
)
from devproxy.checkpoint.files.look import is_as_at_the_cut
from devproxy.checkpoint.files.owner import KEPT, Owners, utc
from devproxy.checkpoint.files.places import Places, refuse_unsafe
from devproxy.checkpoint.files.plan import Plan
from devproxy.checkpoint.files.records import FileEntry, PutBack
from devproxy.checkpoint.files.undo import path_hash
from devproxy.errors import DevproxyError

fault.register("files_put_back_mid", "before a file or folder becomes as it was in the image")

TEMPORARY = ".devproxy-putting-back-"
FetchMany = Callable[[Sequence[tuple[FileEntry, int]]], None]
_FETCHED_AT_ONCE = 256  # files; each has a descriptor open
_SYNCED_AT_ONCE = 16384
_BATCH_BYTES = 256 << 20
_SYNCED_ALONE = 16


def one_by_one(fetch: Callable[[FileEntry, int], None]) -> FetchMany:
    def many(files: Sequence[tuple[FileEntry, int]]) -> None:
        for entry, to in files:
            fetch(entry, to)

    return many


@dataclass(slots=True)
class _New:
    """A file under its temporary name, in a folder that is held open; `st` is what has its name now."""

    entry: FileEntry
    st: os.stat_result | None
    folder: int
    temporary: str
    fd: int = -1


class Restore:
    """One put_back. First what goes, then folders, then files: a name may have changed its kind. At the end the folders
    get their owners and rights: with those of the image, we may no longer be able, or willing, to put files there."""

    def __init__(
        self,
        plan: Plan,
        owners: Owners,
        fetch: FetchMany,
        report: Callable[[str], None],
        done: PutBack,
        places: Places,
    ) -> None:
        self.places = places
        self._swept: set[str] = set()  # folders without leftovers of ours
        self._hashes: set[str] = set()
        self._changed: set[str] = set()  # folders whose names are not durable yet
        self._news: list[_New] = []
        self._held: dict[str, int] = {}  # their folders, by descriptors
        self._made: set[str] = set()  # folders that were not there
        self.plan = plan
        self.owners = owners
        self.fetch = fetch
        self.report = report
        self.done = done

    def run(self, *, dress_folders: bool = True) -> PutBack:
        """dress_folders: else the caller does that."""
        refuse_unsafe(self.plan.touches())
        for entry in self.plan.wanted.values():
            if entry.listed_only:
                self.done.not_rolled_back.append(entry.path)
                if not is_as_at_the_cut(entry):
                    self.report(
                        f"{entry.path} changed since the image and is not rolled back: {entry.why}"
                    )
        self.plan.take_renames_back(self.places)
        self.plan.add_touched_since(self.done, self.report)
        self.owners.look(self.plan.wanted)
        to_do = [e for e in self.plan.wanted.values() if not e.listed_only]
        gone = sorted((e for e in to_do if e.kind == "absent"), key=lambda e: e.path, reverse=True)
        for entry in gone:  # children before their folder
            self._guarded(self._remove, entry)
        those = sorted((e for e in to_do if e.kind == "directory"), key=lambda e: e.path)
        for entry in those:
            self._guarded(self._folder, entry)
        rest = [e for e in to_do if e.kind in ("present", "symlink")]
        rest.sort(key=lambda e: e.path)
        self._files([e for e in rest if e.kind == "present" and not e.link])
        for entry in rest:
            if entry.kind == "symlink" or entry.link:
                self._guarded(self._link, entry)
        self._sync_folders()
        if dress_folders:
            self.dress_folders(those)
        if self.done.replaced:
            self.report(
                f"{len(self.done.replaced)} file(s) changed in the job's last moments; their replaced versions are in "
                f"{self.owners.replaced_dir}"
            )
        return self.done

    def _guarded(self, step: Callable[[FileEntry], None], entry: FileEntry) -> None:
        try:
            step(entry)
        except (OSError, folders.Unsafe) as e:
            why = e.what if isinstance(e, DevproxyError) else e.strerror or e
            raise DevproxyError(
                f"{entry.path} cannot be put back as it was in the image: {why}",
                "remove the cause and restore again; every file is old or new, none is half",
                object=entry.path,
            ) from e

    # -- the three steps --
    def _remove(self, entry: FileEntry) -> None:
        st = self.places.lstat(entry.path)
        if st is None:
            self.done.unchanged += 1
            return
        folder, name = self.places.of(entry.path)
        if stat.S_ISDIR(st.st_mode):
            try:
                os.rmdir(name, dir_fd=folder)
            except OSError as e:
                if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                    raise
                self.report(
                    f"{entry.path} stays: the job made this folder after the image, but it holds others' files"
                )
                return
            self.places.forget()
        else:
            self.owners.keep(entry.path, st)
            fault.point("files_put_back_mid")
            os.unlink(name, dir_fd=folder)
        self.done.removed.append(entry.path)

    def _folder(self, entry: FileEntry) -> None:
        st = self.places.lstat(entry.path)
        if st is not None and not stat.S_ISDIR(st.st_mode):
            self.owners.keep(entry.path, st)
            folder, name = self.places.of(entry.path)
            os.unlink(name, dir_fd=folder)
            st = None
        if st is None:
            folder, name = self.places.of(entry.path, make=True)
            os.mkdir(name, 0o700, dir_fd=folder)
            self._made.add(entry.path)
            self.done.restored.append(entry.path)
        fd = self._open_folder(entry)
        try:
            mode = stat.S_IMODE(os.fstat(fd).st_mode)
            if entry.mode & 0o700 & ~mode:
                os.chmod(
                    f"/proc/self/fd/{fd}", mode | entry.mode & 0o700
                )  # fchmod(2) refuses O_PATH
        finally:
            os.close(fd)

    def _open_folder(self, entry: FileEntry) -> int:
        """With O_PATH. It may be another user's, as it was in the image; only the way to it must be safe."""
        folder, name = self.places.of(entry.path)
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=folder)
        try:
            if os.fstat(fd).st_uid != entry.uid:
                folders.check_owner(entry.path, fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def dress_folders(self, entries: Iterable[FileEntry]) -> None:
        """Those below first: of a folder that becomes another user's, devproxy would not open what is in it."""
        for entry in sorted(entries, key=lambda e: e.path, reverse=True):
            self._guarded(self._dress_folder, entry)

    def _dress_folder(self, entry: FileEntry) -> None:
        fd = self._open_folder(entry)
        try:
            fault.point("files_put_back_mid")
            self._owner_and_rights(f"/proc/self/fd/{fd}", entry)
            # A copy's time says nothing: what was in the folder had gone before.
            if entry.path in self._made and entry.path not in self.plan.copies:
                os.utime(f"/proc/self/fd/{fd}", ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(fd)

    def _files(self, entries: list[FileEntry]) -> None:
        """A store answers for many files as fast as for one, and so does a disk that is to make them durable."""
        most = max(1, min(_FETCHED_AT_ONCE, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))
        batch: list[FileEntry] = []
        size = 0
        try:
            for entry in entries:
                if is_as_at_the_cut(entry):
                    self.done.unchanged += 1
                    continue
                batch.append(entry)
                size += entry.size
                if len(batch) >= most or size >= _BATCH_BYTES:
                    self._make(batch)
                    many = len(self._news) >= _SYNCED_AT_ONCE or len(self._held) >= most
                    if many or size >= _BATCH_BYTES:
                        self._take_places()
                    batch, size = [], 0
            self._make(batch)
            self._take_places()
        finally:
            for new in self._news:
                with suppress(OSError):
                    os.unlink(new.temporary, dir_fd=new.folder)
                if new.fd >= 0:
                    os.close(new.fd)
            self._news.clear()
            self._let_go()

    def _make(self, entries: list[FileEntry]) -> None:
        """Under their temporary names, whole; what is right already stays."""
        first = len(self._news)
        for entry in entries:
            self._guarded(self._begin, entry)
        self._bring(self._news[first:])
        for new in self._news[first:]:
            self._guarded(lambda _, one=new: self._finish(one), new.entry)  # type: ignore[misc]
        self._news[first:] = [new for new in self._news[first:] if new.temporary]

    def _begin(self, entry: FileEntry) -> None:
        folder, st = self._make_way(entry)
        path = os.path.dirname(entry.path)
        if path not in self._held:
            self._held[path] = os.dup(folder)
        new = _New(entry, st, self._held[path], _temporary(entry))
        new.fd = new_file(new.temporary, new.folder)
        self._news.append(new)

    def _finish(self, new: _New) -> None:
        if new.st is not None and self._has_content(new.entry, new.st, new.folder, new.fd):
            os.unlink(new.temporary, dir_fd=new.folder)
            new.temporary = ""
        else:
            self._dress(new.fd, new.entry)
            if len(self._news) <= _SYNCED_ALONE:
                os.fsync(new.fd)
        os.close(new.fd)
        new.fd = -1

    def _take_places(self) -> None:
        """Nothing takes its place before it is durable."""
        if len(self._news) > _SYNCED_ALONE:
            _sync_file_systems(self._held.values())
        self._news.reverse()
        while self._news:
            new = self._news[-1]
            self._guarded(lambda _, one=new: self._take_place(one), new.entry)  # type: ignore[misc]
            self._news.pop()
        self._let_go()

    def _let_go(self) -> None:
        while self._held:
            os.close(self._held.popitem()[1])

    def _take_place(self, new: _New) -> None:
        if new.st is not None:
            self.owners.keep(new.entry.path, new.st)
        fault.point("files_put_back_mid")
        name = os.path.basename(new.entry.path)
        os.rename(new.temporary, name, src_dir_fd=new.folder, dst_dir_fd=new.folder)
        self._changed.add(os.path.dirname(new.entry.path))
        self.done.restored.append(new.entry.path)

    def _make_way(self, entry: FileEntry) -> tuple[int, os.stat_result | None]:
        """The folder's descriptor, and what has the name now: no folder any more."""
        folder, name = self.places.of(entry.path, make=True)
        st = self.places.lstat(entry.path)
        if st is not None and stat.S_ISDIR(st.st_mode):
            try:
                os.rmdir(name, dir_fd=folder)  # the job's own files in it are gone by now
            except OSError:
                aside = f"{name}{KEPT}{utc()}"
                os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=folder)
                aside = os.path.join(os.path.dirname(entry.path), aside)
                self.done.kept.append(aside)
                self.report(
                    f"{entry.path} is a folder with others' files now; it is kept as {aside}"
                )
            self.places.forget()
            folder, _ = self.places.of(entry.path)
            st = None
        self._sweep(os.path.dirname(entry.path), folder)
        return folder, st

    def _link(self, entry: FileEntry) -> None:
        """A symbolic link, or another name of a file that is in its place."""
        if is_as_at_the_cut(entry):
            self.done.unchanged += 1
            return
        folder, st = self._make_way(entry)
        temporary = _temporary(entry)
        try:
            self._place_link(entry, st, folder, temporary)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise

    def _sweep(self, path: str, folder: int) -> None:
        """What a run that did not come to its end has left. Of our files alone: another job's restore may be at work."""
        if path in self._swept:
            return
        self._swept.add(path)
        for name in folders.names_in(folder):
            if not name.startswith(TEMPORARY):
                continue
            if not self._hashes:
                self._hashes = {path_hash(path) for path in self.plan.wanted}
            if name.removeprefix(TEMPORARY).partition("-")[0] in self._hashes:
                with suppress(OSError):  # another user may have put something there that stays
                    os.unlink(name, dir_fd=folder)

    def _place_link(
        self, entry: FileEntry, st: os.stat_result | None, folder: int, temporary: str
    ) -> None:
        name = os.path.basename(entry.path)
        if entry.kind == "symlink":
            if (
                st is not None
                and stat.S_ISLNK(st.st_mode)
                and os.readlink(name, dir_fd=folder) == entry.target
            ):
                self.done.unchanged += 1
                return
            os.symlink(entry.target, temporary, dir_fd=folder)
        else:
            source, other = self.places.of(entry.link)
            leader = os.lstat(other, dir_fd=source)
            if st is not None and (st.st_dev, st.st_ino) == (leader.st_dev, leader.st_ino):
                self.done.unchanged += 1
                return
            os.link(other, temporary, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)
        if st is not None:
            self.owners.keep(entry.path, st)
        fault.point("files_put_back_mid")
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        self._changed.add(os.path.dirname(entry.path))
        self.done.restored.append(entry.path)

    def _bring(self, news: list[_New]) -> None:
        wanted = []
        for new in news:
            if copy := self.plan.copies.get(new.entry.path):
                self._guarded(lambda _, c=copy, fd=new.fd: copy_to(c, fd), new.entry)  # type: ignore[misc]
            elif new.entry.size:
                wanted.append((new.entry, new.fd))
        self.fetch(wanted)
        for new in news:
            got = os.fstat(new.fd).st_size
            if got != new.entry.size:
                raise DevproxyError(
                    f"the image's content of {new.entry.path} is {got} bytes, it should be {new.entry.size}",
                    "restore an older image: devproxy images",
                    object=new.entry.path,
                )

    def _sync_folders(self) -> None:
        devices: set[int] = set()
        for path in sorted(self._changed):
            with suppress(OSError, folders.Unsafe):  # gone by now; the content itself was synced
                folder, _ = self.places.of(os.path.join(path, "."))
                if len(self._changed) <= _SYNCED_ALONE:
                    sync_folder(folder)
                elif (device := os.fstat(folder).st_dev) not in devices:
                    devices.add(device)
                    sync_around(folder)
        self._changed.clear()

    def _has_content(self, entry: FileEntry, st: os.stat_result, folder: int, new: int) -> bool:
        """True when what is there is right, or was made right by cutting off the tail that the job appended.

        A log is cut in place so that whoever follows it keeps following. A file of another owner, or with another number of
        names, may be one that somebody has linked there: it is replaced, and nothing but its name changes.
        """
        if not stat.S_ISREG(st.st_mode) or st.st_nlink != max(entry.nlink, 1):
            return False
        if st.st_uid != (os.geteuid() or entry.uid):  # only root can have given it away
            return False
        longer = st.st_size > entry.size
        if longer and self.owners.of(entry.path) != "job":
            return False
        name = os.path.basename(entry.path)
        fd = open_same(name, folder, st, os.O_RDWR if longer else os.O_RDONLY)
        try:
            if not same_start(fd, new, entry.size):
                return False
            if longer:
                fault.point("files_put_back_mid")
                os.ftruncate(fd, entry.size)
                self.done.restored.append(entry.path)
            else:
                self.done.unchanged += 1
            self._dress(fd, entry)
        finally:
            os.close(fd)
        return True

    def _dress(self, fd: int, entry: FileEntry) -> None:
        self._owner_and_rights(fd, entry)
        os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))

    def _owner_and_rights(self, at: int | str, entry: FileEntry) -> None:
        """at: as in xattrs."""
        st = os.stat(at)
        if (st.st_uid, st.st_gid) != (entry.uid, entry.gid):
            try:
                os.chown(at, entry.uid, entry.gid)
            except PermissionError:
                pass  # not ours to give away; the content is right
        for why in xattrs.dress(at, entry.mode, entry.xattrs):
            self.report(f"{entry.path}: an extended attribute cannot be made as it was: {why}")


def _temporary(entry: FileEntry) -> str:
    return f"{TEMPORARY}{path_hash(entry.path)}-{secrets.token_hex(8)}"


def _sync_file_systems(held: Iterable[int]) -> None:
    devices: set[int] = set()
    for fd in held:
        if (device := os.fstat(fd).st_dev) not in devices:
            devices.add(device)
            sync_around(fd)
