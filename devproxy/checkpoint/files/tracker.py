# SPDX-License-Identifier: Apache-2.0
"""The files of one job, from its start to its last restore."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable

from devproxy import fault, proctree
from devproxy.checkpoint.files import apart
from devproxy.checkpoint.files.cut import FILES_MAX_BYTES, Cut
from devproxy.checkpoint.files.journal import Journal
from devproxy.checkpoint.files.known import Known, Track
from devproxy.checkpoint.files.look import lstat, state_of
from devproxy.checkpoint.files.mounts import Mounts
from devproxy.checkpoint.files.opened import open_for_writing
from devproxy.checkpoint.files.owner import Owners
from devproxy.checkpoint.files.places import Places, unsafe
from devproxy.checkpoint.files.plan import Plan
from devproxy.checkpoint.files.put_back import FetchMany, Restore, one_by_one
from devproxy.checkpoint.files.records import FileEntry, PutBack
from devproxy.checkpoint.files.undo import Undo, path_hash

_MARKED_AT_ONCE_BYTES = 64 << 10

fault.register("files_snapshot", "the tree is frozen, before the job's files are copied")


class FilesTracker:
    """The files of one job. Used by the supervisor's threads: every public method takes the lock.

    `state_dir`/jobs/`job_id`.files.json outlives everything but the disk: what the job has touched, and how each file
    looked when note_state() ran last.
    """

    def __init__(self, job_dir: str, state_dir: str, *, job_id: str = "") -> None:
        self.job_dir = os.path.abspath(job_dir)
        self.job_id = job_id or os.path.basename(self.job_dir)
        self.folder = os.path.join(os.path.abspath(state_dir), "jobs")
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        self.undo = Undo(os.path.join(self.folder, f"{self.job_id}.undo"))
        self.known = Known(os.path.join(self.folder, f"{self.job_id}.files.json"))
        self._mu = threading.RLock()
        self._cut_ns = 0  # wall clock of the last snapshot()

    def _journal(self, job_dir: str = "") -> Journal:
        return Journal(os.path.abspath(job_dir or self.job_dir), self.known)

    # -- what is known ------------------------------------------------------------------------------------------------
    def changed(self) -> list[str]:
        """Every path that the job has touched and that may matter, sorted."""
        with self._mu:
            self._journal().poll()
            return sorted(self.known.tracks)

    def tracked(self, path: str) -> bool:
        with self._mu:
            return path in self.known.tracks

    def tracked_by_now(self, path: str) -> bool:
        """Also what the journal has got since it was read last."""
        with self._mu:
            self._journal().poll()
            return path in self.known.tracks

    def mention(self, path: str, first: str = "?") -> None:
        """A file of the job that did not come through the journal."""
        with self._mu:
            self.known.add(path, first)

    def mention_open(self, root_pid: int) -> None:
        """Every file that a process of the tree has open for writing, or mapped shared and writable.

        The library sees libc's calls alone, and fanotify a file when it is closed: one that a Go or a static program keeps
        open came through neither, and CRIU refuses it at a restore once it has grown. Whole only while the tree stands still.
        """
        with self._mu:
            self._journal().poll()
            for pid in [root_pid, *proctree.descendants(root_pid)]:
                for path, mapped in open_for_writing(pid):
                    if self.ignored(path):
                        continue
                    track = self.known.tracks.get(path) or self.known.add(path, "?")
                    track.mapped |= mapped

    def ignored(self, path: str) -> bool:
        """No file of the job's own. The library has the same rule where it can spare the line (csrc/hostlib/note.c)."""
        return (
            path.startswith(("/proc/", "/sys/", "/memfd:", f"{self.job_dir}/"))
            or (path.startswith("/dev/") and not path.startswith("/dev/shm/"))
            or "/__pycache__/" in path
        )

    def somebody_else(self, path: str, when_ns: int, *, sure: bool) -> None:
        """Somebody outside the job's tree closed a tracked file after writing (wall clock, ns)."""
        with self._mu:
            if track := self.known.tracks.get(path):
                if sure:
                    track.outsider_ns = when_ns
                else:
                    track.unsure_ns = when_ns

    # -- while the job lives ------------------------------------------------------------------------------------------
    def note_state(self, *, ended: bool = False) -> None:
        """Remembers how every file looks now. Every few seconds, when the tree is frozen, and when it has `ended`."""
        with self._mu:
            self._note(ended)

    def _note(self, ended: bool, durable: bool = False) -> None:
        now_ns = time.time_ns()  # before the looks: what changes during them counts as later
        self._journal().poll()
        self._journal().rotate()
        self.known.tick += 1
        undo = self.undo.exists()
        for path, track in list(self.known.tracks.items()):
            st = lstat(path)
            # Made and gone again. A process may have mentioned it and not made it yet: so not at once.
            if st is None and track.first == "C" and track.tick + 2 <= self.known.tick:
                del self.known.tracks[path]
                if undo:
                    self.undo.drop(path, marker=True)
                continue
            if undo:
                self.undo.mark(path, track)
            track.state, track.noted = state_of(st), True
        self.known.ended = ended
        self.known.save(now_ns, durable)

    # -- the cut ------------------------------------------------------------------------------------------------------
    def prepare(
        self,
        staging_dir: str,
        *,
        previous: Iterable[FileEntry] = (),
        files_max: int = FILES_MAX_BYTES,
        shared_fs: Callable[[str], bool] | None = None,
    ) -> Cut:
        """For snapshot(), while the job still runs: then the freeze is no longer for files that it does not change meanwhile.

        What is the same as in `previous` takes its refs; else a copy lies at `staged`. files_max in bytes.
        """
        os.makedirs(staging_dir, mode=0o700, exist_ok=True)
        cut = Cut(staging_dir, previous, files_max, shared_fs or Mounts().shared)
        with self._mu:
            self._note(False)
            tracks = sorted(self.known.tracks.items())
        cut.prepare(tracks)  # may take long: the job's other verbs need the lock
        return cut

    def snapshot(
        self,
        staging_dir: str,
        *,
        previous: Iterable[FileEntry] = (),
        files_max: int = FILES_MAX_BYTES,
        shared_fs: Callable[[str], bool] | None = None,
        cut: Cut | None = None,
    ) -> list[FileEntry]:
        """All files that the job has touched, while no process of the tree runs. keep_state() is due when it runs again.

        cut: of prepare(), which does as much when there is none. Raises DevproxyError when a file cannot be copied; nothing
        of the job was changed then.
        """
        if cut is None:
            cut = self.prepare(
                staging_dir, previous=previous, files_max=files_max, shared_fs=shared_fs
            )
        with self._mu:
            fault.point("files_snapshot")
            self._cut_ns = time.time_ns()
            self._journal().poll()
            entries = cut.take(self.known)
            # The next note_state marks what needs no copy: not while the tree stands.
            self.undo.open(self.job_dir)
            return entries

    def keep_state(self) -> None:
        """How the files looked at the last snapshot(), into the state folder: not in the freeze, where there are many."""
        with self._mu:
            if self.known.alive_ns < self._cut_ns:
                self.known.save(self._cut_ns)

    # -- the restore --------------------------------------------------------------------------------------------------
    def put_back(
        self,
        entries: Iterable[FileEntry],
        fetch: Callable[[FileEntry, int], None],
        report: Callable[[str], None],
        *,
        image_time: float,
        old_job_dir: str = "",
        fetch_many: FetchMany | None = None,
    ) -> PutBack:
        """Every file as it was at the cut. Precondition: no process of the job lives.

        fetch(entry, fd) writes the content of `entry` to a new file; report gets one line a finding; image_time is the
        wall clock of the cut, in seconds; old_job_dir is the folder in which the job ran before, if it is still there: its
        journal has what the state folder does not have yet; fetch_many does the same for many files at once. May be run again after a failure. Raises DevproxyError naming
        the file, and Refused, before anything is changed, where a folder is not safe (devproxy.folders).
        """
        with self._mu:
            self._journal(old_job_dir).poll()
            done = PutBack()
            replaced = os.path.join(self.folder, f"{self.job_id}.replaced")
            plan = Plan(self.known, self.undo, entries)
            with Places() as places:
                owners = Owners(self.known, int(image_time * 1e9), replaced, done, report, places)
                many = fetch_many or one_by_one(fetch)
                return Restore(plan, owners, many, report, done, places).run()

    def put_apart(
        self,
        entries: Iterable[FileEntry],
        base: str,
        fetch_many: FetchMany,
        report: Callable[[str], None],
    ) -> dict[str, bool]:
        """put_back below another folder, while the job of these files may live (apart.put)."""
        with self._mu:
            self._journal().poll()
            every = list(entries)
            names = apart.listed(Plan(self.known, self.undo, every))
            self._journal().poll()
            plan = Plan(self.known, self.undo, every)
            return apart.put(plan, names, base, fetch_many, report)

    def apart_needs(self, entries: Iterable[FileEntry]) -> list[str]:
        """The folders that put_apart would say now. Changes nothing."""
        with self._mu:
            self._journal().poll()
            return apart.needs(Plan(self.known, self.undo, entries))

    def adopt(self, entries: Iterable[FileEntry]) -> None:
        """After put_back: the job that starts now has touched these files and no others."""
        with self._mu:
            mine = {e.path: e for e in entries if e.kind != "mark"}
            wanted = {path_hash(p) for p, e in mine.items() if e.first != "C"}
            self.undo.keep_only(wanted)
            self._journal().begin_anew()
            marks = [e.size for e in entries if e.kind == "mark"]
            self.known.renames = self.known.renames[: marks[0]] if marks else []
            self.known.tracks = {
                p: Track(e.first, e.mapped, True, state_of(lstat(p))) for p, e in mine.items()
            }
            self.known.ended = False
            self.known.save(time.time_ns(), durable=True)
            self.undo.open(self.job_dir)
            # The next note_state marks the others: one of a few bytes costs less to copy in vain than to mark now.
            for path, track in self.known.tracks.items():
                if mine[path].size >= _MARKED_AT_ONCE_BYTES:
                    self.undo.mark(path, track)

    def would_change(self, entries: Iterable[FileEntry]) -> list[str]:
        """Paths that put_back would touch now, sorted. Changes nothing."""
        with self._mu:
            self._journal().poll()
            return Plan(self.known, self.undo, entries).would_change()

    def unsafe(self, entries: Iterable[FileEntry] | None = None) -> list[str]:
        """Why put_back would refuse, with an image's entries or with those of one taken now: others may change folders."""
        with self._mu:
            self._journal().poll()
            if entries is None:
                touched = {path for path in self.known.tracks if lstat(path) is not None}
            else:
                touched = Plan(self.known, self.undo, entries).touches()
            return [error.what for error in unsafe(touched)]

    def may_change(self, entries: Iterable[FileEntry]) -> set[str]:
        """Every path that put_back may change; below a folder of these too, where the job has renamed it. Changes nothing."""
        with self._mu:
            self._journal().poll()
            return Plan(self.known, self.undo, entries).touches()

    def absorb(self) -> None:
        """What the journal of a dead job has, into the state folder: its job folder is about to go."""
        with self._mu:
            last_ns = self._journal().last_write_ns()
            if last_ns is not None and not self.known.ended:
                self._journal().poll()
                self.known.save(max(self.known.alive_ns, last_ns))

    def forget(self) -> None:
        """The job and its images are gone: nothing of it stays in the state folder but what was replaced."""
        with self._mu:
            self.undo.remove()
            self.known.remove()
