# SPDX-License-Identifier: Apache-2.0
"""The job's files: processes under libdevproxy_host.so, a snapshot while they stand, and everything put back.

The oracle is the folder itself: a walk of it at the cut against a walk after put_back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
import signal
import sqlite3
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from devproxy import fault
from devproxy.checkpoint import criu
from devproxy.checkpoint.files.owner import KEPT
from devproxy.checkpoint.files.records import FileEntry
from devproxy.checkpoint.files.tracker import FilesTracker
from devproxy.checkpoint.files.watch import FanotifyWatch
from tests.integration.needs import missing

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "build" / "lib" / "libdevproxy_host.so"
PROGRAMS = ROOT / "tests" / "subjects" / "host"
BUILD = ROOT / "build" / "tests" / "programs_host"


def tree(root: Path) -> dict[str, object]:
    """Kind, mode and content of everything below `root`; hard links by the first name of their inode."""
    found: dict[str, object] = {}
    inodes: dict[int, str] = {}
    for folder, folders, names in os.walk(root):
        for name in sorted(folders + names):
            path = os.path.join(folder, name)
            info = os.lstat(path)
            key = os.path.relpath(path, root)
            if stat.S_ISLNK(info.st_mode):
                found[key] = ("link", os.readlink(path))
            elif stat.S_ISDIR(info.st_mode):
                found[key] = ("folder", stat.S_IMODE(info.st_mode))
            else:
                first = inodes.setdefault(info.st_ino, key)
                found[key] = (Path(path).read_bytes(), stat.S_IMODE(info.st_mode), first)
    return found


class Job:
    """A process under the library, its tracker, and a store that is a folder."""

    def __init__(self, base: Path) -> None:
        if not LIBRARY.exists():
            pytest.fail(f"{LIBRARY} is not built: run make build", pytrace=False)
        self.root = base / "work"
        self.root.mkdir()
        self.job_dir = Path(tempfile.mkdtemp(prefix="devproxy-test-", dir="/dev/shm")) / "j"
        self.job_dir.mkdir()
        self.state = base / "state"
        self.staging = base / "staging"
        self.store = base / "store"
        self.store.mkdir()
        self.tracker = FilesTracker(str(self.job_dir), str(self.state))
        self.said: list[str] = []
        self.cut_time = 0.0
        self.processes: list[subprocess.Popen[str]] = []

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        shutil.rmtree(self.job_dir.parent)

    def environment(self) -> dict[str, str]:
        return os.environ | {"DEVPROXY_JOB_DIR": str(self.job_dir), "LD_PRELOAD": str(LIBRARY)}

    def start(self, *argv: str | Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [str(a) for a in argv],
            cwd=self.root,
            env=self.environment(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.processes.append(process)
        return process

    def run(self, code: str) -> None:
        process = self.start(sys.executable, "-c", code)
        process.communicate(timeout=60)
        assert process.returncode == 0

    def cut(self, previous: list[FileEntry] | None = None, **options: object) -> list[FileEntry]:
        shutil.rmtree(self.staging, ignore_errors=True)
        entries = self.tracker.snapshot(str(self.staging), previous=previous or (), **options)
        self.cut_time = time.time()
        for entry in entries:
            if entry.staged:
                kept = self.store / f"{len(os.listdir(self.store)):06d}"
                shutil.copyfile(entry.staged, kept)
                entry.refs = [str(kept)]
        # As an image does: through the manifest.
        return [FileEntry.from_dict(json.loads(json.dumps(e.to_dict()))) for e in entries]

    @staticmethod
    def fetch(entry: FileEntry, fd: int) -> None:
        with open(fd, "wb", closefd=False) as file:
            file.write(Path(entry.refs[0]).read_bytes())

    def put_back(self, entries: list[FileEntry], *, fresh: bool = True):
        """By a new supervisor, which knows only what is on the disk."""
        tracker = FilesTracker(str(self.job_dir), str(self.state)) if fresh else self.tracker
        return tracker.put_back(entries, self.fetch, self.said.append, image_time=self.cut_time)


@contextlib.contextmanager
def new_job() -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="devproxy-files-") as base:
        job = Job(Path(base))
        try:
            yield job
        finally:
            job.close()


@pytest.fixture
def job() -> Iterator[Job]:
    with new_job() as made:
        yield made


def play(
    job: Job, before: list[list[object]], after: list[list[object]]
) -> tuple[dict[str, object], list[FileEntry]]:
    """Runs both halves; the tree and the entries at the cut."""
    plan = job.root.parent / "plan.json"
    plan.write_text(json.dumps({"before": before, "after": after}))
    process = job.start(sys.executable, PROGRAMS / "workload.py", job.root, plan)
    assert process.stdout is not None and process.stdout.readline() == "cut\n"
    os.kill(process.pid, signal.SIGSTOP)
    entries = job.cut()
    at_cut = tree(job.root)
    os.kill(process.pid, signal.SIGCONT)
    process.communicate("go\n", timeout=60)
    assert process.returncode == 0
    return at_cut, entries


# -- one operation after the other ----------------------------------------------------------------------------------------
TWO_HALVES: dict[str, tuple[list[list[object]], list[list[object]]]] = {
    "append log": ([["append", "log", "1\n"]], [["append", "log", "2\n"]]),
    "rewrite": ([["write", "a", "one"]], [["write", "a", "twice as long"]]),
    "rename over": ([["save_over", "a", "1"]], [["save_over", "a", "2"]]),
    "mkstemp": ([["mkstemp_over", "a", "1"]], [["mkstemp_over", "a", "2"]]),
    "mkstemp of C": ([["c_mkstemp", "a", "1"]], [["c_mkstemp", "a", "2"], ["c_mkstemp", "b", "3"]]),
    "truncate": ([["write", "a", "12345"]], [["truncate", "a", 2]]),
    "unlink": ([["write", "a", "1"]], [["unlink", "a"]]),
    "unlinked before": ([["write", "a", "1"], ["unlink", "a"]], [["write", "a", "2"]]),
    "mmap": (
        [["write", "a", "1"], ["mmap_write", "a", "xx"]],
        [["mmap_write", "a", "yyyy"], ["mmap_write", "old", "zz"]],
    ),
    "copies": (
        [["copyfile", "old", "a"], ["copy_range", "old", "b"]],
        [["sendfile", "a", "old"], ["copy_range", "b", "c"], ["copyfile", "b", "d"]],
    ),
    "children": (
        [["shell", "a", "1"], ["fork", "b", "1"]],
        [["spawn", "a", "2"], ["fork", "b", "2"], ["shell", "c", "3"], ["spawn", "old", "4"]],
    ),
    "spawned onto": (
        [["spawn_onto", "a", "1"]],
        [["spawn_onto", "a", "2"], ["spawn_onto", "b", "3"]],
    ),
    "named late": ([["tmpfile", "a", "1"]], [["append", "a", "2"], ["tmpfile", "b", "3"]]),
    "created after": ([], [["mkdir", "d"], ["write", "d/x", "1"], ["write", "y", "2"]]),
    "first touched after": (
        [],
        [
            ["append", "old", "!"],
            ["write", "old", ""],
            ["unlink", "old2"],
            ["rename", "olddir", "moved"],
        ],
    ),
    "checkpoint folder": (
        [["mkdir", "tmp"], ["write", "tmp/a", "1"]],
        [["write", "tmp/b", "2"], ["rename", "tmp", "ckpt"], ["rmtree", "olddir"]],
    ),
    "checkpoint folder before": (
        [
            ["mkdir", "tmp"],
            ["write", "tmp/a", "1"],
            ["rename", "tmp", "ckpt"],
            ["rename", "olddir", "od"],
        ],
        [["rmtree", "ckpt"], ["write", "od/deep", "changed"]],
    ),
    "links": (
        [["write", "a", "1"], ["link", "a", "b"], ["symlink", "a", "latest"]],
        [["append", "b", "2"], ["unlink", "a"], ["unlink", "latest"], ["symlink", "b", "latest"]],
    ),
    "through a link": ([["symlink", "old", "s"], ["append", "s", "1"]], [["append", "s", "2"]]),
    "odd names": (
        [["write", "new\nline", "1"], ["write", "back\\x41", "1"], ["write", "\udcff ü", "1"]],
        [["append", "new\nline", "2"], ["append", "back\\x41", "2"], ["unlink", "\udcff ü"]],
    ),
    "kind changes": (
        [["mkdir", "k"], ["write", "l", "1"]],
        [
            ["rmdir", "k"],
            ["write", "k", "1"],
            ["unlink", "l"],
            ["mkdir", "l"],
            ["write", "l/x", "2"],
        ],
    ),
}


def old_files(root: Path) -> None:
    """What was there before the job."""
    (root / "old").write_text("old content")
    (root / "old2").write_text("old2 content")
    (root / "old").chmod(0o640)
    (root / "olddir").mkdir()
    (root / "olddir" / "deep").write_text("deep")


@pytest.mark.parametrize("name", TWO_HALVES)
def test_put_back_makes_the_tree_of_the_cut(job: Job, name: str) -> None:
    old_files(job.root)
    at_cut, entries = play(job, *TWO_HALVES[name])
    assert tree(job.root) != at_cut, "the second half must change something"
    job.tracker.note_state(ended=True)
    done = job.put_back(entries)
    assert tree(job.root) == at_cut
    assert (done.kept, done.replaced, done.not_rolled_back, job.said) == ([], [], [], [])


# -- attributes and ACLs of what was there before the job -----------------------------------------------------------------
CAPABILITY = struct.pack(
    "<5I", 0x02000001, 1 << 10, 0, 0, 0
)  # cap_net_bind_service=ep, <linux/capability.h>
ATTRIBUTES = {"user.note": b"from before\xff", "user.new\nline": b"", "user.long": b"x" * 2000}
CHANGES = {
    "append": "open('old','a').write('!')",
    "rewrite": "open('old','w').write('another')",
    "save over": "open('new','w').write('another'); os.rename('new','old')",
    "unlink": "os.unlink('old')",
    "append and more": "open('old','a').write('!'); os.setxattr('old','user.later',b'1');"
    "os.removexattr('old','user.note'); os.removexattr('old','system.posix_acl_access')",
}


def acl(named: int) -> bytes:
    """rwx for the owner, r-x for the group, rwx for that user; the mask is rwx."""
    nobody = 0xFFFFFFFF
    entries = ((1, 7, nobody), (2, 7, named), (4, 5, nobody), (16, 7, nobody), (32, 0, nobody))
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def attributes(path: Path) -> dict[str, bytes]:
    return {name: os.getxattr(path, name) for name in os.listxattr(path)}


@pytest.mark.parametrize("change", CHANGES)
def test_attributes_from_before_a_first_change_behind_the_image(job: Job, change: str) -> None:
    old_files(job.root)
    old = job.root / "old"
    wanted = ATTRIBUTES | {"system.posix_acl_access": acl(1234)}
    if os.geteuid() == 0:
        wanted["security.capability"] = CAPABILITY
    for name, value in wanted.items():
        os.setxattr(old, name, value)
    entries = job.cut()
    job.run(f"import os; {CHANGES[change]}")
    assert not old.exists() or old.read_text() != "old content"
    job.tracker.note_state(ended=True)
    job.put_back(entries)
    assert old.read_text() == "old content"
    assert attributes(old) == wanted
    assert stat.S_IMODE(old.stat().st_mode) == 0o770
    assert job.said == []
    job.tracker.adopt(entries)
    assert os.listdir(job.tracker.undo.folder) == []


@pytest.mark.parametrize("killed", [0, 2, 3])
def test_a_folder_that_goes_after_the_image(job: Job, killed: int) -> None:
    """With its owner, its whole mode, its ACLs, and the file in it; also by a restore that was killed and runs again."""
    other = 4242 if os.geteuid() == 0 else os.geteuid()
    old_files(job.root)
    folders = (job.root / "olddir", job.root / "empty")
    folders[1].mkdir()
    for folder in folders[-1:] if killed else folders:
        for kind in ("access", "default"):
            os.setxattr(folder, f"system.posix_acl_{kind}", acl(1234))
        os.setxattr(folder, "user.note", b"1")
        os.chown(folder, other, other)
        folder.chmod(0o2775)
    at_cut = tree(job.root)
    looks = {f: (attributes(f), f.stat().st_uid, f.stat().st_gid) for f in folders}
    entries = job.cut()
    job.run("import os, shutil; os.umask(0o77); shutil.rmtree('olddir'); os.rmdir('empty')")
    job.tracker.note_state(ended=True)
    if killed:
        child = os.fork()
        if child == 0:
            try:
                fault.arm(f"files_put_back_mid:{killed}:kill")
                job.put_back(entries)
            finally:
                os._exit(1)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        assert tree(job.root) != at_cut
    job.put_back(entries)
    assert tree(job.root) == at_cut
    assert {f: (attributes(f), f.stat().st_uid, f.stat().st_gid) for f in folders} == looks
    assert job.said == []


def test_attributes_that_were_not_kept_whole_are_said(job: Job) -> None:
    """A power cut leaves half of them, or nothing; and who is not root cannot have given a capability."""
    old_files(job.root)
    for name, value in ATTRIBUTES.items():
        os.setxattr(job.root / "old", name, value)
    entries = job.cut()
    job.run(CHANGES["rewrite"])
    job.tracker.note_state(ended=True)
    kept = Path(job.tracker.undo.copy_of(str(job.root / "old")) + ".x")
    whole = kept.read_bytes()
    for half in (whole[:-1], b""):
        kept.write_bytes(half)
        job.said.clear()
        job.put_back(entries)
        assert (job.root / "old").read_text() == "old content"
        assert len(job.said) == 1 and "without the ACL and the attributes" in job.said[0]
    if os.geteuid() != 0:
        return
    kept.write_bytes(whole + b"security.capability\0" + struct.pack("=I", 20) + CAPABILITY)
    os.chown(kept, 4242, 4242)
    (job.root / "old").unlink()
    job.said.clear()
    job.put_back(entries)
    assert attributes(job.root / "old") == ATTRIBUTES
    assert len(job.said) == 1 and "user 4242 has written them down" in job.said[0]


NAMES = st.sampled_from(["a", "b", "old", "old2", "d/a", "d/b", "olddir/deep"])
FOLDERS = st.sampled_from(["d", "e", "olddir"])
TEXTS = st.text("xyz", min_size=1, max_size=6)
WRITES = st.sampled_from(
    ["write", "append", "patch", "save_over", "mkstemp_over", "c_mkstemp", "mmap_write", "fork"]
)
OPERATION = st.one_of(
    st.tuples(WRITES, NAMES, TEXTS),
    st.tuples(st.just("truncate"), NAMES, st.integers(0, 9)),
    st.tuples(st.sampled_from(["unlink"]), NAMES),
    st.tuples(
        st.sampled_from(["rename", "link", "copyfile", "copy_range", "sendfile"]), NAMES, NAMES
    ),
    st.tuples(st.just("symlink"), st.sampled_from(["a", "old"]), NAMES),
    st.tuples(st.sampled_from(["mkdir", "rmdir"]), FOLDERS),
)
OPERATIONS = st.lists(OPERATION.map(list), max_size=12)


@settings(
    max_examples=int(os.environ.get("DEVPROXY_TEST_EXAMPLES", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@example([["truncate", "old", 0]], [["truncate", "old", 0]])  # it was not empty before
@given(OPERATIONS, OPERATIONS)
def test_any_operations(before: list[list[object]], after: list[list[object]]) -> None:
    with new_job() as job:
        old_files(job.root)
        at_cut, entries = play(job, before, after)
        job.tracker.note_state(ended=True)
        done = job.put_back(entries)
        assert tree(job.root) == at_cut
        assert done.kept == []
        again = job.put_back(entries)
        assert (again.restored, again.removed) == ([], [])


# -- what jobs really do --------------------------------------------------------------------------------------------------
SQLITE = """
import sqlite3, itertools, sys
c = sqlite3.connect("x.db", isolation_level=None)
c.execute("pragma journal_mode=wal")
c.execute("pragma synchronous=off")
c.execute("create table t(a integer primary key, b text)")
for i in itertools.count():
    c.execute("insert into t values(?, ?)", (i, "x" * (i % 700)))
    if i == 300:
        print("going", flush=True)
"""


def test_sqlite_with_wal_under_load(job: Job) -> None:
    process = job.start(sys.executable, "-c", SQLITE)
    assert process.stdout is not None and process.stdout.readline() == "going\n"
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(0.05)
    entries = job.cut()
    names = {os.path.basename(e.path) for e in entries if e.kind == "present"}
    assert {"x.db", "x.db-wal", "x.db-shm"} <= names
    at_cut = {p.name: p.read_bytes() for p in job.root.iterdir()}
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.3)
    process.kill()
    process.wait()
    job.tracker.note_state(ended=True)
    assert (job.root / "x.db-wal").read_bytes() != at_cut["x.db-wal"]
    job.put_back(entries)
    assert {p.name: p.read_bytes() for p in job.root.iterdir()} == at_cut
    with contextlib.closing(sqlite3.connect(job.root / "x.db")) as db:
        assert db.execute("pragma integrity_check").fetchone() == ("ok",)
        rows, last = db.execute("select count(*), max(a) from t").fetchone()
    assert rows == last + 1 > 300


EVENTS = """
import struct, sys, time
out = open("events.out.tfevents", "ab", buffering=64 << 10)
for step in range(10**9):
    data = b"event %d" % step
    out.write(struct.pack("<Q", len(data)) + data)
    if step % 7 == 0:
        out.flush()
    if step == 5000:
        print("going", flush=True)
"""


def test_event_file_is_cut_in_place(job: Job) -> None:
    process = job.start(sys.executable, "-c", EVENTS)
    assert process.stdout is not None and process.stdout.readline() == "going\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(0.05)
    entries = job.cut()
    path = job.root / "events.out.tfevents"
    at_cut, inode = path.read_bytes(), path.stat().st_ino
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.2)
    process.kill()
    process.wait()
    job.tracker.note_state(ended=True)
    assert path.stat().st_size > len(at_cut)
    job.put_back(entries)
    assert path.read_bytes() == at_cut
    assert path.stat().st_ino == inode, "who follows the log must keep following"


def test_unchanged_files_take_the_stored_content(job: Job) -> None:
    job.run("open('a','w').write('1'); open('b','w').write('2')")
    time.sleep(0.1)
    first = job.cut()
    job.run("open('b','a').write('3')")
    second = {os.path.basename(e.path): e for e in job.cut(first)}
    older = {os.path.basename(e.path): e for e in first}
    assert second["a"].refs == older["a"].refs
    assert second["b"].refs != older["b"].refs


def test_a_mapped_file_is_copied_each_time(job: Job) -> None:
    """A store to a page that is dirty already changes no time stamp."""
    process = job.start(
        sys.executable,
        "-c",
        "import mmap,sys,os\nf=open('/dev/shm/'+sys.argv[1],'w+b'); f.truncate(4096)\nm=mmap.mmap(f.fileno(),4096)\n"
        "for i in range(3):\n  m[0]=65+i; print('set', flush=True); sys.stdin.readline()",
        f"{job.job_dir.parent.name}-mapped",
    )
    path = f"/dev/shm/{job.job_dir.parent.name}-mapped"
    contents, entries = [], []
    try:
        for _ in range(3):
            assert process.stdout is not None and process.stdin is not None
            process.stdout.readline()
            time.sleep(0.1)
            entries = job.cut(entries)
            (entry,) = (e for e in entries if e.path == path)
            assert entry.mapped
            contents.append(Path(entry.refs[0]).read_bytes()[:1])
            process.stdin.write("\n")
            process.stdin.flush()
    finally:
        process.wait()
        os.unlink(path)
    assert contents == [b"A", b"B", b"C"]


def test_a_file_that_is_mapped_past_the_library_is_copied_each_time(job: Job) -> None:
    """The library saw it made, and not mapped."""
    process = job.start(
        sys.executable,
        "-c",
        "import ctypes, os\nf = open('a', 'w+b'); f.truncate(4096)\nlibc = ctypes.CDLL(None)\n"
        "libc.syscall.restype = ctypes.c_long\n"
        "assert libc.syscall({'x86_64': 9, 'aarch64': 222}[os.uname().machine], ctypes.c_long(0), ctypes.c_long(4096), 3, 1, f.fileno(), ctypes.c_long(0)) > 0\n"
        "print('mapped', flush=True); input()",
    )
    assert process.stdout is not None
    process.stdout.readline()
    job.tracker.mention_open(process.pid)
    mapped = {entry.path: entry.mapped for entry in job.cut()}
    assert mapped[str(job.root / "a")]


def test_older_image_after_a_newer_one(job: Job) -> None:
    old_files(job.root)
    job.run("open('a','w').write('1')")
    first, at_first, t_first = job.cut(), tree(job.root), job.cut_time
    job.run("open('b','w').write('1'); open('old','a').write('!'); open('a','a').write('2')")
    second = job.cut(first)
    at_second = tree(job.root)
    job.run("import os; os.unlink('b'); os.unlink('old2'); open('c','w')")
    job.tracker.note_state(ended=True)
    done = job.put_back(second)
    assert tree(job.root) == at_second
    tracker = FilesTracker(str(job.job_dir), str(job.state))
    tracker.adopt(second)
    job.run("open('old','a').write('?'); open('old2','a').write('?'); open('e','w')")
    tracker.note_state(ended=True)
    job.cut_time = t_first
    done = job.put_back(first)
    assert tree(job.root) == at_first
    assert done.kept == [] and job.said == []


# -- somebody else --------------------------------------------------------------------------------------------------------
def test_somebody_elses_change_is_kept_and_said(job: Job) -> None:
    job.run("open('a','w').write('1'); open('b','w').write('1')")
    entries = job.cut()
    job.run("open('a','w').write('2'); open('c','w').write('2')")
    job.tracker.note_state(ended=True)
    (job.root / "a").write_text("mine")
    (job.root / "c").write_text("mine too")
    done = job.put_back(entries)
    assert (job.root / "a").read_text() == "1"
    assert not (job.root / "c").exists()
    kept = {p.name.split(KEPT)[0]: p.read_text() for p in job.root.iterdir() if KEPT in p.name}
    assert kept == {"a": "mine", "c": "mine too"}
    assert len(done.kept) == 2 and len(job.said) == 2
    assert all("changed by somebody else" in line for line in job.said)
    again = job.put_back(entries)
    assert (again.restored, again.removed, again.kept) == ([], [], [])


def test_all_killed_at_once(job: Job) -> None:
    """Nobody noted the last writes: what they leave is put back, and what it replaces is still somewhere."""
    job.run("open('a','w').write('1')")
    entries = job.cut()
    job.run("open('a','w').write('last words')")
    done = job.put_back(entries)
    assert (job.root / "a").read_text() == "1"
    assert done.kept == [] and [Path(p).read_text() for p in done.replaced] == ["last words"]
    assert len(job.said) == 1 and "last moments" in job.said[0]


def test_long_after_the_end_it_is_somebody_else(job: Job) -> None:
    job.run("open('a','w').write('1')")
    entries = job.cut()
    state = job.state / "jobs" / "j.files.json"
    long_ago = time.time() - 3600
    os.utime(state, (long_ago, long_ago))
    (job.root / "a").write_text("mine")
    assert len(job.put_back(entries).kept) == 1


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("owner", ["job", "other"])
def test_crash_in_the_middle(job: Job, nth: int, owner: str) -> None:
    job.run("for n in 'abc': open(n,'w').write('1')")
    entries = job.cut()
    at_cut = tree(job.root)
    job.run("for n in 'abc': open(n,'w').write('22')")
    job.tracker.note_state(ended=True)
    if owner == "other":
        for name in "abc":
            (job.root / name).write_text("333")
    newest = {n: (job.root / n).read_bytes() for n in "abc"}
    child = os.fork()
    if child == 0:
        try:
            fault.arm(f"files_put_back_mid:{nth}:kill")
            job.put_back(entries)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    for name, text in newest.items():
        assert (job.root / name).read_bytes() in (b"1", text)
    job.put_back(entries)
    now = tree(job.root)
    kept = {k.split(KEPT)[0]: v[0] for k, v in now.items() if KEPT in k}
    assert {k: v for k, v in now.items() if KEPT not in k} == at_cut
    assert kept == (dict.fromkeys("abc", b"333") if owner == "other" else {})
    assert len([k for k in now if KEPT in k]) == len(kept)


def test_listed_files(job: Job) -> None:
    job.run(
        "open('big','w').write('x'*1000); open('nfs','w').write('x'); import os; os.mkfifo('f'); os.link('f','g')"
    )
    entries = job.cut(files_max=999, shared_fs=lambda path: path.endswith("nfs"))
    kinds = {os.path.basename(e.path): e.kind for e in entries}
    assert (kinds["big"], kinds["nfs"], kinds["g"]) == ("too-large", "shared-fs", "special")
    job.run("open('big','a').write('y')")
    job.tracker.note_state(ended=True)
    done = job.put_back(entries)
    assert (job.root / "big").stat().st_size == 1001
    assert {os.path.basename(p) for p in done.not_rolled_back} == {"big", "nfs", "f", "g"}
    assert any("big" in line and "--files-max" in line for line in job.said)


def test_snapshot_fails_whole(job: Job) -> None:
    job.run("open('a','w').write('1')")
    fault.arm("files_snapshot:1:enospc")
    try:
        with pytest.raises(OSError, match="injected"):
            job.cut()
    finally:
        fault.arm("")
    assert len(job.cut()) == 2


# -- the library as a guest -----------------------------------------------------------------------------------------------
def compile_program(name: str) -> Path:
    out = BUILD / name
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = out.with_name(f"{name}.{os.getpid()}")
    cmd = [
        "gcc",
        "-std=gnu11",
        "-O1",
        "-Wall",
        "-Werror",
        "-pthread",
        "-o",
        fresh,
        PROGRAMS / f"{name}.c",
    ]
    done = subprocess.run(cmd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    fresh.rename(out)
    return out


def test_io_uring_is_not_there(job: Job) -> None:
    process = job.start(compile_program("io_uring"))
    out, _ = process.communicate(timeout=30)
    assert out == "PASS io_uring\n"
    assert str(job.root / "made-in-vfork") in job.tracker.changed()


def test_a_named_semaphore_is_mapped_by_its_name(job: Job) -> None:
    """Else CRIU meets a deleted file that has another name. It comes back with its value, as each file does."""
    process = job.start(
        sys.executable,
        "-c",
        """
import _multiprocessing, os
def make(name, value=3):
    return _multiprocessing.SemLock(1, value, 9, name, False)
semaphores = [make(f"/devproxy-{os.getpid()}-{n}") for n in range(2)]
try:
    make(semaphores[0].name)
    raise AssertionError("made twice")
except FileExistsError:
    pass
semaphores[0].acquire()
other = _multiprocessing.SemLock._rebuild(0, 1, 9, semaphores[0].name)
assert (other._get_value(), semaphores[1]._get_value()) == (2, 3)
_multiprocessing.sem_unlink(semaphores[1].name)
maps = open("/proc/self/maps").read().splitlines()
found = [line.split(None, 5)[5] for line in maps if "/dev/shm/sem." in line]
places = ["/dev/shm/sem." + one.name[1:] for one in semaphores]
assert sorted(set(found)) == [places[0], places[1] + " (deleted)"], found
print(places[0], flush=True)
input()
semaphores[0].acquire()  # a store to a page, which changes no time stamp
print("acquired", flush=True)
input()
""",
    )
    assert process.stdout is not None and process.stdin is not None
    place = Path(process.stdout.readline().strip())
    try:
        entries = job.cut()
        assert str(place) in {entry.path for entry in entries}
        content = place.read_bytes()
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "acquired\n"
        assert place.read_bytes() != content
        job.put_back(entries)
        assert place.read_bytes() == content
    finally:
        place.unlink(missing_ok=True)


def test_threads_signals_and_forks_lose_nothing(job: Job) -> None:
    process = job.start(compile_program("many"))
    out, _ = process.communicate(timeout=60)
    assert out == "PASS many\n"
    there = {str(p) for p in job.root.iterdir()}
    assert len(there) >= 4 * 204 + 1
    assert there <= set(job.tracker.changed())


def test_steady_state_writes_no_records(job: Job) -> None:
    job.run("import os\nfor i in range(5000): open('a','w').close(); open('a').close()")
    assert len((job.job_dir / "files.journal").read_text().splitlines()) <= 3


def test_journal_rotation_loses_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("devproxy.checkpoint.files.journal.ROTATE_BYTES", 1)
    for i in range(3):
        job.run(f"open('a{i}','w').write('1')")
        job.cut()
        # A late writer, that had opened the journal before it was renamed.
        with open(job.job_dir / "files.journal.1", "a") as file:
            file.write(f"C 0 0 {job.root}/late{i}\n")
        (job.root / f"late{i}").write_text("x")
    job.run("open('last','w').write('1')")
    names = {os.path.basename(p) for p in job.tracker.changed()}
    assert names == {"a0", "a1", "a2", "last", "late0", "late1", "late2"}


def test_fanotify_tells_insiders_from_outsiders(job: Job) -> None:
    process = job.start(
        "sh", "-c", "echo 1 > a; echo 1 > b; read x; exec 3>>a; echo 2 >&3; exec 3>&-; read y"
    )
    time.sleep(0.3)
    entries = job.cut()
    said: list[str] = []
    watch = FanotifyWatch(job.tracker, lambda: process.pid, said.append)
    if not watch.start():
        missing("fanotify", "; ".join(said))
    try:
        outside = subprocess.Popen(
            ["sh", "-c", 'exec 3>>"$0"; echo mine >&3; exec 3>&-; sleep 1', str(job.root / "b")]
        )
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        time.sleep(0.5)
        job.tracker.note_state()  # has the outsider's version too: the states alone would call it the job's
        outside.kill()
        outside.wait()
    finally:
        watch.stop()
    process.kill()
    process.wait()
    job.tracker.note_state(ended=True)
    done = job.put_back(entries, fresh=True)
    assert [os.path.basename(p).split(KEPT)[0] for p in done.kept] == ["b"]
    assert ((job.root / "a").read_text(), (job.root / "b").read_text()) == ("1\n", "1\n")


def test_without_fanotify_it_is_said(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the privilege the states decide; that is said, once."""
    said: list[str] = []
    watch = FanotifyWatch(job.tracker, os.getpid, said.append)

    class Refuses:
        def fanotify_init(self, *_: object) -> int:
            return -1

    monkeypatch.setattr(watch, "_libc", Refuses())
    monkeypatch.setattr(ctypes, "get_errno", lambda: errno.EPERM)
    assert not watch.start()
    assert len(said) == 1 and "fanotify" in said[0], said
    watch.stop()


def test_with_criu(job: Job) -> None:
    """Cut, go on, die, put back, restore: the process goes on in its files as if nothing had been."""
    program = criu.find().program
    work = job.root.parent / "criu"
    work.mkdir()
    argv = [sys.executable, PROGRAMS / "criu_round.py", ROOT, program, LIBRARY, work, job.job_dir]
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", *argv],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"needs namespaces and CRIU: {done.stderr}"
    facts = json.loads(done.stdout)
    assert (facts["dump"], facts["restore"]) == (0, 0)
    assert facts["before_put_back"] > facts["at_cut"] == facts["after_put_back"]
    assert facts["steps_in_order"] and facts["at_end"] > facts["at_cut"]
    assert facts["integrity"] == "ok" and facts["rows"] == facts["last_row"] + 1
    assert facts["rows"] > facts["at_cut"]
    assert facts["said"] == []
