# SPDX-License-Identifier: Apache-2.0
"""A restore's changes of files, each whole or not done."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress

from devproxy import fault, folders
from devproxy.checkpoint.files import xattrs
from devproxy.checkpoint.files.copying import copy_to, new_file, open_same, same_start, sync_folder
from devproxy.checkpoint.files.look import is_as_at_the_cut
from devproxy.checkpoint.files.owner import KEPT, Owners, utc
from devproxy.checkpoint.files.places import Places, refuse_unsafe
from devproxy.checkpoint.files.plan import Plan
from devproxy.checkpoint.files.records import FileEntry, PutBack
from devproxy.checkpoint.files.undo import path_hash
from devproxy.errors import DevproxyError

fault.register("files_put_back_mid", "before a file of the image takes the place of what is there")

TEMPORARY = ".devproxy-putting-back-"


class Restore:
    """One put_back. First what goes, then folders, then files: a name may have changed its kind."""

    def __init__(
        self,
        plan: Plan,
        owners: Owners,
        fetch: Callable[[FileEntry, int], None],
        report: Callable[[str], None],
        done: PutBack,
        places: Places,
    ) -> None:
        self.places = places
        self._swept: set[str] = set()  # folders without leftovers of ours
        self._hashes: set[str] = set()
        self.plan = plan
        self.owners = owners
        self.fetch = fetch
        self.report = report
        self.done = done

    def run(self) -> PutBack:
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
        self._hashes = {path_hash(path) for path in self.plan.wanted}
        to_do = [e for e in self.plan.wanted.values() if not e.listed_only]
        gone = sorted((e for e in to_do if e.kind == "absent"), key=lambda e: e.path, reverse=True)
        for entry in gone:  # children before their folder
            self._guarded(self._remove, entry)
        for entry in sorted((e for e in to_do if e.kind == "directory"), key=lambda e: e.path):
            self._guarded(self._folder, entry)
        rest = [e for e in to_do if e.kind in ("present", "symlink")]
        for entry in sorted(rest, key=lambda e: (bool(e.link), e.path)):
            self._guarded(self._file, entry)
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
            self.done.restored.append(entry.path)
        fd = folders.open_folder(entry.path, make=True)
        try:
            if stat.S_IMODE(os.fstat(fd).st_mode) != entry.mode:
                os.chmod(f"/proc/self/fd/{fd}", entry.mode)  # fchmod(2) refuses O_PATH
        finally:
            os.close(fd)

    def _file(self, entry: FileEntry) -> None:
        if is_as_at_the_cut(entry):
            self.done.unchanged += 1
            return
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
        temporary = f"{TEMPORARY}{path_hash(entry.path)}-{secrets.token_hex(8)}"
        try:
            self._place(entry, st, folder, temporary)
        except BaseException:
            try:
                os.unlink(temporary, dir_fd=folder)
            except OSError:
                pass
            raise
        sync_folder(folder)

    def _sweep(self, path: str, folder: int) -> None:
        """What a run that did not come to its end has left. Of our files alone: another job's restore may be at work."""
        if path in self._swept:
            return
        self._swept.add(path)
        for name in folders.names_in(folder):
            hashed = name.removeprefix(TEMPORARY).partition("-")[0]
            if name.startswith(TEMPORARY) and hashed in self._hashes:
                with suppress(OSError):  # another user may have put something there that stays
                    os.unlink(name, dir_fd=folder)

    def _place(
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
        elif entry.link:
            source, other = self.places.of(entry.link)
            leader = os.lstat(other, dir_fd=source)
            if st is not None and (st.st_dev, st.st_ino) == (leader.st_dev, leader.st_ino):
                self.done.unchanged += 1
                return
            os.link(other, temporary, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)
        else:
            fd = new_file(temporary, folder)
            try:
                self._bring(entry, fd)
                if st is not None and self._has_content(entry, st, folder, fd):
                    os.unlink(temporary, dir_fd=folder)
                    return
                self._dress(fd, entry)
            finally:
                os.close(fd)
        if st is not None:
            self.owners.keep(entry.path, st)
        fault.point("files_put_back_mid")
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        self.done.restored.append(entry.path)

    def _bring(self, entry: FileEntry, fd: int) -> None:
        if copy := self.plan.copies.get(entry.path):
            copy_to(copy, fd)
        else:
            self.fetch(entry, fd)
        got = os.fstat(fd).st_size
        if got != entry.size:
            raise DevproxyError(
                f"the image's content of {entry.path} is {got} bytes, it should be {entry.size}",
                "restore an older image: devproxy images",
                object=entry.path,
            )
        os.fsync(fd)

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
        st = os.fstat(fd)
        if (st.st_uid, st.st_gid) != (entry.uid, entry.gid):
            try:
                os.fchown(fd, entry.uid, entry.gid)
            except PermissionError:
                pass  # not ours to give away; the content is right
        if stat.S_IMODE(st.st_mode) != entry.mode:
            os.fchmod(fd, entry.mode)
        for why in xattrs.write(fd, entry.xattrs):  # an ACL has the mode in it, so behind that
            self.report(f"{entry.path}: an extended attribute cannot be put back: {why}")
        os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
