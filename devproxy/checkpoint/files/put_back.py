"""A restore's changes of files, each whole or not done."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable

from devproxy import fault
from devproxy.checkpoint.files.copying import copy_file, same_start, sync_folder
from devproxy.checkpoint.files.look import is_as_at_the_cut, lstat
from devproxy.checkpoint.files.owner import KEPT, Owners, utc
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
        fetch: Callable[[FileEntry, str], None],
        report: Callable[[str], None],
        done: PutBack,
    ) -> None:
        self.plan = plan
        self.owners = owners
        self.fetch = fetch
        self.report = report
        self.done = done

    def run(self) -> PutBack:
        for entry in self.plan.wanted.values():
            if entry.listed_only:
                self.done.not_rolled_back.append(entry.path)
                if not is_as_at_the_cut(entry):
                    self.report(
                        f"{entry.path} changed since the image and is not rolled back: {entry.why}"
                    )
        self.plan.take_renames_back()
        self.plan.add_touched_since(self.done, self.report)
        self.owners.look(self.plan.wanted)
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
        except OSError as e:
            raise DevproxyError(
                f"{entry.path} cannot be put back as it was in the image: {e.strerror or e}",
                "remove the cause and restore again; every file is old or new, none is half",
                object=entry.path,
            ) from e

    # -- the three steps --
    def _remove(self, entry: FileEntry) -> None:
        st = lstat(entry.path)
        if st is None:
            self.done.unchanged += 1
            return
        if stat.S_ISDIR(st.st_mode):
            try:
                os.rmdir(entry.path)
            except OSError as e:
                if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                    raise
                self.report(
                    f"{entry.path} stays: the job made this folder after the image, but it holds others' files"
                )
                return
        else:
            self.owners.keep(entry.path, st)
            fault.point("files_put_back_mid")
            os.unlink(entry.path)
        self.done.removed.append(entry.path)

    def _folder(self, entry: FileEntry) -> None:
        st = lstat(entry.path)
        if st is not None and not stat.S_ISDIR(st.st_mode):
            self.owners.keep(entry.path, st)
            os.unlink(entry.path)
            st = None
        if st is None:
            os.makedirs(entry.path, exist_ok=True)
            self.done.restored.append(entry.path)
        if stat.S_IMODE(os.lstat(entry.path).st_mode) != entry.mode:
            os.chmod(entry.path, entry.mode)

    def _file(self, entry: FileEntry) -> None:
        if is_as_at_the_cut(entry):
            self.done.unchanged += 1
            return
        folder = os.path.dirname(entry.path)
        os.makedirs(folder, exist_ok=True)
        st = lstat(entry.path)
        if st is not None and stat.S_ISDIR(st.st_mode):
            try:
                os.rmdir(entry.path)  # the job's own files in it are gone by now
            except OSError:
                aside = f"{entry.path}{KEPT}{utc()}"
                os.rename(entry.path, aside)
                self.done.kept.append(aside)
                self.report(
                    f"{entry.path} is a folder with others' files now; it is kept as {aside}"
                )
            st = None
        temporary = os.path.join(folder, f"{TEMPORARY}{path_hash(entry.path)}")
        try:
            os.unlink(temporary)  # of a run that did not come to its end
        except FileNotFoundError:
            pass
        try:
            self._place(entry, st, temporary)
        except BaseException:
            try:
                os.unlink(temporary)
            except OSError:
                pass
            raise
        sync_folder(folder)

    def _place(self, entry: FileEntry, st: os.stat_result | None, temporary: str) -> None:
        if entry.kind == "symlink":
            if (
                st is not None
                and stat.S_ISLNK(st.st_mode)
                and os.readlink(entry.path) == entry.target
            ):
                self.done.unchanged += 1
                return
            os.symlink(entry.target, temporary)
        elif entry.link:
            leader = os.lstat(entry.link)
            if st is not None and (st.st_dev, st.st_ino) == (leader.st_dev, leader.st_ino):
                self.done.unchanged += 1
                return
            os.link(entry.link, temporary)
        else:
            self._bring(entry, temporary)
            if st is not None and self._has_content(entry, st, temporary):
                os.unlink(temporary)
                return
            self._dress(temporary, entry)
        if st is not None:
            self.owners.keep(entry.path, st)
        fault.point("files_put_back_mid")
        os.rename(temporary, entry.path)
        self.done.restored.append(entry.path)

    def _bring(self, entry: FileEntry, temporary: str) -> None:
        if copy := self.plan.copies.get(entry.path):
            copy_file(copy, temporary)
        else:
            self.fetch(entry, temporary)
        got = os.lstat(temporary).st_size
        if got != entry.size:
            raise DevproxyError(
                f"the image's content of {entry.path} is {got} bytes, it should be {entry.size}",
                "restore an older image: devproxy images",
                object=entry.path,
            )
        fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _has_content(self, entry: FileEntry, st: os.stat_result, temporary: str) -> bool:
        """True when what is there is right, or was made right by cutting off the tail that the job appended.

        A log is cut in place so that whoever follows it keeps following.
        """
        if not stat.S_ISREG(st.st_mode) or st.st_nlink != max(entry.nlink, 1):
            return False
        if not same_start(entry.path, temporary, entry.size):
            return False
        if st.st_size > entry.size:
            if self.owners.of(entry.path) != "job":
                return False
            fault.point("files_put_back_mid")
            os.truncate(entry.path, entry.size)
            self.done.restored.append(entry.path)
        else:
            self.done.unchanged += 1
        self._dress(entry.path, entry)
        return True

    @staticmethod
    def _dress(path: str, entry: FileEntry) -> None:
        st = os.lstat(path)
        if (st.st_uid, st.st_gid) != (entry.uid, entry.gid):
            try:
                os.chown(path, entry.uid, entry.gid)
            except PermissionError:
                pass  # not ours to give away; the content is right
        if stat.S_IMODE(st.st_mode) != entry.mode:
            os.chmod(path, entry.mode)
        os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))
