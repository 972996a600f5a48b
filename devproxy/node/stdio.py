# SPDX-License-Identifier: Apache-2.0
"""The job's standard streams: FIFOs in the job folder, copied to and from devproxy-run's own.

    job ---> stdout.fifo ---> relay thread ---> our fd 1           (stderr.fifo the same; one FIFO where 1 and 2 are one file)
    job <--> pty inside the tree <--> devproxy-init <--> tty.out, tty.in ---> our terminal

The job never holds a descriptor of ours, so a restored job can be given other ones. CRIU stores what is in a FIFO only
for a process that reads it, which is us: so while the job is frozen we read what is there, and how much we have
delivered, and what we had read but not delivered, goes into the manifest. So every byte appears exactly once after a
restore.

A freeze interrupts a write() that waits for room, which then returns short if part of it is in the FIFO already
(pipe_write in the kernel's fs/pipe.c); Python's unbuffered streams lose the rest (TextIOWrapper over FileIO). So from the
start of the freeze on the relays read into memory, whether our side takes anything or not, so that hardly anybody has to
wait for room; and a write that was cut short all the same goes on after it (hostlib/write.c), which knows of the freeze
from the file `freeze`.

Threads: one per output stream, which owns its FIFO, its leftover and its counter while it runs; while it is paused they
belong to whoever paused it. One more for terminal input.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import stat
import threading
import time

from devproxy.node.transcript import Transcript

# Late imports: devproxy-run loads this at every start; few jobs have a terminal, and most are never dumped.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PIECE_BYTES = 1 << 16
FIFO_BYTES = 1 << 20  # what /proc/sys/fs/pipe-max-size lets everybody have
# While a tree is being frozen, which takes some ms: what a program can write in that time.
FREEZE_FIFO_BYTES = 64 << 20
COLLECT_BYTES = 32 << 20
DIGEST_BYTES = 4096
INPUT_LOOK_MS = 200  # how soon a terminal that is ours again is noticed
NO_WRITER_MS = 50  # a FIFO without a writer would be "ready" all the time; a restored tree's first byte waits this long


def _end_of_output(fd: int) -> int:
    """Where the next byte goes. An offset says so only where nothing is appended: it is 0 until the first write."""
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND:
        return os.fstat(fd).st_size
    return os.lseek(fd, 0, os.SEEK_CUR)


def digest_before(fd: int, end: int) -> str:
    """Of the last bytes before that place: tells a file that took a job's output from one that was begun anew; "" where we
    may not read it."""
    import hashlib

    size = min(end, DIGEST_BYTES)
    try:
        ours = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        data = os.pread(ours, size, end - size)
    finally:
        os.close(ours)
    return hashlib.blake2b(data, digest_size=16).hexdigest() if len(data) == size else ""


class Output:
    """One stream out of the job. `delivered` counts the bytes that reached our side, over all restores."""

    def __init__(
        self,
        name: str,
        path: str,
        fd: int,
        delivered: int = 0,
        leftover: bytes = b"",
        transcript: Transcript | None = None,
    ) -> None:
        self._transcript = transcript
        self.name = name
        self.path = path
        self.delivered = delivered
        self.leftover = bytearray(leftover)
        self.fd = fd
        self._out, self._out_is_ours = _never_blocks(fd)
        self._fifo = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._resize(FIFO_BYTES)
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._lock = threading.Condition()
        self._want_pause = False
        self._collecting = False
        self._paused = False
        self._ending = False
        self._thread: threading.Thread | None = None
        self._reader_gone = False

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"relay-{self.name}", daemon=True)
        self._thread.start()

    def make_room(self) -> None:
        """Whoever waits for room in the FIFO gets it, and from now on we read ahead of what our side takes."""
        self._resize(FREEZE_FIFO_BYTES)
        with self._lock:
            self._collecting = True
        self._wake()

    def pause(self) -> None:
        """Returns when the thread reads nothing any more."""
        with self._lock:
            self._want_pause = True
        self._wake()
        with self._lock:
            while not self._paused and self._alive():
                self._lock.wait(0.1)

    def go_on(self) -> None:
        self._resize(FIFO_BYTES)
        with self._lock:
            self._want_pause = False
            self._collecting = False
            self._lock.notify_all()
        self._wake()

    def finish(self, timeout_s: float | None) -> None:
        """The job has ended: copies what is left. None: however long our side takes, or until a signal asks us to end.

        Precondition: main thread; the ending signals are blocked.
        """
        with self._lock:
            self._ending = True
            self._want_pause = False
            self._lock.notify_all()
        self._wake()
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while self._thread and self._thread.is_alive():
            self._thread.join(0.05)
            if signal.sigpending() & _ENDING or (end is not None and time.monotonic() > end):
                return

    def absorb(self) -> None:
        """Takes what is in the FIFO to what is not delivered yet. Precondition: paused, and no writer runs."""
        while piece := self._read():
            self.leftover += piece
        self._resize(FIFO_BYTES)

    def drop(self) -> None:
        """What is in the FIFO was never said. Precondition: paused, and no writer runs."""
        while self._read():
            pass

    def _resize(self, size: int) -> None:
        try:
            fcntl.fcntl(self._fifo, fcntl.F_SETPIPE_SZ, size)
        except OSError:
            pass  # more than this user may have, or less than is in it: it keeps its size

    def _alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            pass

    def _run(self) -> None:
        hung_up = False
        while True:
            with self._lock:
                while self._want_pause and not self._ending:
                    self._paused = True
                    self._lock.notify_all()
                    self._lock.wait()
                self._paused = False
                room = COLLECT_BYTES if self._collecting else 1
                ending = self._ending
            piece = self._read() if len(self.leftover) < room else None
            if piece:
                self.leftover += piece
            elif ending and not self.leftover:
                return
            elif piece is not None:
                hung_up = True
            if self.leftover and self._deliver():
                continue
            if not piece:
                self._wait(room, hung_up)
            hung_up = False

    def _read(self) -> bytes | None:
        """None: nothing there just now. Empty: no writer."""
        try:
            return os.read(self._fifo, PIECE_BYTES)
        except BlockingIOError:
            return None

    def _wait(self, room: int, hung_up: bool) -> None:
        """Until there is something to read and room for it, or our side takes something, or somebody woke us."""
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        if len(self.leftover) < room and not hung_up:
            poll.register(self._fifo, select.POLLIN)
        if self.leftover:
            poll.register(self._out, select.POLLOUT)
        if any(fd == self._wake_read for fd, _ in poll.poll(NO_WRITER_MS if hung_up else None)):
            try:
                os.read(self._wake_read, 4096)
            except BlockingIOError:
                pass

    def _deliver(self) -> bool:
        """Gives our side what it takes at once. False: nothing."""
        if self._reader_gone:
            self.delivered += len(self.leftover)
            self.leftover.clear()
            return True
        most = PIECE_BYTES
        if not self._out_is_ours:
            # This one may block: never more than fits where poll says that something does.
            poll = select.poll()
            poll.register(self._out, select.POLLOUT)
            if not poll.poll(0):
                return False
            most = PIECE_BYTES if _is_file(self._out) else select.PIPE_BUF
        try:
            with memoryview(self.leftover) as view, view[:most] as piece:
                n = os.write(self._out, piece)
        except BlockingIOError:
            return False
        except OSError as error:
            self._reader_is_gone(error)
            return True
        self.delivered += n
        if self._transcript is not None:
            self._transcript.write(bytes(self.leftover[:n]))
        del self.leftover[:n]
        return True

    def _reader_is_gone(self, error: OSError) -> None:
        """A reader that left (`| head`): the job finds out as it would without us. A terminal that went away (a closed
        ssh connection, EIO) does not end a job that was told to survive that, so its output is dropped."""
        self._reader_gone = True
        if error.errno == errno.EPIPE:
            os.close(self._fifo)
            # Nobody reads this one either, and polls on it stay valid.
            self._fifo = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


_ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


def _never_blocks(fd: int) -> tuple[int, bool]:
    """The same pipe or terminal as an open file of our own that does not block, or fd itself and False.

    The flag belongs to the open file, which fd shares with the shell that started us.
    """
    kind, _ = _kind(fd)
    if kind in ("pipe", "tty"):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            return os.open(f"/proc/self/fd/{fd}", flags), True
        except OSError:
            pass  # no permission, or a FIFO whose reader has left
    return fd, False


def _is_file(fd: int) -> bool:
    return stat.S_ISREG(os.fstat(fd).st_mode)


class Terminal:
    """Our terminal and the job's pty: raw mode, input, window size. Only where one of our streams is a terminal."""

    def __init__(self, job_dir: str, fd: int, takes_input: bool) -> None:
        self._dir = job_dir
        self._fd = fd
        self._takes_input = takes_input
        self._saved: list[Any] | None = None
        self._ended = threading.Event()
        self._open_gate = threading.Event()  # closed while an image is taken
        self._open_gate.set()
        self._resting = (
            False  # there is no job just now (suspended): the terminal is as a shell left it
        )
        self.note_size()
        self._input = os.open(os.path.join(job_dir, "tty.in"), os.O_RDWR | os.O_CLOEXEC)

    def start(self) -> None:
        self.take()
        if self._takes_input:
            threading.Thread(target=self._copy_input, name="relay-input", daemon=True).start()

    def note_size(self) -> None:
        size = os.get_terminal_size(self._fd)
        path = os.path.join(self._dir, "tty.winsize")
        with open(path + ".new", "w", encoding="ascii") as file:
            file.write(f"{size.lines} {size.columns}\n")
        os.rename(path + ".new", path)

    def _in_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            return False

    def take(self) -> None:
        """Raw mode: the job's own terminal cooks the input. Only while we are in the foreground."""
        import termios
        import tty

        if not self._takes_input or self._resting or self._saved is not None:
            return
        if self._in_foreground():
            self._saved = termios.tcgetattr(self._fd)
            tty.setraw(self._fd, termios.TCSADRAIN)

    def give_back(self) -> None:
        import termios

        if self._saved is not None:
            try:
                termios.tcsetattr(self._fd, termios.TCSADRAIN, self._saved)
            except termios.error:
                pass  # it is gone
            self._saved = None

    def pause(self) -> None:
        self._open_gate.clear()

    def go_on(self) -> None:
        self._open_gate.set()

    def discard(self) -> None:
        """What was typed and not taken is in the image. Precondition: paused, and the tree is gone.

        Until wake_up() the terminal is its own: Ctrl-C means us.
        """
        self._resting = True
        self.give_back()
        os.set_blocking(self._input, False)
        try:
            while os.read(self._input, 4096):
                pass
        except BlockingIOError:
            pass
        os.set_blocking(self._input, True)

    def wake_up(self) -> None:
        """There is a job again."""
        self._resting = False
        self.note_size()
        self.take()

    def finish(self) -> None:
        self._ended.set()
        self._open_gate.set()
        self.give_back()

    def _copy_input(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        while not self._ended.is_set():
            if not poll.poll(INPUT_LOOK_MS) or self._ended.is_set():
                continue
            if self._resting or not self._in_foreground():
                self._ended.wait(INPUT_LOOK_MS / 1000)
                continue
            try:
                typed = os.read(self._fd, 4096)
            except OSError:
                return  # the terminal is gone
            if not typed:
                return
            self.take()
            self._open_gate.wait()
            os.write(self._input, typed)


def _kind(fd: int) -> tuple[str, os.stat_result | None]:
    """closed, tty, null, file, pipe or other."""
    try:
        info = os.fstat(fd)
    except OSError:
        return "closed", None
    if os.isatty(fd):
        return "tty", info
    if stat.S_ISREG(info.st_mode):
        return "file", info
    if stat.S_ISFIFO(info.st_mode):
        return "pipe", info
    if stat.S_ISCHR(info.st_mode) and info.st_rdev == os.makedev(1, 3):
        return "null", info
    return "other", info


def _pack(data: bytes | bytearray) -> str:
    import binascii
    import zlib

    return binascii.b2a_base64(zlib.compress(data, 1), newline=False).decode()


def _unpack(text: str) -> bytes:
    import binascii
    import zlib

    return zlib.decompress(binascii.a2b_base64(text))


class Stdio:
    """All three streams of one job, and how devproxy-init is told of them. log: of a copy of its output; "": none."""

    def __init__(self, job_dir: str, fds: tuple[int, int, int] = (0, 1, 2), log: str = "") -> None:
        self.job_dir = job_dir
        self._log = log
        self._transcript: Transcript | None = None
        self._goes_on_at: dict[str, int] | None = None  # of the transcript, after a restore
        self.outputs: list[Output] = []
        self.terminal: Terminal | None = None
        self.modes = ["null", "null", "null"]
        self.stdin_pipe: int | None = None  # inode of the pipe that the job reads, where it is one
        self._fds = fds

    def open(self, earlier: dict[str, Any] | None = None) -> None:
        """Makes the FIFOs and opens our ends; nothing is copied yet.

        earlier: what describe() said at the cut that a restore goes back to; then its modes are the job's.
        """
        kinds = [_kind(fd) for fd in self._fds]
        if self._log:
            self._transcript = Transcript(self._log, fresh=not earlier)
            self._goes_on_at = earlier.get("transcript") if earlier else None
        if earlier:
            self.modes = list(earlier["modes"])
        else:
            self.modes = [self._input_mode(*kinds[0]), *self._output_modes(kinds)]
        if kinds[0][0] == "pipe" and kinds[0][1] and self.modes[0] == "fd":
            self.stdin_pipe = kinds[0][1].st_ino
        states = {s["name"]: s for s in earlier["outputs"]} if earlier else {}
        names = sorted({m.removeprefix("fifo:") for m in self.modes if m.startswith("fifo:")})
        for name in names:
            number = 1 if self.modes[1] == f"fifo:{name}" else 2
            self._output(name, self._fds[number], states)
        if "tty" in self.modes:
            self._open_terminal(kinds, states)
        if earlier:
            self._number_freeze()  # the one that this job comes out of
        os.mkfifo(os.path.join(self.job_dir, "init.events"), 0o600)

    def _output(self, name: str, fd: int, states: dict[str, Any]) -> None:
        path = os.path.join(self.job_dir, name)
        os.mkfifo(path, 0o600)
        state = states.get(name)
        delivered, left = (state["delivered"], _unpack(state["left_zlib"])) if state else (0, b"")
        copy = self._transcript
        if copy is not None and copy.is_file(fd):
            copy = None
        self.outputs.append(Output(name, path, fd, delivered, left, copy))

    def _open_terminal(self, kinds: list[Any], states: dict[str, Any]) -> None:
        out = next((self._fds[i] for i in (1, 2) if self.modes[i] == "tty"), self._fds[1])
        self._output("tty.out", out, states)
        os.mkfifo(os.path.join(self.job_dir, "tty.in"), 0o600)
        ours = next((self._fds[i] for i in (0, 1, 2) if kinds[i][0] == "tty"), None)
        if ours is not None:
            self.terminal = Terminal(self.job_dir, ours, kinds[0][0] == "tty")
        elif not os.path.exists(os.path.join(self.job_dir, "tty.winsize")):
            with open(os.path.join(self.job_dir, "tty.winsize"), "w", encoding="ascii") as file:
                file.write("24 80\n")

    def _input_mode(self, kind: str, info: os.stat_result | None) -> str:
        if kind in ("closed", "null"):
            return "null"
        if kind == "tty":
            return "tty"
        fd = self._fds[0]
        if kind == "file":
            flags = fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND)
            name = os.readlink(f"/proc/self/fd/{fd}")
            if os.path.exists(name):
                return f"path:{os.lseek(fd, 0, os.SEEK_CUR)}:{flags}:{name}"
        # The job reads our own pipe: a copy would swallow what it does not want to read.
        return "fd"

    def _output_modes(self, kinds: list[Any]) -> list[str]:
        modes = []
        for number in (1, 2):
            kind, info = kinds[number]
            if kind == "tty":
                modes.append("tty")
            elif kind in ("closed", "null"):
                modes.append("null")
            elif number == 2 and modes[0] == "fifo:stdout.fifo" and self._same(info, kinds[1][1]):
                modes.append("fifo:stdout.fifo")
            else:
                modes.append(f"fifo:{'stdout' if number == 1 else 'stderr'}.fifo")
        return modes

    @staticmethod
    def _same(a: os.stat_result | None, b: os.stat_result | None) -> bool:
        return a is not None and b is not None and (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)

    def start(self) -> None:
        if self._transcript and self._goes_on_at:
            self._transcript.cut_back(self._goes_on_at)
        for output in self.outputs:
            output.start()
        if self.terminal:
            self.terminal.start()

    def prepare(self) -> None:
        """The cut: no input from here on."""
        if self.terminal:
            self.terminal.pause()

    def _number_freeze(self) -> None:
        fd = os.open(
            os.path.join(self.job_dir, "freeze"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        os.write(fd, os.urandom(8))
        os.close(fd)

    def make_room(self) -> None:
        """Right before the freeze, which shall find nobody in the middle of a write."""
        self._number_freeze()
        for output in self.outputs:
            output.make_room()

    def go_on(self) -> None:
        for output in self.outputs:
            output.go_on()
        if self.terminal:
            self.terminal.go_on()

    def hold(self) -> None:
        """Processes come back that may yet have to go: what they write waits for restored() or drop()."""
        for output in self.outputs:
            output.pause()

    def drop(self) -> None:
        """They had to, and will write it again. Precondition: held, and none of them runs."""
        for output in self.outputs:
            output.drop()
            output.go_on()

    def restored(self) -> None:
        """There is a job again, after discard_input() or from nothing."""
        if self.terminal:
            self.terminal.wake_up()
        self.go_on()

    def discard_input(self) -> None:
        """The job is in an image now, and nowhere else."""
        if self.terminal:
            self.terminal.discard()

    def describe(self) -> dict[str, Any]:
        """For the manifest. Stops all copying. Precondition: the job is frozen."""
        outputs = []
        for output in self.outputs:
            output.pause()
            output.absorb()
            kind, info = _kind(output.fd)
            entry: dict[str, Any] = {
                "name": output.name,
                "delivered": output.delivered,
                "left_zlib": _pack(output.leftover),
                "kind": kind,
            }
            if kind == "file" and info:
                end = _end_of_output(output.fd)
                path = os.readlink(f"/proc/self/fd/{output.fd}")
                entry["file"] = {"path": path, "bytes": end}
                if before := digest_before(output.fd, end):
                    entry["file"]["before"] = before
            outputs.append(entry)
        facts = {"modes": self.modes, "outputs": outputs, "stdin_pipe": self.stdin_pipe}
        if self._transcript:
            facts["transcript"] = self._transcript.place()
        return facts

    def finish(self, timeout_s: float | None = None) -> None:
        """The job has ended. See Output.finish."""
        for output in self.outputs:
            output.finish(timeout_s)
        if self.terminal:
            self.terminal.finish()
