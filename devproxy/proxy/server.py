# SPDX-License-Identifier: Apache-2.0
"""One device-proxy server process, of one GPU of the machine: its command line, its pipes, its end."""

from __future__ import annotations

import fcntl
import os
import signal

from devproxy import config
from devproxy.errors import Refused

# Where the server finds what it inherits. The third is the job folder's lock: held as long as the server lives.
LEASE_FD, READY_FD, LOCK_FD, BEGIN_FD = 3, 4, 5, 6


class ServerProcess:
    """A server process that was started. gpus: those of the job's that it serves. status is None while it runs, then as
    os.waitstatus_to_exitcode gives it.

    A plain class: importing dataclasses costs devproxy-run 10 ms.
    """

    def __init__(
        self, gpus: list[int], pid: int, ready_fd: int, log_path: str, begin_fd: int = -1
    ) -> None:
        self.gpus = gpus
        self.pid = pid
        self.ready_fd = ready_fd
        self.begin_fd = begin_fd
        self.left_bytes = 0  # of one that waits: device memory that other jobs leave
        self.log_path = log_path
        self.status: int | None = None

    @property
    def name(self) -> str:
        return f"the server of GPU {', '.join(map(str, self.gpus))}"

    def last_words(self) -> str:
        """The last line that it wrote to its log, or nothing."""
        try:
            with open(self.log_path, "rb") as log:
                lines = log.read()[-8192:].decode(errors="replace").split("\n")
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def how_it_ended(self) -> str:
        if self.status is None:
            return "is running"
        if self.status < 0:
            return f"was ended by signal {-self.status} ({signal_name(-self.status)})"
        return f"ended with exit code {self.status}"


class Server:
    """The server of one of the job's GPUs: a process of its own, or its part of one."""

    def __init__(self, gpu: int, process: ServerProcess) -> None:
        self.gpu = gpu
        self.process = process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def status(self) -> int | None:
        return self.process.status


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def environment(lib_dir: str, record: str = "") -> dict[str, str]:
    """Ours, without what belongs to a job around us: a server never sits on the shim itself. record: config.record_path."""
    env = {k: v for k, v in os.environ.items() if k not in config.OF_THE_JOB}
    for variable in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
        parts = [p for p in env.pop(variable, "").replace(" ", ":").split(":") if p]
        kept = [p for p in parts if p != lib_dir and os.path.dirname(p) != lib_dir]
        if kept:
            env[variable] = ":".join(kept)
    # It would tune operators behind the job, which is told that nothing does (devproxy_torch/libraries.py): a kernel chosen
    # by its time may compute other bits in the next server.
    for variable in [name for name in env if name.startswith("PYTORCH_TUNABLEOP_")]:
        del env[variable]
    env.pop(config.RECORD, None)
    if record:
        env[config.RECORD] = record
    # The kernels' OpenMP threads share the cores with the job. Left alone they spin for milliseconds at each barrier,
    # which a busy machine pays for tenfold.
    if "OMP_WAIT_POLICY" not in env:
        env.setdefault("GOMP_SPINCOUNT", "3000")
    return env


def inherited_descriptors() -> list[int]:
    """What our caller left open for us behind stderr: not for a server, which would keep a pipe from ending."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            if fd > 2 and os.get_inheritable(fd):
                found.append(fd)
        except OSError:
            pass  # the descriptor of this very listing
    return found


def start(
    program: str,
    arguments: list[str],
    gpus: list[int],
    lease_fd: int,
    lock_fd: int,
    log_path: str,
    record: str = "",
    waits: bool = False,
) -> ServerProcess:
    """Starts the server of these GPUs of the job in a session of its own, so that the terminal's signals do not reach it.

    Raises Refused when the program cannot be executed.
    """
    ready_read, ready_write = os.pipe()
    begin_read, begin_write = os.pipe() if waits else (-1, -1)
    log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    null_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    # Moved out of the way first, so that no dup2 overwrites the source of a later one.
    sources = [
        fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16)
        for fd in (
            null_fd,
            log_fd,
            lease_fd,
            ready_write,
            lock_fd,
            *([begin_read] if waits else []),
        )
    ]
    null, log, lease, ready, lock, *begin = sources
    targets = [(null, 0), (log, 1), (log, 2), (lease, LEASE_FD), (ready, READY_FD), (lock, LOCK_FD)]
    targets += [(fd, BEGIN_FD) for fd in begin]
    command = [
        program,
        *arguments,
        *(word for gpu in gpus for word in ("--gpu", str(gpu))),
        "--lease-fd",
        str(LEASE_FD),
        "--ready-fd",
        str(READY_FD),
        *(("--begin-fd", str(BEGIN_FD)) if waits else ()),
    ]
    try:
        pid = os.posix_spawn(
            program,
            command,
            environment(os.path.dirname(program), record),
            file_actions=[
                *((os.POSIX_SPAWN_CLOSE, fd) for fd in inherited_descriptors()),
                *((os.POSIX_SPAWN_DUP2, source, target) for source, target in targets),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=[
                signal.SIGPIPE,
                signal.SIGXFSZ,
                signal.SIGINT,
                signal.SIGTERM,
                signal.SIGHUP,
            ],
        )
    except OSError as error:
        os.close(ready_read)
        if waits:
            os.close(begin_write)
        raise Refused(
            f"{program} cannot be started: {error.strerror}", "build devproxy: make build"
        ) from None
    finally:
        for fd in (*sources, ready_write, log_fd, null_fd, *([begin_read] if waits else [])):
            os.close(fd)
    return ServerProcess(gpus, pid, ready_read, log_path, begin_write)
