"""Files that the job changed: which, what they held at the cut, and how they are put back at a restore.

libdevproxy_host.so (csrc/hostlib) writes a line into `<job folder>/files.journal` before a process of the job makes,
changes, renames or removes a file. FilesTracker reads it, stores the files' content while the tree is frozen, and puts
it back before CRIU restores the tree:

- A file of the image gets the content, mode, owner and time of the cut (CRIU refuses an open file of another size).
- A file that the job made after the cut goes; one that it first changed after the cut comes back from the copy that the
  library made before the change (`<state>/jobs/<job>.undo`, only once there is an image).
- A file that somebody else changed meanwhile is kept beside it as `<name>.devproxy-kept-<UTC>`, and said. Somebody else:
  it differs from what note_state() saw last, later than the job can have lived; or FanotifyWatch saw the writer. What
  changed in the last moments of a job that was killed together with us can be either's: it is put back, and what it
  replaces goes to `<state>/jobs/<job>.replaced/`.
- Shared file systems, files above the limit, devices and FIFOs are listed, not rolled back.

A crash in the middle leaves each file old or new, never half; put_back may simply run again.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from devproxy import fault, procfs, proctree
from devproxy.errors import DevproxyError, Refused

fault.register("files_snapshot", "the tree is frozen, before the job's files are copied")
fault.register("files_put_back_mid", "before a file of the image takes the place of what is there")

JOURNAL = "files.journal"
UNDO_LINK = "files.undo"
FILES_MAX_BYTES = 1 << 30
STATE_VERSION = 1
ROTATE_BYTES = 8 << 20
# How long after the last note_state() the job may still have written: note_state runs every few seconds.
SLACK_NS = 6_000_000_000
# Two changes within one tick of the kernel's clock show the same time (4 ms at HZ=250); a file as young as this when it
# was copied is copied again next time.
YOUNG_NS = 50_000_000
SHARED_FS = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "ceph", "9p", "virtiofs", "gpfs", "beegfs")
    + ("glusterfs", "afs", "ocfs2", "gfs2", "pvfs2")
)
_FICLONE = 0x40049409
_TEMPORARY = ".devproxy-putting-back-"
KEPT = ".devproxy-kept-"


@dataclass(slots=True)
class FileEntry:
    """One file at the cut. The coordinator stores what lies at `staged` and fills `refs`."""

    path: str
    # present | directory | symlink | absent; listed only: too-large | shared-fs | special. "mark" is no file: `size`
    # is the number of directory renames before the cut.
    kind: str
    first: str  # C: the job made it; W: it was there before the job touched it; ?: not known
    dev: int = 0
    ino: int = 0
    size: int = 0  # bytes
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    taken_ns: int = 0  # wall clock of the stat
    nlink: int = 0  # hard links
    mapped: bool = False  # was mapped shared and writable: its time stamps do not show every change
    target: str = ""  # of a symbolic link
    link: str = ""  # another entry's path, whose inode this is
    why: str = ""  # of a listed one
    staged: str = ""  # copy in the staging folder, to be stored
    refs: list[Any] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For the manifest, without `staged`; `refs` as they are."""
        return {k: getattr(self, k) for k in self.__slots__ if k != "staged" and getattr(self, k)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> FileEntry:
        """Fields of later versions are left out. Raises KeyError without path, kind or first."""
        known = {k: v for k, v in data.items() if k in cls.__slots__}
        return cls(known.pop("path", ""), known.pop("kind"), known.pop("first", "?"), **known)

    @property
    def listed_only(self) -> bool:
        return self.kind in ("too-large", "shared-fs", "special")


@dataclass(slots=True)
class PutBack:
    """What put_back did, by path."""

    restored: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # names under which somebody else's versions are
    replaced: list[str] = field(default_factory=list)  # the same in the state folder: unsure
    unchanged: int = 0
    not_rolled_back: list[str] = field(default_factory=list)


# [dev, ino, size, mtime_ns, ctime_ns, mode], or None for a name that is not there
State = list[int] | None


@dataclass(slots=True)
class _Track:
    first: str
    mapped: bool = False
    noted: bool = False  # `state` has been looked at
    state: State = None
    tick: int = 0  # when it was last mentioned
    outsider_ns: int = 0  # somebody else closed it after writing
    unsure_ns: int = 0  # somebody who was gone when we looked did
    marked: bool = False  # the library knows that no undo copy is wanted


def path_hash(path: str) -> str:
    """FNV-1a of 64 bits, as csrc/hostlib/note.c names its undo copies."""
    value = 0xCBF29CE484222325
    for byte in os.fsencode(path):
        value = (value ^ byte) * 0x100000001B3 & 0xFFFF_FFFF_FFFF_FFFF
    return f"{value:016x}"


def _unescape(raw: bytes) -> str:
    if b"\\" in raw:
        parts = raw.split(b"\\x")
        raw = parts[0] + b"".join(bytes([int(p[:2], 16)]) + p[2:] for p in parts[1:])
    return os.fsdecode(raw)


def _lstat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _state(st: os.stat_result | None) -> State:
    if st is None:
        return None
    if stat.S_ISDIR(st.st_mode):  # its size and times are those of its children
        return [st.st_dev, st.st_ino, 0, 0, 0, st.st_mode]
    return [st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns, st.st_mode]


def _open_for_writing(pid: int) -> Iterator[tuple[str, bool]]:
    """Regular files that have a name: (path, whether it is mapped)."""
    try:
        descriptors = procfs.descriptors(pid)
    except OSError:
        return  # it has ended
    for number, path in descriptors:
        info = procfs.fdinfo(pid, number) if path.startswith("/") else None
        if info is None or info.access == os.O_RDONLY:
            continue
        try:
            there = os.stat(f"/proc/{pid}/fd/{number}")
        except OSError:
            continue
        if _is_named(path, there.st_dev, there.st_ino):
            yield path, False
    for one in procfs.mappings(pid, b" rw-s "):
        if one.path.startswith("/") and _is_named(one.path, one.device, one.inode):
            yield one.path, True


def _is_named(path: str, device: int, inode: int) -> bool:
    st = _lstat(path)
    return st is not None and stat.S_ISREG(st.st_mode) and (st.st_dev, st.st_ino) == (device, inode)


class Mounts:
    """File-system types by path."""

    def __init__(self, mounts: Iterable[procfs.Mount] | None = None) -> None:
        found = procfs.mounts("self") if mounts is None else mounts
        self._types = {mount.point: mount.kind for mount in found}  # the one on top comes last
        self._folders: dict[str, str] = {}

    def type_of(self, path: str) -> str:
        folder = os.path.dirname(path) or "/"
        known = self._folders.get(folder)
        if known is None:
            at = folder
            while at not in self._types and at != "/":
                at = os.path.dirname(at)
            known = self._folders[folder] = self._types.get(at, "")
        return known

    def shared(self, path: str) -> bool:
        kind = self.type_of(path)
        return kind in SHARED_FS or kind.startswith("fuse.")


def copy_content(source: int, target: int, size_bytes: int) -> None:
    """`size_bytes` of one descriptor into another: by reflink, else extent by extent, holes stay holes."""
    try:
        if os.fstat(source).st_size == size_bytes:
            fcntl.ioctl(target, _FICLONE, source)
            return
    except OSError:
        pass
    os.ftruncate(target, size_bytes)
    at = 0
    while at < size_bytes:
        try:
            data = os.lseek(source, at, os.SEEK_DATA)
            end = min(os.lseek(source, data, os.SEEK_HOLE), size_bytes)
        except OSError as e:
            if e.errno == errno.ENXIO:
                return
            data, end = at, size_bytes
        at = data
        while at < end:
            done = _copy_some(source, target, at, end - at)
            if done == 0:  # it became shorter meanwhile: the rest reads as zeros
                return
            at += done


def _copy_some(source: int, target: int, at: int, count: int) -> int:
    try:
        return os.copy_file_range(source, target, min(count, 1 << 30), at, at)
    except OSError as e:
        if e.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    block = os.pread(source, min(count, 4 << 20), at)
    view, to = memoryview(block), at
    while view:
        n = os.pwrite(target, view, to)
        view, to = view[n:], to + n
    return len(block)


def _copy_file(source: str, target: str) -> None:
    a = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        b = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            copy_content(a, b, os.fstat(a).st_size)
        finally:
            os.close(b)
    finally:
        os.close(a)


def _same_start(a: str, b: str, count: int) -> bool:
    """True when both files begin with the same `count` bytes."""
    with open(a, "rb", buffering=0) as x, open(b, "rb", buffering=0) as y:
        while count > 0:
            left, right = x.read(min(count, 1 << 20)), y.read(min(count, 1 << 20))
            if left != right or not left:
                return False
            count -= len(left)
    return True


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError:
        pass  # not every file system knows it; the content itself was synced
    finally:
        os.close(fd)


def _utc() -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


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
        self._file = os.path.join(self.folder, f"{self.job_id}.files.json")
        self.undo_dir = os.path.join(self.folder, f"{self.job_id}.undo")
        self._mu = threading.RLock()
        self._tracks: dict[str, _Track] = {}
        self._renames: list[tuple[str, str]] = []
        self._journal_ino = 0
        self._offset = 0
        self._tick = 0
        self._alive_ns = 0
        self._ended = False
        self._written = ""
        self._load()

    # -- what is known ------------------------------------------------------------------------------------------------
    def _load(self) -> None:
        try:
            with open(self._file, encoding="utf-8") as file:
                data = json.load(file)
        except FileNotFoundError:
            return
        except ValueError:
            # A power cut in the middle; the image's own list and the journal remain.
            return
        if data.get("version") != STATE_VERSION:
            raise Refused(
                f"{self._file} is of version {data.get('version')}, this devproxy reads {STATE_VERSION}",
                "use the devproxy that wrote it, or remove the file: the image's own list is used then",
            )
        self._journal_ino, self._offset = data["journal"]
        self._tick, self._ended = data["tick"], data["ended"]
        self._renames = [(a, b) for a, b in data["renames"]]
        self._alive_ns = os.stat(self._file).st_mtime_ns
        for path, (first, mapped, noted, state, outsider, unsure) in data["files"].items():
            self._tracks[path] = _Track(first, mapped, noted, state, self._tick, outsider, unsure)

    def _save(self, alive_ns: int, durable: bool = False) -> None:
        """The time of the file is `alive_ns`: an unchanged state costs one utime."""
        text = json.dumps(
            {
                "version": STATE_VERSION,
                "journal": [self._journal_ino, self._offset],
                "tick": 0,
                "ended": self._ended,
                "renames": self._renames,
                "files": {
                    p: [t.first, t.mapped, t.noted, t.state, t.outsider_ns, t.unsure_ns]
                    for p, t in self._tracks.items()
                },
            },
            separators=(",", ":"),
        )
        if text != self._written or durable:
            temporary = f"{self._file}.new"
            with open(temporary, "w", encoding="utf-8") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(text)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, self._file)
            self._written = text
        os.utime(self._file, ns=(alive_ns, alive_ns))
        self._alive_ns = alive_ns

    def changed(self) -> list[str]:
        """Every path that the job has touched and that may matter, sorted."""
        with self._mu:
            self._poll()
            return sorted(self._tracks)

    def tracked(self, path: str) -> bool:
        with self._mu:
            return path in self._tracks

    def tracked_by_now(self, path: str) -> bool:
        """Also what the journal has got since it was read last."""
        with self._mu:
            self._poll()
            return path in self._tracks

    def mention(self, path: str, first: str = "?") -> None:
        """A file of the job that did not come through the journal."""
        with self._mu:
            self._add(path, first)

    def mention_open(self, root_pid: int) -> None:
        """Every file that a process of the tree has open for writing, or mapped shared and writable.

        The library sees libc's calls alone, and fanotify a file when it is closed: one that a Go or a static program keeps
        open came through neither, and CRIU refuses it at a restore once it has grown. Whole only while the tree stands still.
        """
        with self._mu:
            self._poll()
            for pid in [root_pid, *proctree.descendants(root_pid)]:
                for path, mapped in _open_for_writing(pid):
                    if path not in self._tracks and not self.ignored(path):
                        self._add(path, "?").mapped = mapped

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
            if track := self._tracks.get(path):
                if sure:
                    track.outsider_ns = when_ns
                else:
                    track.unsure_ns = when_ns

    def _add(self, path: str, first: str) -> _Track:
        track = self._tracks.get(path)
        if track is None:
            track = self._tracks[path] = _Track(first)
        elif track.first == "?" and first == "C":
            track.first = first
        track.tick = self._tick
        return track

    # -- the journal --------------------------------------------------------------------------------------------------
    def _poll(self) -> None:
        path = os.path.join(self.job_dir, JOURNAL)
        try:
            with open(path, "rb") as file:
                ino = os.fstat(file.fileno()).st_ino
                if ino != self._journal_ino and self._journal_ino:
                    self._finish_rotated(f"{path}.1")
                if ino != self._journal_ino or os.fstat(file.fileno()).st_size < self._offset:
                    self._journal_ino, self._offset = ino, 0
                self._offset = self._read(file, self._offset)
        except FileNotFoundError:
            self._finish_rotated(f"{path}.1")  # nothing was changed since
        except OSError as e:
            raise DevproxyError(
                f"the journal {path} of changed files cannot be read: {e.strerror}",
                "the job goes on, but no image can be taken of it",
                object=path,
            ) from e

    def _finish_rotated(self, path: str) -> None:
        """A process that had opened the journal before it was renamed may have written to it since."""
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_ino == self._journal_ino:
                    self._offset = self._read(file, self._offset)
        except FileNotFoundError:
            pass

    def _read(self, file: Any, offset: int) -> int:
        """Whole lines from `offset` on; where to go on. A line that is not understood was cut by a full tmpfs."""
        file.seek(offset)
        data: bytes = file.read()
        whole = data.rfind(b"\n") + 1
        for line in data[:whole].split(b"\n")[:-1]:
            words = line.split(b" ", 3)
            if len(words) != 4 or words[0] not in (b"C", b"W", b"M", b"R"):
                continue
            if words[0] == b"R":
                old, tab, new = words[3].partition(b"\t")
                if tab:
                    self._directory_renamed(_unescape(old), _unescape(new))
                continue
            name = _unescape(words[3])
            track = self._add(name, "C" if words[0] == b"C" else "W")
            track.mapped |= words[0] == b"M"
        return offset + whole

    def _directory_renamed(self, old: str, new: str) -> None:
        """Every file below has another name now, those too that the job never opened."""
        self._renames.append((old, new))
        self._add(old, "W")
        self._add(new, "C")
        for path in [p for p in self._tracks if p.startswith(old + "/")]:
            moved = self._add(new + path[len(old) :], "C")
            moved.mapped |= self._tracks[path].mapped
        for folder, folders, names in os.walk(new):
            for name in folders + names:
                path = os.path.join(folder, name)
                self._add(path, "C")
                self._add(old + path[len(new) :], "W")

    # -- while the job lives ------------------------------------------------------------------------------------------
    def note_state(self, *, ended: bool = False) -> None:
        """Remembers how every file looks now. Every few seconds, when the tree is frozen, and when it has `ended`."""
        with self._mu:
            self._note(ended)

    def _note(self, ended: bool, durable: bool = False) -> None:
        now_ns = time.time_ns()  # before the looks: what changes during them counts as later
        self._poll()
        self._rotate()
        self._tick += 1
        undo = os.path.isdir(self.undo_dir)
        for path, track in list(self._tracks.items()):
            st = _lstat(path)
            # Made and gone again. A process may have mentioned it and not made it yet: so not at once.
            if st is None and track.first == "C" and track.tick + 2 <= self._tick:
                del self._tracks[path]
                if undo:
                    self._drop_undo(path, marker=True)
                continue
            if undo:
                self._mark(path, track)
            track.state, track.noted = _state(st), True
        self._ended = ended
        self._save(now_ns, durable)

    def _mark(self, path: str, track: _Track) -> None:
        """Tells the library that no undo copy of this name is wanted any more."""
        if track.marked:
            return
        track.marked = True
        name = os.path.join(self.undo_dir, path_hash(path))
        try:
            os.close(os.open(f"{name}.m", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError:
            pass  # then it copies once in vain
        if track.first == "C":
            self._drop_undo(path, marker=False)

    def _drop_undo(self, path: str, *, marker: bool) -> None:
        name = os.path.join(self.undo_dir, path_hash(path))
        for victim in (name, f"{name}.m") if marker else (name,):
            try:
                os.unlink(victim)
            except IsADirectoryError:
                os.rmdir(victim)
            except OSError:
                pass

    def _open_undo(self) -> None:
        """From now on the library keeps what a file held before the job's first change."""
        os.makedirs(self.undo_dir, mode=0o700, exist_ok=True)
        link = os.path.join(self.job_dir, UNDO_LINK)
        try:
            os.symlink(self.undo_dir, link)
        except FileExistsError:
            if os.readlink(link) != self.undo_dir:
                os.unlink(link)
                os.symlink(self.undo_dir, link)

    # -- the cut ------------------------------------------------------------------------------------------------------
    def snapshot(
        self,
        staging_dir: str,
        *,
        previous: Iterable[FileEntry] = (),
        files_max: int = FILES_MAX_BYTES,
        shared_fs: Callable[[str], bool] | None = None,
    ) -> list[FileEntry]:
        """All files that the job has touched, while no process of the tree runs.

        What is the same as in `previous` takes its refs; else a copy lies at `staged`. files_max in bytes.
        Raises DevproxyError when a file cannot be copied; nothing of the job was changed then.
        """
        with self._mu:
            fault.point("files_snapshot")
            os.makedirs(staging_dir, mode=0o700, exist_ok=True)
            self._note(False)
            shared = shared_fs or Mounts().shared
            older = {e.path: e for e in previous}
            entries = [FileEntry("", "mark", "?", size=len(self._renames))]
            inodes: dict[tuple[int, int], str] = {}
            for path in sorted(self._tracks):
                self._take(path, staging_dir, older, files_max, shared, inodes, entries)
            self._open_undo()  # the next note_state marks what needs no copy: not while the tree stands
            return entries

    def _take(
        self,
        path: str,
        staging_dir: str,
        older: dict[str, FileEntry],
        files_max: int,
        shared: Callable[[str], bool],
        inodes: dict[tuple[int, int], str],
        entries: list[FileEntry],
    ) -> None:
        track = self._tracks[path]
        now_ns = time.time_ns()
        st = _lstat(path)
        if st is None:
            entries.append(FileEntry(path, "absent", track.first, taken_ns=now_ns))
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
        entries.append(entry)
        if shared(path):
            entry.kind, entry.why = "shared-fs", "it lies on a shared file system"
        elif stat.S_ISDIR(st.st_mode):
            entry.kind, entry.size = "directory", 0
        elif stat.S_ISLNK(st.st_mode):
            entry.kind, entry.target = "symlink", os.readlink(path)
        elif not stat.S_ISREG(st.st_mode):
            entry.kind, entry.why = "special", "it is not a regular file"
        elif st.st_size > files_max:
            entry.kind, entry.why = "too-large", f"{st.st_size} bytes are above --files-max"
        elif st.st_nlink > 1 and (leader := inodes.get((st.st_dev, st.st_ino))):
            entry.link = leader
        else:
            inodes[st.st_dev, st.st_ino] = path
            old = older.get(path)
            if old is not None and old.refs and _unchanged(old, entry):
                entry.refs = list(old.refs)
            else:
                entry.staged = os.path.join(staging_dir, f"file-{len(entries):06d}")
                self._stage(entry)

    def _stage(self, entry: FileEntry) -> None:
        try:
            source = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOATIME)
        except PermissionError:
            try:
                source = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except PermissionError as e:
                entry.kind, entry.staged = "special", ""
                entry.why = f"it cannot be read: {e.strerror}"
                return
        try:
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
        finally:
            os.close(source)

    def _rotate(self) -> None:
        """A writer that opened the journal just before may write to the old file: the next poll reads its end too."""
        if self._offset < ROTATE_BYTES:
            return
        path = os.path.join(self.job_dir, JOURNAL)
        # _poll finds another inode then, reads the rest of this one, and goes on with the new one.
        os.replace(path, f"{path}.1")

    # -- the restore --------------------------------------------------------------------------------------------------
    def put_back(
        self,
        entries: Iterable[FileEntry],
        fetch: Callable[[FileEntry, str], None],
        report: Callable[[str], None],
        *,
        image_time: float,
        old_job_dir: str = "",
    ) -> PutBack:
        """Every file as it was at the cut. Precondition: no process of the job lives.

        fetch(entry, path) writes the content of `entry` to a new file; report gets one line a finding; image_time is the
        wall clock of the cut, in seconds; old_job_dir is the folder in which the job ran before, if it is still there: its
        journal has what the state folder does not have yet. May be run again after a failure. Raises DevproxyError naming
        the file.
        """
        with self._mu:
            if old_job_dir and os.path.abspath(old_job_dir) != self.job_dir:
                here, self.job_dir = self.job_dir, os.path.abspath(old_job_dir)
                try:
                    self._poll()
                finally:
                    self.job_dir = here
            else:
                self._poll()
            return _Restore(self, list(entries), fetch, report, int(image_time * 1e9)).run()

    def adopt(self, entries: Iterable[FileEntry]) -> None:
        """After put_back: the job that starts now has touched these files and no others."""
        with self._mu:
            mine = {e.path: e for e in entries if e.kind != "mark"}
            wanted = {path_hash(p) for p, e in mine.items() if e.first != "C"}
            for name in os.listdir(self.undo_dir) if os.path.isdir(self.undo_dir) else []:
                if name.partition(".")[0] not in wanted or name.endswith(".m"):
                    victim = os.path.join(self.undo_dir, name)
                    (
                        os.rmdir
                        if os.path.isdir(victim) and not os.path.islink(victim)
                        else os.unlink
                    )(victim)
            for name in (JOURNAL, f"{JOURNAL}.1"):
                try:
                    os.unlink(os.path.join(self.job_dir, name))
                except FileNotFoundError:
                    pass
            self._journal_ino = self._offset = 0
            marks = [e.size for e in entries if e.kind == "mark"]
            self._renames = self._renames[: marks[0]] if marks else []
            self._tracks = {
                p: _Track(e.first, e.mapped, True, _state(_lstat(p))) for p, e in mine.items()
            }
            self._ended = False
            self._save(time.time_ns(), durable=True)
            self._open_undo()
            for path, track in self._tracks.items():
                self._mark(path, track)

    def would_change(self, entries: Iterable[FileEntry]) -> list[str]:
        """Paths that put_back would touch now, sorted. Changes nothing."""
        with self._mu:
            self._poll()
            plan = _Restore(self, list(entries), lambda entry, path: None, lambda text: None, 0)
            return plan.would_change()

    def absorb(self) -> None:
        """What the journal of a dead job has, into the state folder: its job folder is about to go."""
        with self._mu:
            try:
                last_ns = os.stat(os.path.join(self.job_dir, JOURNAL)).st_mtime_ns
            except FileNotFoundError:
                return
            if not self._ended:
                self._poll()
                self._save(max(self._alive_ns, last_ns))

    def forget(self) -> None:
        """The job and its images are gone: nothing of it stays in the state folder but what was replaced."""
        with self._mu:
            import shutil

            shutil.rmtree(self.undo_dir, ignore_errors=True)
            for path in (self._file, f"{self._file}.new"):
                try:
                    os.unlink(path)
                except FileNotFoundError:
                    pass


def _unchanged(old: FileEntry, new: FileEntry) -> bool:
    """True when the content stored for `old` is that of `new`."""
    if old.kind != "present" or new.mapped or old.mapped:
        return False
    same = (old.dev, old.ino, old.size, old.mtime_ns, old.ctime_ns) == (
        new.dev,
        new.ino,
        new.size,
        new.mtime_ns,
        new.ctime_ns,
    )
    return same and old.taken_ns - max(old.mtime_ns, old.ctime_ns) > YOUNG_NS


class _Restore:
    """One put_back. First what goes, then folders, then files: a name may have changed its kind."""

    def __init__(
        self,
        tracker: FilesTracker,
        entries: list[FileEntry],
        fetch: Callable[[FileEntry, str], None],
        report: Callable[[str], None],
        image_ns: int,
    ) -> None:
        self.tracker = tracker
        self.fetch = fetch
        self.report = report
        self.image_ns = image_ns
        self.done = PutBack()
        self.renames_at_cut = next((e.size for e in entries if e.kind == "mark"), None)
        self.wanted = {e.path: e for e in entries if e.kind != "mark"}
        self.undo: dict[str, str] = {}
        self._owners: dict[str, str] = {}
        self._replaced_dir = ""

    def run(self) -> PutBack:
        for entry in self.wanted.values():
            if entry.listed_only:
                self.done.not_rolled_back.append(entry.path)
                if _lstat(entry.path) is None or self._identity(entry) is False:
                    self.report(
                        f"{entry.path} changed since the image and is not rolled back: {entry.why}"
                    )
        self._renames_back()
        self._add_touched_since()
        # Before the first change: to remove one hard link changes the times of the others.
        for path in self.wanted:
            if (st := _lstat(path)) is not None:
                self._owners[path] = self._decide_owner(path, st)
        plan = [e for e in self.wanted.values() if not e.listed_only]
        gone = sorted((e for e in plan if e.kind == "absent"), key=lambda e: e.path, reverse=True)
        for entry in gone:  # children before their folder
            self._guarded(self._remove, entry)
        for entry in sorted((e for e in plan if e.kind == "directory"), key=lambda e: e.path):
            self._guarded(self._folder, entry)
        rest = [e for e in plan if e.kind in ("present", "symlink")]
        for entry in sorted(rest, key=lambda e: (bool(e.link), e.path)):
            self._guarded(self._file, entry)
        if self.done.replaced:
            self.report(
                f"{len(self.done.replaced)} file(s) changed in the job's last moments; their replaced versions are in "
                f"{self._replaced_dir}"
            )
        return self.done

    def would_change(self) -> list[str]:
        if self.renames_at_cut is not None and len(self.tracker._renames) > self.renames_at_cut:
            return sorted({new for _, new in self.tracker._renames[self.renames_at_cut :]})
        found = []
        for entry in self.wanted.values():
            st = _lstat(entry.path)
            if entry.kind == "absent":
                differs = st is not None
            elif entry.kind == "directory":
                differs = st is None or not stat.S_ISDIR(st.st_mode)
            elif entry.kind in ("present", "symlink"):
                differs = not self._identity(entry)
            else:
                differs = False
            if differs:
                found.append(entry.path)
        for path, track in self.tracker._tracks.items():
            if path not in self.wanted and (track.first != "C" or _lstat(path) is not None):
                found.append(path)
        return sorted(found)

    def _guarded(self, step: Callable[[FileEntry], None], entry: FileEntry) -> None:
        try:
            step(entry)
        except OSError as e:
            raise DevproxyError(
                f"{entry.path} cannot be put back as it was in the image: {e.strerror or e}",
                "remove the cause and restore again; every file is old or new, none is half",
                object=entry.path,
            ) from e

    # -- what the job did after the cut ---------------------------------------------------------------------------
    def _renames_back(self) -> None:
        """Directory renames after the cut, last first. One whose old name is taken or new name is gone is done."""
        if self.renames_at_cut is None:
            return
        for old, new in reversed(self.tracker._renames[self.renames_at_cut :]):
            st = _lstat(new)
            if st is not None and stat.S_ISDIR(st.st_mode) and _lstat(old) is None:
                os.makedirs(os.path.dirname(old), exist_ok=True)
                os.rename(new, old)
            if _lstat(new) is None and _lstat(old) is not None:
                self._move_states(old, new)

    def _move_states(self, old: str, new: str) -> None:
        """What was seen last under the new name is what lies under the old one; also after a crash behind the rename."""
        tracks = self.tracker._tracks
        for path in [p for p in tracks if p.startswith(new + "/")]:
            source, target = tracks[path], tracks.get(old + path[len(new) :])
            if target is not None and source.state is not None:
                target.state, target.noted = source.state, source.noted
                target.outsider_ns = max(target.outsider_ns, source.outsider_ns)
                target.unsure_ns = max(target.unsure_ns, source.unsure_ns)
                source.state = None

    def _add_touched_since(self) -> None:
        renamed = self.tracker._renames[self.renames_at_cut or 0 :]
        for path, track in self.tracker._tracks.items():
            if path in self.wanted:
                continue
            if track.first == "C":
                self.wanted[path] = FileEntry(path, "absent", "C")
                continue
            copy = os.path.join(self.tracker.undo_dir, path_hash(path))
            st = _lstat(copy)
            if st is None:
                if not any(path == old or path.startswith(old + "/") for old, _ in renamed):
                    self.done.not_rolled_back.append(path)
                    self.report(
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
            self.wanted[path] = entry
            self.undo[path] = copy

    # -- whose is what is there now -------------------------------------------------------------------------------
    def _identity(self, entry: FileEntry) -> bool:
        """True when nobody can have touched the file since the cut. Device numbers change with a reboot."""
        st = _lstat(entry.path)
        return (
            st is not None
            and not entry.mapped
            and (st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns)
            == (entry.ino, entry.size, entry.mtime_ns, entry.ctime_ns)
        )

    def _owner(self, path: str) -> str:
        return self._owners.get(path, "other")  # came while we work: not the job's

    def _decide_owner(self, path: str, st: os.stat_result) -> str:
        """job, other or unsure: who made the version that is there now."""
        track = self.tracker._tracks.get(path)
        if track is not None and track.outsider_ns > self.image_ns:
            return "other"
        unsure = track is not None and track.unsure_ns > self.image_ns
        if track is not None and track.noted and track.state == _state(st):
            return "unsure" if unsure else "job"
        if self.tracker._ended and track is not None and track.noted:
            return "other"
        last_ns = max(st.st_mtime_ns, st.st_ctime_ns)
        return "unsure" if last_ns <= self.tracker._alive_ns + SLACK_NS else "other"

    def _keep(self, path: str, st: os.stat_result) -> None:
        """Before something else takes its name. A hard link where that works: nothing moves until the rename."""
        owner = self._owner(path)
        if owner == "job":
            return
        if owner == "unsure":
            if not self._replaced_dir:
                self._replaced_dir = os.path.join(
                    self.tracker.folder, f"{self.tracker.job_id}.replaced", _utc()
                )
                os.makedirs(self._replaced_dir, mode=0o700, exist_ok=True)
            kept = os.path.join(
                self._replaced_dir, f"{path_hash(path)}-{os.path.basename(path)}"[:250]
            )
        else:
            folder, name = os.path.split(path)
            if self._kept_before(folder, name, st):
                return  # by a run that did not come to its end
            kept = os.path.join(folder, f"{name[:200]}{KEPT}{_utc()}")
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
                _copy_file(path, f"{kept}.part")
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
                there = _lstat(os.path.join(folder, other))
                if there is not None and (there.st_dev, there.st_ino) == (st.st_dev, st.st_ino):
                    return True
        return False

    # -- the three steps ------------------------------------------------------------------------------------------
    def _remove(self, entry: FileEntry) -> None:
        st = _lstat(entry.path)
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
            self._keep(entry.path, st)
            fault.point("files_put_back_mid")
            os.unlink(entry.path)
        self.done.removed.append(entry.path)

    def _folder(self, entry: FileEntry) -> None:
        st = _lstat(entry.path)
        if st is not None and not stat.S_ISDIR(st.st_mode):
            self._keep(entry.path, st)
            os.unlink(entry.path)
            st = None
        if st is None:
            os.makedirs(entry.path, exist_ok=True)
            self.done.restored.append(entry.path)
        if stat.S_IMODE(os.lstat(entry.path).st_mode) != entry.mode:
            os.chmod(entry.path, entry.mode)

    def _file(self, entry: FileEntry) -> None:
        if self._identity(entry):
            self.done.unchanged += 1
            return
        folder = os.path.dirname(entry.path)
        os.makedirs(folder, exist_ok=True)
        st = _lstat(entry.path)
        if st is not None and stat.S_ISDIR(st.st_mode):
            try:
                os.rmdir(entry.path)  # the job's own files in it are gone by now
            except OSError:
                aside = f"{entry.path}{KEPT}{_utc()}"
                os.rename(entry.path, aside)
                self.done.kept.append(aside)
                self.report(
                    f"{entry.path} is a folder with others' files now; it is kept as {aside}"
                )
            st = None
        temporary = os.path.join(folder, f"{_TEMPORARY}{path_hash(entry.path)}")
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
        _sync_folder(folder)

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
            self._keep(entry.path, st)
        fault.point("files_put_back_mid")
        os.rename(temporary, entry.path)
        self.done.restored.append(entry.path)

    def _bring(self, entry: FileEntry, temporary: str) -> None:
        if copy := self.undo.get(entry.path):
            _copy_file(copy, temporary)
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
        if not _same_start(entry.path, temporary, entry.size):
            return False
        if st.st_size > entry.size:
            if self._owner(entry.path) != "job":
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


class FanotifyWatch:
    """Who writes to the job's files, as the kernel sees it (fanotify(7)); needs CAP_SYS_ADMIN.

    One thread of the supervisor; an event for each close after writing on the file systems of tracked files. Outsiders'
    writes are marked in the tracker; writes of the tree that the library missed (static programs) are added to it.
    """

    _EVENT = struct.Struct("=IBBHQii")  # struct fanotify_event_metadata
    _CLOSE_WRITE = 0x8
    _OVERFLOW = 0x4000
    _MARK_ADD_FILESYSTEM = 0x1 | 0x100
    _INIT_FLAGS = 0x1 | 0x2  # FAN_CLOEXEC | FAN_NONBLOCK, class FAN_CLASS_NOTIF

    def __init__(
        self, tracker: FilesTracker, root_pid: Callable[[], int], say: Callable[[str], None]
    ) -> None:
        self._tracker = tracker
        self._root_pid = root_pid
        self._say = say
        self._fd = -1
        self._wake = (-1, -1)
        self._thread: threading.Thread | None = None
        self._devices: set[int] = set()
        self._space_of, self._space = 0, 0  # the tree's root, and the inode of its PID namespace
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._lost = False

    def start(self) -> bool:
        """False, said once, where the kernel does not permit it: note_state() alone decides then."""
        self._fd = self._libc.fanotify_init(self._INIT_FLAGS, os.O_RDONLY | os.O_CLOEXEC)
        if self._fd < 0:
            reason = os.strerror(ctypes.get_errno())
            self._say(
                f"who else writes to the job's files is not watched (fanotify: {reason}); their states decide"
            )
            return False
        self._wake = os.pipe()
        # stop() may come from another thread at any moment: it joins only what has been started.
        thread = threading.Thread(target=self._loop, name="devproxy-fanotify", daemon=True)
        thread.start()
        self._thread = thread
        self.refresh()
        return True

    def refresh(self) -> None:
        """After note_state: watches the file systems of files that are new."""
        if self._fd < 0:
            return
        folders = {os.path.dirname(p) for p in self._tracker.changed()}
        for folder in folders:
            st = _lstat(folder)
            if st is None or st.st_dev in self._devices:
                continue
            self._devices.add(st.st_dev)
            self._libc.fanotify_mark(
                self._fd,
                ctypes.c_uint(self._MARK_ADD_FILESYSTEM),
                ctypes.c_uint64(self._CLOSE_WRITE),
                -100,
                ctypes.c_char_p(os.fsencode(folder)),
            )

    def stop(self) -> None:
        if self._thread is None:
            return
        os.write(self._wake[1], b"x")
        self._thread.join()
        self._thread = None
        for fd in (self._fd, *self._wake):
            os.close(fd)
        self._fd = -1

    def _loop(self) -> None:
        import select

        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(self._wake[0], select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll()]
            if self._fd in ready:
                self._drain()
            if self._wake[0] in ready:
                return

    def _drain(self) -> None:
        while True:
            try:
                data = os.read(self._fd, 64 << 10)
            except OSError:
                return
            at = 0
            while at + self._EVENT.size <= len(data):
                size, _, _, _, mask, fd, pid = self._EVENT.unpack_from(data, at)
                at += size
                if mask & self._OVERFLOW and not self._lost:
                    self._lost = True
                    self._say("events about the job's files were lost; their states decide")
                if fd < 0:
                    continue
                try:
                    path = os.readlink(f"/proc/self/fd/{fd}")
                except OSError:
                    continue
                finally:
                    os.close(fd)
                if pid != os.getpid():
                    self._event(path, pid)

    def _event(self, path: str, pid: int) -> None:
        known = self._tracker.tracked(path)
        inside = self._inside(pid)
        if inside:
            if not known and not self._tracker.ignored(path):
                self._tracker.changed()  # the journal may have it by now; its record says more
                self._tracker.mention(path)
        elif known or self._tracker.tracked_by_now(path):
            self._tracker.somebody_else(path, time.time_ns(), sure=inside is False)

    def _inside(self, pid: int) -> bool | None:
        """None: it is gone, nobody knows. A job has a PID namespace of its own (nested ones cannot be dumped anyway)."""
        root = self._root_pid()
        try:
            if root != self._space_of:
                self._space = os.stat(f"/proc/{root}/ns/pid").st_ino
                self._space_of = root
            if self._space != os.stat("/proc/self/ns/pid").st_ino:
                return os.stat(f"/proc/{pid}/ns/pid").st_ino == self._space
            while pid > 1:
                if pid == root:
                    return True
                parent = proctree.parent(pid)
                if parent is None:
                    return None
                pid = parent
        except OSError:
            return None
        return False
