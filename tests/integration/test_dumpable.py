# SPDX-License-Identifier: Apache-2.0
"""What check_tree refuses makes CRIU fail, and what it lets pass can be dumped: each case asks both."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from devproxy import proctree
from devproxy.checkpoint import netdiag
from devproxy.checkpoint.dumpable.check import check_tree
from devproxy.checkpoint.dumpable.verdict import Verdict

ROOT = Path(__file__).resolve().parents[2]
CRIU = ROOT / "build" / "criu" / "sbin" / "criu"

# The first process: a session of its own, descriptors opened inside of the namespace, reaps.
INIT = """
import os, signal, sys
log, script = sys.argv[1:]
os.setsid()
out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
os.dup2(os.open("/dev/null", os.O_RDONLY), 0), os.dup2(out, 1), os.dup2(out, 2)
os.closerange(3, 256)
if not os.fork():
    os.setsid()
    os.execv(sys.executable, [sys.executable, "-u", "-c", script])
while True:
    try:
        os.wait()
    except ChildProcessError:
        signal.pause()
"""
HEAD = "import ctypes, mmap, os, socket, struct, time\nlibc = ctypes.CDLL(None)\n"
TAIL = "\nprint('READY')\ntime.sleep(1000)\n"
ZOMBIE_LEADER = """
import threading

def rest():
    while ') Z' not in open(f'/proc/{os.getpid()}/stat').read():
        time.sleep(0.001)
    print('READY')
    time.sleep(1000)

threading.Thread(target=rest).start()
libc.syscall(60, 0)
"""

REFUSED = {
    "io_uring": ("b = ctypes.create_string_buffer(120)\nlibc.syscall(425, 4, b)", "io_uring"),
    "userfaultfd": ("libc.syscall(323, 0)", "userfaultfd"),
    "secret": ("r = libc.syscall(447, 0)\nos.ftruncate(r, 4096)\nm = mmap.mmap(r, 4096)", "secret"),
    "unix outside": ("s = socket.socket(1)\ns.connect('outside')", "outside of the job"),
    "mptcp": ("s = socket.socket(2, 1, 262)", "MPTCP"),
    "tcp not accepted": (
        "l = socket.create_server(('127.0.0.1', 0))\ns = socket.create_connection(l.getsockname())",
        "not accepted",
    ),
    "fuse": ("f = os.open('/dev/fuse', os.O_RDWR)", "/dev/fuse"),
    "nested pid": (
        "libc.unshare(0x20000000)\nif not os.fork(): time.sleep(1000)",
        "pid namespace",
    ),
    "system v": (
        "libc.shmat.restype = ctypes.c_void_p\ni = libc.shmget(0, 4096, 0o1600)\nlibc.shmat(i, None, 0)\nlibc.shmctl(i, 0, None)",
        "System V",
    ),
    "ghost": (
        "f = open('ghost', 'wb')\nf.write(bytes(2 << 20))\nf.flush()\nos.unlink('ghost')",
        "deleted",
    ),
    "queue": (
        "libc.mq_open(b'/devproxy-test', 0o102, 0o600, None)\nlibc.mq_unlink(b'/devproxy-test')",
        "deleted|queue",
    ),
    "zombie leader": (ZOMBIE_LEADER, "first thread"),
    "packets": ("p = os.pipe2(os.O_DIRECT)", "a pipe of packets"),
}
PASSED = {
    "nothing": "",
    "pairs": "a, b = socket.socketpair()\nb.send(b'x')\nc, d = socket.socketpair()\nd.close()",
    "inside tcp": "l = socket.create_server(('127.0.0.1', 0))\ns = socket.create_connection(l.getsockname())\na, _ = l.accept()",
    "kinds of fd": "import select\ne = select.epoll()\nlibc.eventfd(0, 0)\nlibc.timerfd_create(1, 0)\nlibc.inotify_init()\np = os.pidfd_open(os.getpid())\nm = os.memfd_create('m')",
    "devices": "import pty\nf = [open('/dev/' + n, 'rb') for n in ('null', 'zero', 'full', 'random', 'urandom')]\na = pty.openpty()",
    "pipe and fifo": "r, w = os.pipe()\nos.mkfifo('fifo')\nf = os.open('fifo', os.O_RDWR)",
    "nested mounts": "libc.unshare(0x20000)",
    "deleted": "f = open('small', 'w')\nf.write('x')\nf.flush()\nos.unlink('small')",
    "locks": "import fcntl\nf = open('lock', 'w')\nfcntl.flock(f, 2)",
    "zombie": "if not os.fork(): os._exit(0)\ntime.sleep(0.1)",
}


SET = "i = libc.semget(0, 2, 0o1600)\n"
QUEUE = "q = libc.msgget(0, 0o1600)\n"

# CRIU dumps them, and a restore would lose something without a word, or fail.
LOST = {
    "aio in another root": (
        "c = ctypes.c_ulong()\nlibc.syscall(206, 8, ctypes.byref(c))\nos.mkdir('root')\nif not os.fork():\n    os.chroot('root')\n    time.sleep(1000)\ntime.sleep(0.1)",
        "an AIO context, in a root without /dev/null",
    ),
    "unread datagrams": (
        "s = socket.socket(2, 2)\ns.bind(('127.0.0.1', 0))\nt = socket.socket(2, 2)\nt.sendto(b'abc', s.getsockname())",
        "unread bytes.*lose",
    ),
    "unread events": (
        "i = libc.inotify_init()\nos.mkdir('seen')\nlibc.inotify_add_watch(i, b'seen', 0x100)\nopen('seen/x', 'w').close()",
        "inotify with 32 bytes of unread events",
    ),
    "eventfd": ("e = os.eventfd(7, os.EFD_SEMAPHORE)", "an eventfd semaphore"),
    "large eventfd": (
        "e = os.eventfd(0)\nos.eventfd_write(e, 5 << 32)",
        "an eventfd with the value 21474836480",
    ),
    "pid namespace to be": ("libc.unshare(0x20000000)", "made a pid namespace"),
    "semaphores": (
        SET + "libc.semctl(i, 1, 16, 5)",
        "2 System V semaphore",
    ),
    "semaphores of a dead worker": (
        SET + "if not os.fork(): libc.semctl(i, 1, 16, 5), os._exit(0)\nos.wait()",
        r"the job, semaphore set \d+: 2 System V semaphore.*has ended.*ipcrm -s \d+",
    ),
    "semaphores that nobody has used": (
        SET,
        r"the job, semaphore set \d+: .*used by nobody yet",
    ),
    "message queue": (
        QUEUE + "libc.msgsnd(q, struct.pack('l3s', 1, b'abc'), 3, 0)",
        r"process 2 \(.*\), message queue \d+: a System V message queue with 1 message",
    ),
    "message queue of a dead worker": (
        QUEUE
        + "if not os.fork(): libc.msgsnd(q, struct.pack('l3s', 1, b'abc'), 3, 0), os._exit(0)\nos.wait()",
        r"the job, message queue \d+: .*has ended.*ipcrm -q \d+",
    ),
    "message queue of a dead reader": (
        QUEUE + "b = ctypes.create_string_buffer(64)\nfor read in (False, True):\n"
        "    if not os.fork(): (libc.msgrcv if read else libc.msgsnd)(q, b'1234567\\0', 0, 0, *[0] * read), os._exit(0)\n"
        "    os.wait()",
        r"the job, message queue \d+: a System V message queue with 0 message.*has ended",
    ),
    "message queue that nobody has used": (
        QUEUE,
        r"the job, message queue \d+: .*used by nobody yet",
    ),
}


class Subject:
    """A small tree in namespaces of its own."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder = folder
        log = folder / "log"
        log.write_text("")
        self.unshare = subprocess.Popen(
            ["unshare", "-pmf", "--mount-proc", sys.executable, "-c", INIT, str(log), HEAD + script],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        end = time.monotonic() + 20
        while "READY" not in log.read_text():
            assert self.unshare.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.01)
        pid = self.unshare.pid
        self.root = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def dump(self) -> str:
        """The first error of CRIU's, or nothing. The tree goes on."""
        images = self.folder / "images"
        images.mkdir()
        assert CRIU.exists(), f"{CRIU} is not built: scripts/install_criu.sh"
        done = subprocess.run(
            [CRIU, "dump", "-t", str(self.root), "-D", images, "-o", "log", "--external", "mnt[]", "--tcp-established",
             "--network-lock", "skip", "--file-locks", "--link-remap", "--leave-running"],
            capture_output=True,
        )  # fmt: skip
        if not done.returncode:
            return ""
        return next(line for line in (images / "log").read_text().splitlines() if "Error" in line)

    def end(self) -> None:
        os.kill(self.root, 9)
        self.unshare.wait(10)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    subjects: list[Subject] = []

    def make(script: str) -> Subject:
        subjects.append(Subject(tmp_path, script))
        return subjects[-1]

    yield make
    for subject in subjects:
        subject.end()


@pytest.fixture
def own_ipc() -> Iterator[None]:
    """An IPC namespace for the test and its subjects: jobs of other tests see nothing of it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/ipc") as before:
        assert libc.unshare(0x08000000) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert libc.setns(before.fileno(), 0x08000000) == 0


def check(subject: Subject, **more: object) -> Verdict:
    # The dump of these tests runs with CRIU's own ghost limit.
    return check_tree(subject.root, "/no/job", settle_s=0, ghost_limit_bytes=1 << 20, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_cannot_be_dumped(name: str, start, tmp_path: Path) -> None:
    import re

    script, named = REFUSED[name]
    with socket.socket(socket.AF_UNIX) as outside:
        here = os.open(tmp_path, os.O_PATH)
        outside.bind(f"/proc/self/fd/{here}/outside")
        os.close(here)
        outside.listen()
        keep: list[object] = []
        threading.Thread(
            target=lambda: name == "unix outside" and keep.append(outside.accept()), daemon=True
        ).start()
        subject = start(script if script is ZOMBIE_LEADER else script + TAIL)
        time.sleep(0.05)
        verdict = check(subject)
        assert verdict.refusals
        assert re.search(named, verdict.refusals[0].text), verdict.refusals[0].text
        assert "\n" not in verdict.refusals[0].text
        assert subject.dump(), "CRIU can dump it: the rule is too strict"


@pytest.mark.parametrize("name", LOST)
def test_what_a_restore_would_lose_is_refused(name: str, own_ipc: None, start) -> None:
    import re

    script, named = LOST[name]
    subject = start(script + TAIL)
    (refusal,) = check(subject).refusals
    assert re.search(named, refusal.text), refusal.text
    assert subject.dump() == "", "CRIU refuses it by itself"


def test_numbers_of_dead_users_of_semaphores(own_ipc: None, start) -> None:
    """A process that another user of a set has left its number to is no user of it."""
    libc = ctypes.CDLL(None)
    many = 60
    number = libc.semget(0, many, 0o1600)
    assert number >= 0
    try:
        # Other processes of the machine may take the number that the subject shall get.
        for _ in range(50):
            dead = []
            for one in range(many):
                child = os.fork()
                if child == 0:
                    os._exit(libc.semctl(number, one, 16, 1) != 0)
                assert os.waitpid(child, 0)[1] == 0
                dead.append(child)
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(dead[0] - 1))
            subject = start(TAIL)
            if subject.root in dead:
                break
        users = {libc.semctl(number, one, 11, 0) for one in range(many)}
        assert subject.root in users, (subject.root, users)
        assert [o.text for o in check(subject).refusals] == []
    finally:
        libc.semctl(number, 0, 0)


@pytest.mark.parametrize("when", ["before the job", "used by another", "by another who has ended"])
def test_sets_and_queues_of_others(own_ipc: None, start, when: str) -> None:
    """Of the same user too."""
    libc = ctypes.CDLL(None)
    number, queue = libc.semget(0, 2, 0o1600), libc.msgget(0, 0o1600)

    def use() -> None:
        libc.semctl(number, 1, 16, 5)
        libc.msgsnd(queue, b"1234567\0", 0, 0)

    try:
        if when == "before the job":
            time.sleep(2.5)  # more than the kernel's second and the slack of the check
        subject = start(TAIL)
        if when == "used by another":
            use()
        elif when == "by another who has ended":
            child = os.fork()
            if child == 0:
                use()
                os._exit(0)
            os.waitpid(child, 0)
        assert [o.text for o in check(subject).refusals] == []
    finally:
        libc.semctl(number, 0, 0)
        libc.msgctl(queue, 0, 0)


@pytest.mark.parametrize("name", PASSED)
def test_passed_can_be_dumped(name: str, start) -> None:
    subject = start(PASSED[name] + TAIL)
    assert [o.text for o in check(subject).refusals] == []
    assert subject.dump() == ""


def test_outside_tcp_is_named_and_strict_refuses(start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        subject = start(f"s = socket.create_connection(('127.0.0.1', {port})){TAIL}")
        verdict = check(subject)
        assert not verdict.refusals
        assert verdict.tcp == "close"
        assert [c.remote for c in verdict.outside_tcp] == [f"127.0.0.1:{port}"]
        assert f"127.0.0.1:{port}" in verdict.warnings[0].text
        assert "fd " in verdict.warnings[0].text
        assert check(subject, strict=True).refusals


def test_attach_under_way_is_waited_for(start, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "gpu0.sock"))
        server.listen()
        subject = start("s = socket.socket(1)\ns.connect('gpu0.sock')" + TAIL)
        connection, _ = server.accept()
        begin = time.monotonic()
        verdict = check_tree(subject.root, str(tmp_path), settle_s=0.3)
        assert verdict.refusals[0].transient
        assert time.monotonic() - begin >= 0.3
        connection.close()  # the other end is gone: nothing is lost
        assert not check_tree(subject.root, str(tmp_path), settle_s=0.3).refusals


FORKED = {
    "socket": "a, b = socket.socketpair()\nif not os.fork(): a.close(); time.sleep(1000)\nb.close()",
    "pipe": "r, w = os.pipe()\nif not os.fork(): os.close(r); time.sleep(1000)\nos.close(w)",
}


@pytest.mark.parametrize("kind", FORKED)
def test_a_process_forked_during_the_look_is_no_outsider(start, monkeypatch, kind: str) -> None:
    """As a DataLoader's worker: its parent holds one end, and the child the other."""
    subject = start(FORKED[kind] + TAIL)
    time.sleep(0.05)
    parent, child = proctree.descendants(subject.root)
    looks: list[list[int]] = []

    def late(pid: int) -> list[int]:
        looks.append([parent, child] if looks else [parent])
        return looks[-1]

    monkeypatch.setattr(proctree, "descendants", late)
    assert not check_tree(subject.root, "/no/job", settle_s=5).refusals
    monkeypatch.setattr(proctree, "descendants", lambda pid: [parent])
    refusals = check_tree(subject.root, "/no/job", settle_s=5).refusals
    if kind == "pipe":
        # Who holds it shows by its PID namespace that it is of the job.
        assert not refusals and len(looks) == 1
        return
    assert len(looks) >= 3  # before the first look, behind it, before the second
    (refusal,) = refusals
    assert f"process {child} (python" in refusal.text and "outside of the job" in refusal.text


def test_traced_process_names_the_tracer(start) -> None:
    subject = start("if not os.fork(): time.sleep(1000)" + TAIL)
    child = int(Path(f"/proc/{subject.root}/task/{subject.root}/children").read_text().split()[0])
    tracer = subprocess.Popen(
        ["strace", "-o", "/dev/null", "-p", str(child)], stderr=subprocess.DEVNULL
    )
    try:
        end = time.monotonic() + 5
        while not (found := check(subject).refusals) and time.monotonic() < end:
            time.sleep(0.02)
        assert "strace" in found[0].text
    finally:
        tracer.terminate()
        tracer.wait()


def test_destroy_tcp_frees_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        local, remote = (f"127.0.0.1:{s.getsockname()[1]}" for s in (near, far))
        near.close()
        far.close()
        assert netdiag.destroy_tcp(local, remote)
        assert not netdiag.destroy_tcp(local, remote)
