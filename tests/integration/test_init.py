# SPDX-License-Identifier: Apache-2.0
"""devproxy-init and the CRIU driver, together and for real: what a restored tree must still have."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from devproxy.checkpoint import criu
from tests.integration.needs import require_criu, require_namespaces

PR_SET_CHILD_SUBREAPER = 36


class Tree:
    """A job below devproxy-init, as its supervisor sees it: job folders, FIFO ends, the root's process id."""

    def __init__(self, init: Path, base: Path) -> None:
        self.init, self.base = init, base
        self.at = base / ".job"
        self.at.mkdir()
        self.root = 0
        self.fifos: dict[str, int] = {}
        self.text = b""
        self.folder = self.new_folder("first")

    def new_folder(self, name: str, *fifos: str) -> Path:
        """A job folder with its FIFOs, our ends open: before a restore, or a first write would be a SIGPIPE."""
        self.close()
        self.folder = self.base / name
        self.folder.mkdir()
        for fifo in ("stdout.fifo", "init.events", "tty.out", "tty.in", "link", *fifos):
            os.mkfifo(self.folder / fifo)
            flags = os.O_RDWR if fifo == "tty.in" else os.O_RDONLY
            self.fifos[fifo] = os.open(self.folder / fifo, flags | os.O_NONBLOCK)
        return self.folder

    def close(self) -> None:
        for fd in self.fifos.values():
            os.close(fd)
        self.fifos = {}

    def start(
        self, program: str, *argv: str, options: tuple[str, ...] = (), stdin: int | None = None
    ) -> None:
        report, end = os.pipe()
        command = [
            str(self.init),
            "--job-dir",
            str(self.folder),
            "--mount-at",
            str(self.at),
            "--report-fd",
            str(end),
        ]
        if "--tty" not in options:
            command += ["--stdout", "fifo:stdout.fifo", "--stderr", "fifo:stdout.fifo"]
        command += [*options, "--", program, *argv]
        done = subprocess.run(
            command,
            pass_fds=[end],
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            timeout=20,
        )
        os.close(end)
        with os.fdopen(report) as file:
            self.report = file.read()
        assert done.returncode == (0 if self.report.startswith("pid ") else 2), self.report
        if done.returncode == 0:
            self.root = int(self.report.split()[1])
            status = Path(f"/proc/{self.root}/status").read_text()
            assert f"PPid:\t{os.getpid()}\n" in status

    def python(self, code: str, **keywords: object) -> None:
        self.start(sys.executable, sys.executable, "-u", "-c", textwrap.dedent(code), **keywords)  # type: ignore[arg-type]
        assert self.root, self.report

    def read(self, fifo: str = "stdout.fifo") -> bytes:
        pieces = b""
        while True:
            try:
                piece = os.read(self.fifos[fifo], 1 << 16)
            except BlockingIOError:
                return pieces
            if not piece:
                return pieces
            pieces += piece

    def until(
        self, condition: Callable[[bytes], object], fifo: str = "stdout.fifo", limit_s: float = 15
    ) -> bytes:
        """Reads on until the text since the last call fulfils the condition."""
        end = time.monotonic() + limit_s
        text = b""
        while not condition(text):
            assert time.monotonic() < end, f"waited {limit_s} s; read {text!r}"
            text += self.read(fifo)
            time.sleep(0.005)
        return text

    def images(self) -> str:
        folder = self.base / "images"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return str(folder)

    def dump(
        self, driver: criu.Criu, on_frozen: Callable[[], None], leave: bool = False
    ) -> criu.DumpFacts:
        return driver.dump(
            self.root, self.images(), mount_at=str(self.at), on_frozen=on_frozen, leave_running=leave,
            work_log=str(self.base / "dump.log"),
        )  # fmt: skip

    def restore(self, driver: criu.Criu, inherit: dict[str, int] | None = None) -> None:
        self.root = driver.restore(
            str(self.base / "images"), job_dir=str(self.folder), mount_at=str(self.at), inherit_fds=inherit,
            log=str(self.base / "restore.log"),
        )  # fmt: skip
        assert f"PPid:\t{os.getpid()}\n" in Path(f"/proc/{self.root}/status").read_text()

    def end(self, limit_s: float = 15) -> int:
        """Waits for the root; its exit code as a shell tells it."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            pid, status = os.waitpid(self.root, os.WNOHANG)
            if pid:
                self.root = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        pytest.fail(f"pid 1 did not end in {limit_s} s")

    def kill(self) -> None:
        if self.root:
            os.kill(self.root, signal.SIGKILL)
            os.waitpid(self.root, 0)
            self.root = 0

    def status(self) -> str:
        return (self.folder / "init.status").read_text().strip()


@pytest.fixture
def tree(lib_dir: Path) -> Iterator[Tree]:
    require_namespaces()
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    base = Path(tempfile.mkdtemp(prefix="devproxy-init-", dir="/dev/shm"))
    made = Tree(lib_dir / "devproxy-init", base)
    try:
        yield made
    finally:
        made.kill()
        made.close()
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        shutil.rmtree(base)


# -- Without CRIU ------------------------------------------------------------------------------------------------------


def test_exit_code_streams_and_proc(tree: Tree) -> None:
    tree.python("""
        import os, sys
        print(os.getpid(), os.readlink("/proc/self"), sorted(map(int, os.listdir("/proc/self/fd"))))
        os.write(2, b"to stderr\\n")
        print(os.getcwd(), open("/dev/stdin").read() == "")
        sys.exit(41)
    """)
    assert tree.end() == 41
    lines = tree.read().decode().splitlines()
    assert lines[0] == "2 2 [0, 1, 2, 3]"  # 3 is the folder that is being listed
    assert lines[1:] == ["to stderr", f"{os.getcwd()} True"]
    assert tree.status() == "exit 41 stragglers 0"


def test_the_command_ends_by_a_signal(tree: Tree) -> None:
    tree.python("import os, time; print('up'); time.sleep(60)")
    tree.until(lambda text: b"up" in text)
    os.kill(tree.root, signal.SIGTERM)
    assert tree.end() == 143
    assert tree.status() == "exit 143 stragglers 0"


def test_orphans_are_reaped_and_stragglers_ended(tree: Tree) -> None:
    tree.start(
        "/bin/sh",
        "sh",
        "-c",
        "(true & sleep 0.1; true & exec true) & sleep 0.5; (trap '' TERM; sleep 77; sleep 77) & sleep 78 & echo done",
    )
    tree.until(lambda text: b"done" in text)
    started = time.monotonic()
    assert tree.end() == 0
    # 1 s to end by themselves, 3 s for the one that ignores SIGTERM
    assert 3.9 < time.monotonic() - started < 60  # and not their 77
    assert re.fullmatch(r"exit 0 stragglers [34]", tree.status())


@pytest.mark.parametrize(
    ("content", "mode", "answer"),
    [
        (b"#!/no/such\n", 0o755, "exec ENOENT"),
        (b"\x7fELFbroken", 0o755, ""),
        (b"x", 0o644, "exec EACCES"),
    ],
)
def test_a_command_that_cannot_be_executed(
    tree: Tree, content: bytes, mode: int, answer: str
) -> None:
    program = tree.base / "program"
    program.write_bytes(content)
    program.chmod(mode)
    tree.start(str(program), "program")
    if answer:
        assert tree.report.startswith(f"error: {answer}: {program}")
    else:  # handed to a shell, as a shell does
        assert tree.end() in (2, 126, 127)


def test_a_script_without_interpreter_line(tree: Tree) -> None:
    program = tree.base / "script"
    program.write_text('echo "$0 $1"; exit 5\n')
    program.chmod(0o755)
    tree.start(str(program), "script", "argument")
    assert tree.end() == 5
    assert tree.read().decode() == f"{program} argument\n"


def test_a_mount_that_fails_is_named(tree: Tree) -> None:
    tree.at.rmdir()
    tree.start("/bin/true", "true")
    assert tree.report.startswith("error: mount ")
    assert str(tree.at) in tree.report
    tree.at.mkdir()


def test_stdin_from_a_place_in_a_file(tree: Tree) -> None:
    path = tree.base / "input"
    path.write_text("0123456789")
    tree.python("import sys; print(sys.stdin.read())", options=("--stdin", f"path:4:0:{path}"))
    assert tree.end() == 0
    assert tree.read() == b"456789\n"


def test_ctrl_z_and_going_on(tree: Tree) -> None:
    (tree.folder / "tty.winsize").write_text("31 99\n")
    tree.python(
        "import time\nfor i in range(10**6): print(i); time.sleep(0.02)",
        options=("--tty", "--stdin", "tty", "--stdout", "tty", "--stderr", "tty"),
    )
    tree.until(lambda text: b"3\r\n" in text, "tty.out")
    os.write(tree.fifos["tty.in"], b"\x1a")
    assert tree.until(lambda text: b"\n" in text, "init.events") in (
        b"stopped 19\n",
        b"stopped 20\n",
    )
    tree.read("tty.out")
    time.sleep(0.1)
    assert tree.read("tty.out") == b""
    os.kill(tree.root, signal.SIGCONT)
    tree.until(lambda text: b"\r\n" in text, "tty.out")
    os.write(tree.fifos["tty.in"], b"\x03")
    assert tree.end() in (1, 130)


def test_the_window_follows(tree: Tree) -> None:
    (tree.folder / "tty.winsize").write_text("31 99\n")
    tree.python(
        """
        import os, signal, time
        signal.signal(signal.SIGWINCH, lambda *_: print("changed", tuple(os.get_terminal_size(1))))
        print("size", tuple(os.get_terminal_size(1)), os.isatty(0), os.ttyname(0), os.path.exists("/dev/tty"))
        while True: time.sleep(0.1)
        """,
        options=("--tty", "--stdin", "tty", "--stdout", "tty", "--stderr", "tty"),
    )
    text = tree.until(lambda text: b"\n" in text, "tty.out")
    assert text == b"size (99, 31) True /dev/pts/0 True\r\n"
    (tree.folder / "tty.winsize").write_text("40 120\n")
    os.kill(tree.root, signal.SIGWINCH)
    assert b"changed (120, 40)" in tree.until(lambda text: b"\n" in text, "tty.out")


def test_everything_written_to_the_terminal_arrives(tree: Tree) -> None:
    tree.python(
        "import sys; sys.stdout.write('x' * 200000 + 'end')",
        options=("--tty", "--stdout", "tty", "--stderr", "tty"),
    )
    text = tree.until(lambda text: text.endswith(b"end"), "tty.out")
    assert text == b"x" * 200000 + b"end"
    assert tree.end() == 0


def test_pid_one_does_not_spin(tree: Tree) -> None:
    tree.python(
        "import time; time.sleep(60)", options=("--tty", "--stdout", "tty", "--stderr", "tty")
    )
    time.sleep(0.3)

    def ticks() -> int:
        return sum(
            map(int, Path(f"/proc/{tree.root}/stat").read_text().rpartition(")")[2].split()[11:13])
        )

    before = ticks()
    time.sleep(1)
    assert ticks() - before <= 1


# -- With CRIU ---------------------------------------------------------------------------------------------------------

JOB = """
    import mmap, os, psutil, signal, subprocess, sys, threading, time
    folder = os.environ["JOB_DIR"]
    shared = mmap.mmap(os.open(folder + "/shared", os.O_RDWR), 4096)
    private = open(folder + "/deleted", "w+"); private.write("kept"); private.flush(); os.unlink(folder + "/deleted")
    link = os.open(folder + "/link", os.O_WRONLY)
    child = subprocess.Popen(["sleep", "1000"])
    ticks = [0, 0]
    def tick(k):
        while True:
            ticks[k] += 1
            shared[8 + k] = ticks[k] % 251
            time.sleep(0.001)
    threads = [threading.Thread(target=tick, args=(k,), daemon=True) for k in range(2)]
    for thread in threads: thread.start()
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    def end():
        me = psutil.Process()
        private.seek(0)
        print("self", os.getpid(), os.readlink("/proc/self"), me.pid, [c.pid for c in me.children()], child.pid,
              child.poll(), len(threading.enumerate()), private.read(), bytes(shared[:4]), os.write(link, b"over the link"))
        child.kill()
        sys.exit(23)
    n = 0
    while not ending.is_set():
        print("line", n)
        n += 1
        time.sleep(0.002)
    end()
"""


def start_job(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_DIR", str(tree.at))
    (tree.folder / "shared").write_bytes(b"home" + bytes(4092))
    tree.python(JOB)


def check_lines(text: bytes) -> None:
    """Every line exactly once, in order."""
    numbers = [int(n) for n in re.findall(rb"^line (\d+)$", text, re.MULTILINE)]
    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("how", ["dump ends the tree", "killed after the dump"])
def test_a_tree_comes_back_under_another_folder(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    driver = require_criu()
    start_job(tree, monkeypatch)
    before = tree.until(lambda text: text.count(b"\n") > 50)
    time.sleep(0.1)  # our relay is paused: this stays in the FIFO
    held: list[bytes] = []
    shared: list[bytes] = []
    leave = how == "killed after the dump"

    def on_frozen() -> None:
        with (
            open(tree.folder / "shared", "rb") as file,
            mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ) as view,
        ):
            first = bytes(view)
            time.sleep(0.05)
            assert bytes(view) == first, "a thread ran while on_frozen did"
        shared.append(first)
        held.append(tree.read())

    facts = tree.dump(driver, on_frozen, leave)
    assert held[0].count(b"\n") >= 20
    assert 0.05 < facts.frozen_s < facts.dump_s < 10
    if leave:
        # What goes on after the image was taken is not part of the restored history.
        tree.until(lambda text: text.count(b"\n") > 10)
        tree.kill()
    else:
        assert tree.end() == -signal.SIGKILL
    assert not (tree.folder / "init.status").exists()

    second = tree.new_folder("second")
    (second / "shared").write_bytes(b"away" + shared[0][4:])
    tree.restore(driver)
    after = tree.until(lambda text: text.count(b"\n") > 50)
    with (
        open(second / "shared", "rb") as file,
        mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ) as view,
    ):
        first = view[8:10]
        time.sleep(0.1)
        assert view[8] != first[0]
        assert view[9] != first[1]
    os.kill(tree.root, signal.SIGTERM)
    assert tree.end() == 23, tree.read()[-2000:]
    after += tree.read()
    check_lines(before + held[0] + after)
    line = after.decode().splitlines()[-1]
    assert line == "self 2 2 2 [5] 5 None 3 kept b'away' 13" or re.fullmatch(
        r"self 2 2 2 \[(\d+)\] \1 None 3 kept b'away' 13", line
    )
    assert tree.read("link") == b"over the link"
    assert tree.status() == "exit 23 stragglers 0"


def test_a_refused_dump_lets_the_tree_go_on(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = require_criu()
    start_job(tree, monkeypatch)
    before = tree.until(lambda text: text.count(b"\n") > 10)

    def on_frozen() -> None:
        raise ZeroDivisionError("store full")

    with pytest.raises(ZeroDivisionError, match="store full"):
        tree.dump(driver, on_frozen)
    before += tree.until(lambda text: text.count(b"\n") > 10)
    # And the next one works.
    tree.dump(driver, lambda: None, leave=True)
    before += tree.until(lambda text: text.count(b"\n") > 10)
    check_lines(before[: before.rindex(b"\n") + 1])


def test_what_criu_cannot_do_is_its_first_error_line(tree: Tree) -> None:
    driver = require_criu()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tree.base / "outside.sock"))
    listener.listen()
    tree.python(f"""
        import socket, time
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect({str(tree.base / "outside.sock")!r})
        print("up")
        time.sleep(60)
    """)
    tree.until(lambda text: b"up" in text)
    ours = listener.accept()[0]
    with listener, ours, pytest.raises(criu.CriuError) as caught:
        tree.dump(driver, lambda: None)
    assert caught.value.stage == "dump"
    assert "xternal" in caught.value.line
    assert "goes on" in str(caught.value)
    os.kill(tree.root, 0)
    shutil.rmtree(tree.base / "images")
    (tree.base / "images").mkdir()
    with pytest.raises(criu.CriuError, match="nothing of it runs"):
        driver.restore(str(tree.base / "images"), job_dir=str(tree.folder), mount_at=str(tree.at))


def test_a_terminal_comes_back(tree: Tree) -> None:
    driver = require_criu()
    (tree.folder / "tty.winsize").write_text("31 99\n")
    tree.python(
        """
        import os, sys, termios, time
        n = 0
        while True:
            line = sys.stdin.readline()
            print(n, line.strip(), [os.isatty(k) for k in range(3)], tuple(os.get_terminal_size(1)), os.tcgetpgrp(0) == os.getpgrp())
            n += 1
            while not os.path.exists(GATE):
                time.sleep(0.01)
        """.replace("GATE", repr(str(tree.base / "gate"))),
        options=("--tty", "--stdin", "tty", "--stdout", "tty", "--stderr", "tty"),
    )
    os.write(tree.fifos["tty.in"], b"one\n")
    text = tree.until(lambda text: b"True\r\n" in text, "tty.out")
    assert text == b"one\r\n0 one [True, True, True] (99, 31) True\r\n"
    # Typed ahead: in the pty when the image is taken. (A line without its end would be lost: CRIU cannot read that.)
    os.write(tree.fifos["tty.in"], b"two\n")
    tree.until(lambda text: text == b"two\r\n", "tty.out")
    tree.dump(driver, lambda: None)
    assert tree.end() == -signal.SIGKILL
    tree.new_folder("second")
    (tree.folder / "tty.winsize").write_text("31 99\n")
    tree.restore(driver)
    (tree.base / "gate").touch()  # before this, the program has not read what was typed ahead
    text = tree.until(lambda text: b"True\r\n" in text, "tty.out")
    assert text.count(b"1 two [True, True, True] (99, 31) True\r\n") == 1
    (tree.folder / "tty.winsize").write_text("25 80\n")
    os.kill(tree.root, signal.SIGWINCH)
    time.sleep(0.1)
    os.write(tree.fifos["tty.in"], b"resized\n")
    assert b"(80, 25)" in tree.until(lambda text: b"True\r\n" in text, "tty.out")
    os.write(tree.fifos["tty.in"], b"\x1a")  # job control is still there
    assert b"stopped" in tree.until(lambda text: b"\n" in text, "init.events")
    os.kill(tree.root, signal.SIGCONT)
    os.write(tree.fifos["tty.in"], b"\x03")
    assert tree.end() in (1, 130)


def test_stdin_pipe_is_replaced(tree: Tree) -> None:
    driver = require_criu()
    code = "import sys\nfor line in sys.stdin: print('got', line.strip())\nprint('end of input')"
    read_end, write_end = os.pipe()
    inode = os.fstat(read_end).st_ino
    tree.python(code, options=("--stdin", "fd"), stdin=read_end)
    os.write(write_end, b"one\n")
    tree.until(lambda text: text == b"got one\n")
    tree.dump(driver, lambda: None)
    assert tree.end() == -signal.SIGKILL
    os.close(read_end)
    os.close(write_end)
    tree.new_folder("second")
    read_end, write_end = os.pipe()
    # As the supervisor does it: its own descriptor 0, and with its signals blocked.
    saved = os.dup(0)
    os.dup2(read_end, 0)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    try:
        tree.restore(driver, {f"pipe:[{inode}]": 0})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.dup2(saved, 0)
        os.close(saved)
    os.close(read_end)
    os.write(write_end, b"two\n")
    tree.until(lambda text: text == b"got two\n")
    os.close(write_end)
    assert tree.end() == 0
    assert tree.read() == b"end of input\n"
