# SPDX-License-Identifier: Apache-2.0
"""devproxy.checkpoint.files without the library: what it reads, decides and refuses."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from devproxy import procfs, runtime
from devproxy.checkpoint.files.copying import copy_to, new_file
from devproxy.checkpoint.files.mounts import Mounts
from devproxy.checkpoint.files.put_back import TEMPORARY
from devproxy.checkpoint.files.records import YOUNG_NS, FileEntry, unchanged
from devproxy.checkpoint.files.tracker import FilesTracker
from devproxy.errors import DevproxyError, Refused

MOUNTINFO = rb"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:40 / /home rw - nfs4 server:/home rw
31 30 0:41 / /home/local\040disk rw - ext4 /dev/sdb rw
32 22 0:42 / /mnt/s rw - fuse.sshfs x rw
33 22 0:43 / /mnt/over rw - ext4 x rw
34 33 0:44 / /mnt/over rw - lustre x rw
"""


@pytest.mark.parametrize(
    ("path", "shared"),
    [
        ("/etc/x", False),
        ("/home/u/x", True),
        ("/homework/x", False),
        ("/home/local disk/a/b", False),
        ("/mnt/s/x", True),
        ("/mnt/over/x", True),
    ],
)
def test_shared_file_systems(path: str, shared: bool) -> None:
    assert Mounts(procfs.parse_mountinfo(MOUNTINFO)).shared(path) is shared


def acl(*, owner: int = 6, group: int = 4, named: int = 6) -> bytes:
    """For the owner, for the group, and for user 1234, whose rights are the mask."""
    nobody = 0xFFFFFFFF
    entries = (
        (1, owner, nobody),
        (2, named, 1234),
        (4, group, nobody),
        (16, 6, nobody),
        (32, 0, nobody),
    )
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"


@pytest.mark.parametrize("replaced", [True, False])
def test_extended_attributes_and_acls_come_back(
    tmp_path: Path, make: Callable[[], FilesTracker], replaced: bool
) -> None:
    """Also of a second image, which takes the content from the first."""
    wanted = {ACCESS: acl(owner=4), "user.note": b"of the job\xff"}
    file = tmp_path / "file"
    file.write_text("content")
    for name, value in reversed(wanted.items()):
        os.setxattr(file, name, value)
    tracker = make()
    tracker.mention(str(file), "C")
    time.sleep(0.1)  # old enough to be taken from the image before
    entries = tracker.snapshot(str(tmp_path / "one"), shared_fs=lambda _: False)
    for entry in entries:
        entry.refs = ["a ref"] if entry.kind == "present" else []
    entries = tracker.snapshot(str(tmp_path / "two"), previous=entries, shared_fs=lambda _: False)
    entries = [FileEntry.from_dict(json.loads(json.dumps(e.to_dict()))) for e in entries]
    if replaced:
        file.unlink()
    for name in wanted if not replaced else ():
        os.removexattr(file, name)
        file.chmod(0o600)
    make().put_back(entries, lambda e, fd: os.write(fd, b"content"), print, image_time=time.time())
    assert file.read_text() == "content"
    assert {name: os.getxattr(file, name) for name in os.listxattr(file)} == wanted


def as_imaged(path: Path, make: Callable[[], FilesTracker], staging: Path) -> list[FileEntry]:
    """The entries of an image of that file, by way of a manifest."""
    tracker = make()
    tracker.mention(str(path), "C")
    entries = tracker.snapshot(str(staging), shared_fs=lambda _: False)
    return [FileEntry.from_dict(json.loads(json.dumps(e.to_dict()))) for e in entries]


@pytest.mark.parametrize("how", ["in place", "appended", "replaced"])
def test_attributes_and_acls_of_after_the_image_go(
    tmp_path: Path, make: Callable[[], FilesTracker], how: str
) -> None:
    """Also those that a new file gets from its folder's default ACL."""
    file = tmp_path / "folder" / "file"
    file.parent.mkdir()
    file.write_text("content")
    file.chmod(0o660)
    entries = as_imaged(file, make, tmp_path / "one")
    os.setxattr(file.parent, DEFAULT, acl())
    os.setxattr(file, "user.later", b"1")
    if os.geteuid() == 0:
        os.setxattr(file, "trusted.others", b"1")
    os.setxattr(file, ACCESS, acl())
    if how == "appended":
        file.write_text("content and more")
        make().note_state(ended=True)
    elif how == "replaced":
        file.unlink()
    said: list[str] = []
    make().put_back(
        entries, lambda e, fd: os.write(fd, b"content"), said.append, image_time=time.time()
    )
    assert file.read_text() == "content"
    others = ["trusted.others"] if os.geteuid() == 0 and how != "replaced" else []
    assert os.listxattr(file) == others
    assert file.stat().st_mode & 0o777 == 0o660
    assert said == []


def test_an_image_that_does_not_say_takes_no_attribute(
    tmp_path: Path, make: Callable[[], FilesTracker]
) -> None:
    file = tmp_path / "file"
    file.write_text("content")
    entries = as_imaged(file, make, tmp_path / "one")
    older = [e.to_dict() for e in entries]
    for data in older:
        data.pop("xattrs", None)
    os.setxattr(file, "user.later", b"1")
    make().put_back(
        [FileEntry.from_dict(data) for data in older],
        lambda e, fd: os.write(fd, b"content"),
        print,
        image_time=time.time(),
    )
    assert os.listxattr(file) == ["user.later"]


def test_an_acl_that_cannot_come_back_gives_the_group_nothing(
    tmp_path: Path, make: Callable[[], FilesTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group's bits of the mode were the ACL's mask."""
    file = tmp_path / "file"
    file.write_text("content")
    os.setxattr(file, ACCESS, acl())
    entries = as_imaged(file, make, tmp_path / "one")
    file.unlink()

    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "setxattr", refuse)
    said: list[str] = []
    make().put_back(entries, lambda e, fd: os.write(fd, b"content"), said.append, image_time=0)
    assert file.stat().st_mode & 0o777 == 0o640
    assert len(said) == 1 and f"{ACCESS}: Operation not supported" in said[0]


OTHER = 4242 if os.geteuid() == 0 else os.geteuid()


def looks(folder: Path) -> tuple[object, ...]:
    info = folder.stat()
    attributes = {name: os.getxattr(folder, name) for name in os.listxattr(folder)}
    return info.st_mode, info.st_uid, info.st_gid, attributes


@pytest.mark.parametrize("what", ["gone", "a file", "changed", "as it was"])
def test_folders_come_back_as_they_were(
    tmp_path: Path, make: Callable[[], FilesTracker], what: str
) -> None:
    """In a folder whose default ACL they get otherwise. A second run finds nothing to do."""
    top = tmp_path / "top"
    plain, dressed, below = top / "plain", top / "dressed", top / "plain" / "below"
    for folder in (top, plain, dressed, below):
        folder.mkdir()
    (plain / "file").write_text("content")
    for name, value in {DEFAULT: acl(), ACCESS: acl(named=7), "user.note": b"1"}.items():
        os.setxattr(dressed, name, value)
    for folder, mode in ((dressed, 0o2770), (below, 0o500)):
        os.chown(folder, OTHER, OTHER)
        folder.chmod(mode)
    os.setxattr(top, DEFAULT, acl())
    tracker = make()
    for path in (plain, dressed, below, plain / "file"):
        tracker.mention(str(path), "C")
    entries = tracker.snapshot(str(tmp_path / "staging"), shared_fs=lambda _: False)
    entries = [FileEntry.from_dict(json.loads(json.dumps(e.to_dict()))) for e in entries]
    before = {folder: looks(folder) for folder in (plain, dressed, below)}
    times = [folder.stat().st_mtime_ns for folder in before]
    if what in ("gone", "a file"):
        shutil.rmtree(plain)
        dressed.rmdir()
    if what == "a file":
        dressed.write_text("a file")
    elif what == "changed":
        for folder in (plain, dressed, below):
            os.chown(folder, os.geteuid(), os.getegid())
            folder.chmod(0o700)
            os.setxattr(folder, "user.later", b"1")
            os.setxattr(folder, DEFAULT, acl(named=0))
    tracker.note_state(ended=True)
    for again in (False, True):
        said: list[str] = []
        done = make().put_back(
            entries, lambda e, fd: os.write(fd, b"content"), said.append, image_time=time.time()
        )
        assert {folder: looks(folder) for folder in before} == before
        assert again or [folder.stat().st_mtime_ns for folder in before] == times
        assert os.listdir(plain) in (["file", "below"], ["below", "file"])
        assert os.listxattr(plain / "file") == []
        assert said == [] and done.kept == []
    assert done.restored == []


def test_a_folder_of_an_older_image_keeps_its_attributes(
    tmp_path: Path, make: Callable[[], FilesTracker]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o750)
    os.setxattr(folder, "user.later", b"1")
    entry = FileEntry(str(folder), "directory", "C", mode=0o700, uid=os.geteuid(), gid=os.getegid())
    make().put_back([entry], lambda e, fd: None, print, image_time=time.time())
    assert os.listxattr(folder) == ["user.later"]
    assert folder.stat().st_mode & 0o777 == 0o700


HOLDER = """
import fcntl, os, signal, sys, time
fd = os.open(sys.argv[1], int(sys.argv[2]))
os.lseek(fd, 3, os.SEEK_SET)
signal.signal(signal.SIGIO, lambda *_: print("broken", flush=True))
for left in range(499, -1, -1):  # EAGAIN while anybody uses the file: one who forks holds it for a moment, too
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        break
    except BlockingIOError:
        if not left:
            raise
        time.sleep(0.01)
print("holds", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
print(os.lseek(fd, 0, os.SEEK_CUR), flush=True)
"""


@pytest.mark.parametrize("mode", [os.O_RDWR, os.O_WRONLY])
def test_a_file_that_a_frozen_process_holds_a_lease_on(
    tmp_path: Path, make: Callable[[], FilesTracker], mode: int
) -> None:
    """Its copy waits for nobody, and the holder notices nothing: no signal, no other position."""
    held = tmp_path / "held"
    held.write_text("content")
    tracker = make()
    tracker.mention(str(held))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(held), str(mode)], stdout=-1, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holds\n"
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED)
        began = time.monotonic()
        if mode == os.O_RDWR:
            entries = tracker.snapshot(str(tmp_path / "staging"), shared_fs=lambda _: False)
            (entry,) = (e for e in entries if e.path == str(held))
            assert Path(entry.staged).read_text() == "content"
        else:
            with pytest.raises(DevproxyError, match=f"process {holder.pid} holds a lease"):
                tracker.snapshot(str(tmp_path / "staging"), shared_fs=lambda _: False)
        assert time.monotonic() - began < 5
        holder.send_signal(signal.SIGCONT)
        assert holder.communicate(timeout=10)[0] == "3\n"
    finally:
        holder.kill()
        holder.communicate()


def test_this_machine_has_mounts() -> None:
    assert Mounts().type_of("/proc/self") == "proc"


@pytest.fixture
def make(tmp_path: Path) -> Callable[[], FilesTracker]:
    (tmp_path / "job").mkdir()
    return lambda: FilesTracker(str(tmp_path / "job"), str(tmp_path / "state"), job_id="j")


def journal(tmp_path: Path, text: str) -> None:
    with open(tmp_path / "job" / runtime.JOURNAL, "a") as file:
        file.write(text)


def test_journal_lines(tmp_path: Path, make: Callable[[], FilesTracker]) -> None:
    journal(
        tmp_path, "C 0 0 /a b\nW 1 2 /new\\x0aline\nnonsense\nW 1\nM 1 2 /m\nR 1 2 /only\nC 0 0 /ha"
    )
    tracker = make()
    assert tracker.changed() == ["/a b", "/m", "/new\nline"]
    journal(tmp_path, "lf\n")
    assert tracker.changed() == ["/a b", "/half", "/m", "/new\nline"]


def test_made_and_gone_is_forgotten_but_not_at_once(
    tmp_path: Path, make: Callable[[], FilesTracker]
) -> None:
    journal(tmp_path, f"C 0 0 {tmp_path}/x\nW 1 2 {tmp_path}/y\n")
    tracker = make()
    tracker.note_state()
    assert f"{tmp_path}/x" in tracker.changed()
    tracker.note_state()
    assert tracker.changed() == [f"{tmp_path}/y"]


def test_state_survives_the_supervisor(tmp_path: Path, make: Callable[[], FilesTracker]) -> None:
    (tmp_path / "x").write_text("1")
    journal(tmp_path, f"C 0 0 {tmp_path}/x\n")
    make().note_state()
    os.unlink(tmp_path / "job" / runtime.JOURNAL)  # a reboot
    assert make().changed() == [f"{tmp_path}/x"]


def test_state_of_another_version_is_refused(
    tmp_path: Path, make: Callable[[], FilesTracker]
) -> None:
    make().note_state()
    path = tmp_path / "state" / "jobs" / "j.files.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99}))
    with pytest.raises(Refused, match="version 99"):
        make()


def test_entry_goes_through_the_manifest() -> None:
    entry = FileEntry(
        "/\udcff", "present", "C", 1, 2, 3, 0o644, mapped=True, staged="/s", refs=["r"]
    )
    back = FileEntry.from_dict(json.loads(json.dumps(entry.to_dict())) | {"later": 1})
    entry.staged = ""
    assert back == entry


def test_a_young_file_is_copied_again() -> None:
    old = FileEntry(
        "/a", "present", "C", 1, 2, 3, mtime_ns=10**12, ctime_ns=10**12, taken_ns=10**12 + 10**6
    )
    assert not unchanged(old, old)
    old.taken_ns += YOUNG_NS
    assert unchanged(old, old)
    old.mapped = True
    assert not unchanged(old, old)


def test_copies_keep_holes(tmp_path: Path) -> None:
    with open(tmp_path / "a", "wb") as file:
        file.seek(64 << 20)
        file.write(b"end")
    folder = os.open(tmp_path, os.O_PATH)
    fd = new_file("b", folder)
    copy_to(str(tmp_path / "a"), fd)
    os.close(fd)
    os.close(folder)
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
    assert (tmp_path / "b").stat().st_blocks * 512 < 1 << 20


def test_content_of_another_size_is_refused(
    tmp_path: Path, make: Callable[[], FilesTracker]
) -> None:
    path = tmp_path / "x"
    path.write_text("12")
    entry = FileEntry(str(path), "present", "C", size=1, mode=0o600)
    with pytest.raises(DevproxyError, match="is 3 bytes, it should be 1"):
        make().put_back([entry], lambda e, fd: os.write(fd, b"abc"), print, image_time=0)
    assert path.read_text() == "12"
    assert os.listdir(tmp_path).count("x") == 1
    assert not [n for n in os.listdir(tmp_path) if n.startswith(TEMPORARY)]


def test_without_any_state_what_is_there_is_kept(
    tmp_path: Path, make: Callable[[], FilesTracker]
) -> None:
    """Another host, or the state folder is lost: nobody knows whose it is."""
    path = tmp_path / "x"
    path.write_text("12")
    entry = FileEntry(str(path), "present", "C", size=3, mode=0o600)
    said: list[str] = []
    done = make().put_back([entry], lambda e, fd: os.write(fd, b"abc"), said.append, image_time=0)
    assert path.read_text() == "abc"
    assert [Path(p).read_text() for p in done.kept] == ["12"]
    assert len(said) == 1


def test_first_change_after_the_image_without_a_copy_is_said(
    tmp_path: Path, make: Callable[[], FilesTracker]
) -> None:
    (tmp_path / "x").write_text("1")
    journal(tmp_path, f"W 1 2 {tmp_path}/x\n")
    said: list[str] = []
    done = make().put_back(
        [FileEntry("", "mark", "?")], lambda e, fd: None, said.append, image_time=0
    )
    assert done.not_rolled_back == [f"{tmp_path}/x"]
    assert len(said) == 1 and "stays as it is" in said[0]
