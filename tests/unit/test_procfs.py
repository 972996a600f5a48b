# SPDX-License-Identifier: Apache-2.0
"""devproxy.procfs on recorded texts of the kernel, and on this process."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from pathlib import Path

from devproxy import procfs

# Linux 6.18: a program, anonymous memory, a name with a blank and one with a newline, a deleted file, a memfd, a device.
MAPS = rb"""00400000-00452000 r-xp 00000000 fe:02 173521                             /usr/bin/dbus-daemon
00e03000-00e24000 rw-p 00000000 00:00 0                                  [heap]
7f0000000000-7f0000001000 rw-s 00001000 00:1d 77                         /dev/shm/a b
7f0000001000-7f0000002000 rw-p 00000000 00:00 0
7f0000002000-7f0000003000 r--s 00000000 fe:02 9                          /tmp/new\012line
7f0000003000-7f0000004000 rw-s 00000000 00:01 1025                       /memfd:x (deleted)
7f0000004000-7f0000005000 rw-s 00000000 00:05 4                          /SYSV00000000 (deleted)
7f0000005000-7f0000006000 rw-p 00000000 fe:02 12                         /tmp/not utf-8 \xff
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
""".replace(rb"\xff", b"\xff")

MOUNTINFO = rb"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw,errors=remount-ro
31 22 0:41 /sub /home/local\040disk\134\011 rw - ext4 /dev/a\040b rw
32 22 0:42 / /mnt/s rw,nosuid shared:9 master:2 - fuse.sshfs  rw,with blank
nonsense
"""

STATUS = b"""Name:\tpython3
Umask:\t0022
State:\tS (sleeping)
Tgid:\t6873
Pid:\t6873
PPid:\t6864
TracerPid:\t12
Uid:\t1000\t1001\t1002\t1003
Gid:\t0\t0\t0\t0
Groups:\t
NSpid:\t6873\t7
NSpgid:\t6864\t0
NSsid:\t5415\t1
RssAnon:\t     116 kB
RssFile:\t    1584 kB
RssShmem:\t       4 kB
VmSwap:\t       1 kB
Threads:\t3
CapEff:\t0000000000200001
"""


def test_every_mapping() -> None:
    found = procfs.parse_maps(MAPS)
    assert len(found) == 9
    first = procfs.Mapping(
        0x400000, 0x452000, "r-xp", 0, os.makedev(0xFE, 2), 173521, "/usr/bin/dbus-daemon"
    )
    assert found[0] == first
    assert [one.path for one in found[1:6]] == [
        "[heap]", "/dev/shm/a b", "", "/tmp/new\nline", "/memfd:x (deleted)",
    ]  # fmt: skip
    assert os.fsencode(found[7].path) == b"/tmp/not utf-8 \xff"
    assert (found[2].offset, found[2].inode, found[2].device) == (0x1000, 77, os.makedev(0, 0x1D))
    assert [one.shared_writable for one in found[:5]] == [False, False, True, False, False]
    assert [one.deleted for one in found[4:7]] == [False, True, True]


def test_the_two_spellings_of_a_range() -> None:
    low, high = procfs.parse_maps(MAPS)[0], procfs.parse_maps(MAPS)[-1]
    assert (low.range, low.map_file) == ("00400000-00452000", "400000-452000")
    assert high.range == high.map_file == "ffffffffff600000-ffffffffff601000"


def test_mappings_with_a_mark() -> None:
    marked = procfs.parse_maps(MAPS, b" (deleted)", b"[heap]")
    assert [one.path for one in marked] == [
        "[heap]",
        "/memfd:x (deleted)",
        "/SYSV00000000 (deleted)",
    ]
    assert procfs.parse_maps(MAPS, b"nowhere") == []


def test_a_mapping_of_this_process(tmp_path: Path) -> None:
    assert "" in [one.path for one in procfs.mappings("self")]
    path = tmp_path / "new\nline"
    path.write_bytes(b"x" * 8192)
    info = path.stat()
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 4096, offset=4096) as area:
        (found,) = (m for m in procfs.mappings("self", b"line") if m.inode == info.st_ino)
        assert found.start == ctypes.addressof(ctypes.c_char.from_buffer(area))
        assert found[1:] == (found.start + 4096, "rw-s", 4096, info.st_dev, info.st_ino, str(path))


def test_mounts() -> None:
    found = procfs.parse_mountinfo(MOUNTINFO)
    assert [mount.number for mount in found] == [22, 31, 32]
    assert found[0].tags == ("shared:1",)
    assert (found[1].root, found[1].point, found[1].source) == ("/sub", "/home/local disk\\\t", "/dev/a b")  # fmt: skip
    assert found[1].tags == ()
    assert found[2] == procfs.Mount(
        32, 22, "0:42", "/", "/mnt/s", "rw,nosuid", ("shared:9", "master:2"), "fuse.sshfs", "", "rw,with blank",
    )  # fmt: skip
    here = {mount.point: mount for mount in procfs.mounts("self")}
    assert here["/proc"].kind == "proc"


def test_status() -> None:
    status = procfs.parse_status(STATUS)
    assert status == procfs.Status(
        "python3", "S", 12, (1000, 1001, 1002, 1003), 3, 7, 0, 1, 0x200001, 121 * 1024
    )
    assert [n for n in range(64) if status.has_capability(n)] == [0, 21]


def test_status_of_a_kernel_without_namespaces() -> None:
    """And of a zombie, which has no memory."""
    kept = [line for line in STATUS.splitlines() if not line.startswith((b"NS", b"Rss", b"Vm"))]
    status = procfs.parse_status(b"\n".join(kept))
    assert (status.inner_pid, status.inner_group, status.inner_session) == (6873, 1, 1)
    assert status.anonymous_bytes == 0


def test_status_of_processes_and_threads() -> None:
    me = procfs.status(os.getpid())
    assert me
    assert me.uids[0] == os.getuid()
    assert me.inner_pid == os.getpid()
    assert procfs.status(os.getpid(), os.getpid()) is not None
    pid = os.fork()
    if not pid:
        signal.pause()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    zombie = procfs.status(pid)
    assert zombie
    assert zombie.state == "Z"
    assert procfs.mappings(pid) == []
    os.waitpid(pid, 0)
    assert procfs.status(pid) is None
    assert procfs.mounts(pid) == []
    assert procfs.fdinfo(pid, 0) is None


def test_descriptors(tmp_path: Path) -> None:
    path = tmp_path / "x"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
    try:
        assert (fd, str(path)) in procfs.descriptors("self")
        info = procfs.fdinfo("self", fd)
        assert info
        assert info.access == os.O_WRONLY
        assert info.tty_index is None
    finally:
        os.close(fd)
    assert procfs.fdinfo("self", fd) is None
    master = b"pos:\t0\nflags:\t02100002\nmnt_id:\t26\nino:\t88\ntty-index:\t12\n"
    assert procfs.parse_fdinfo(master) == procfs.FdInfo(0o2100002, 12)


def test_boot_id() -> None:
    assert procfs.boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert len(procfs.boot_id()) == 36
