# SPDX-License-Identifier: Apache-2.0
"""CRIU, driven over its RPC (`criu swrk`): dumps and restores the job's process tree.

What CRIU is told, and why (version 4.2.1, images/rpc.proto and criu/cr-service.c):
- All mounts of the job's namespace but /proc, devpts and the job folder are the host's: `mnt[]` binds them from the
  host again. The job folder's mount has the key `jobdir`, so that a restore may bind another folder there.
- The tree is a session of its own below devproxy-init (no shell_job); it is no cgroup's owner (cgroups are left alone).
- The network is not locked: between dump and restore on one host nobody answers for the job, and locking needs iptables.
  A tree with a network namespace of its own (node/network.py) is held there; to CRIU the namespace is external: it
  goes into no image, and a restore names another.
- post-dump comes while the tasks are still frozen and all images are written (cr_dump_finish: the tasks are let go
  after the notification was answered); answering "no" to it lets the tree go on and the dump fail.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from devproxy import config, procfs, proctree, state
from devproxy.checkpoint import criu_image, overlay
from devproxy.checkpoint.overlay import Overlay
from devproxy.errors import DevproxyError, Refused

OLDEST = (4, 2)
JOB_DIR_KEY = "jobdir"
NETWORK_KEY = "network"
GHOST_LIMIT_BYTES = 1 << 30  # largest deleted file that is open and goes into an image
_LOG_LEVEL = 4  # CRIU's "debug": the steps, without every page
_TIMEOUT_S = 600  # for freezing a tree; CRIU's own 10 s is short for a loaded machine
_REPLY_BYTES = 1 << 16
_LOOK_MS = 200
MOUNT_TRIES = 5  # of a dump or restore, each of which needs all mounts to stay for some ms
_STALL_S = 30.0  # nobody of a restore runs, waits for a disk or logs
_LEAVE_S = 30  # for `criu swrk` to end after its answer
_HARMLESS = ("RLIMIT_NOFILE",)


def overlay_key(number: int) -> str:
    return f"files{number}"


class CriuError(DevproxyError):
    """CRIU could not do it. line: the first real error line of its log."""

    def __init__(self, stage: str, line: str, log: str) -> None:
        self.stage = stage
        self.line = line
        self.log = log
        state = "what runs of it goes on" if stage == "dump" else "nothing of it runs"
        super().__init__(
            f"CRIU cannot {stage} the job's processes: {line}", f"{state}; CRIU's log is {log}"
        )

    def killed(self) -> set[int]:
        """The process that SIGKILL ended while CRIU stopped it (compel_wait_task says its wait status, in hex)."""
        match = re.fullmatch(r"Task (\d+) .*unexpected state: ([0-9a-f]+)", self.line)
        return {int(match[1])} if match and int(match[2], 16) & 0x7F == signal.SIGKILL else set()


@dataclass(frozen=True)
class DumpFacts:
    """frozen_s: how long no task of the tree ran (includes on_frozen). dump_s: the whole call."""

    frozen_s: float
    dump_s: float


@dataclass(frozen=True)
class Criu:
    """One CRIU: the program, the folder that holds the package pycriu, and the version."""

    program: str
    pycriu_dir: str
    version: tuple[int, ...]

    def dump(
        self,
        root_pid: int,
        images_dir: str,
        *,
        mount_at: str,
        on_frozen: Callable[[], None],
        leave_running: bool,
        on_freeze: Callable[[], None] = lambda: None,
        tcp: str = "close",
        network: int = 0,
        work_log: str = "",
        timeout_s: int = _TIMEOUT_S,
        give_up: threading.Event | None = None,
    ) -> DumpFacts:
        """Writes the images of the tree below root_pid (devproxy-init) into images_dir, which must be there and empty.

        mount_at: where the tree sees its job folder. on_freeze is called right before tasks are stopped, on_frozen when
        all images are written and no task runs; what they raise is raised here, after the tree has been let go on. leave_running False: the tree is killed.
        A mount of the tree that goes away while CRIU looks at it (the host removes the folder below it, as container
        runtimes do all the time) fails the dump; then it is tried again, and on_freeze is called again.
        tcp: "established" keeps connections (of the tree with itself), "close" gives the tree closed ones.
        network: inode of the tree's own network namespace; 0: it has ours.
        work_log: CRIU's log, made anew. give_up: set from another thread when the tree shall go on at once.
        Raises CriuError, also where CRIU does not move; then the tree goes on.
        """
        started = time.monotonic()
        log = os.path.abspath(work_log or os.path.join(images_dir, "dump.log"))
        fields = self._common(tcp, log) | {
            "pid": root_pid,
            "leave_running": leave_running,
            "timeout": timeout_s,
            "external": ["mnt[]", f"mnt[{mount_at}]:{JOB_DIR_KEY}"],
        }
        if network:
            fields["external"].append(f"net[{network}]:{NETWORK_KEY}")

        written = False

        def notified(script: str) -> None:
            nonlocal written
            if script == "pre-dump":
                on_freeze()
            elif script == "post-dump":
                written = True
                on_frozen()

        for tries_left in reversed(range(MOUNT_TRIES)):
            mounts = procfs.mounts(root_pid)
            try:
                with _Worker(self, "dump", images_dir, fields, give_up=give_up) as worker:
                    worker.ask(notified)
                break
            except CriuError:
                now = procfs.mounts(root_pid)
                if written or not tries_left or now == mounts or not now:
                    raise
            for name in os.listdir(images_dir):
                os.unlink(os.path.join(images_dir, name))
        return DumpFacts(_frozen_s(os.path.dirname(log)), time.monotonic() - started)

    def restore(
        self,
        images_dir: str,
        *,
        job_dir: str,
        mount_at: str,
        inherit_fds: dict[str, int] | None = None,
        tcp: str = "close",
        log: str = "",
        overlays: Sequence[Overlay] = (),
        on_root: Callable[[int], None] = lambda pid: None,
        on_whole: Callable[[int], None] = lambda pid: None,
    ) -> int:
        """Restores a tree; returns the process id of its root, which is a child of the calling process.

        job_dir: the folder to bind at mount_at, where the tree has always seen its job folder; it must hold every FIFO and every mapped file
        that the tree has open. A FIFO's reader must be there already: a restored task that writes into one without a
        reader gets SIGPIPE. inherit_fds: {"pipe:[inode]": descriptor to use instead}, and under NETWORK_KEY that of the
        network namespace for a tree that had its own. overlays: for the tree alone; the images name them by their number
        (criu_image.add_mounts, overlay_key). on_root is told the root's process id when the rest is not there
        yet, on_whole when all threads are; none of them runs until then.
        Raises CriuError; then nothing of the tree is left.
        """
        os.makedirs(mount_at, mode=0o700, exist_ok=True)
        fds = inherit_fds or {}
        fields = self._common(tcp, log or os.path.join(images_dir, "restore.log")) | {
            # criu.proto: rst_sibling makes the root a child of whoever started `swrk`, not of swrk.
            "rst_sibling": True,
            "root": "/",
            "external": [
                "mnt[]",
                f"mnt[{JOB_DIR_KEY}]:{job_dir}",
                *(f"mnt[{overlay_key(n)}]:{one.at}" for n, one in enumerate(overlays)),
            ],
        }
        made: list[int] = []

        def notified(script: str, pid: int = 0) -> None:
            if pid:
                made[:] = [pid]
                on_root(pid)
            elif script == "pre-resume" and made:
                on_whole(made[0])

        with _Worker(self, "restore", images_dir, fields, fds, overlays=overlays) as worker:
            try:
                answer = worker.ask(notified)
            except BaseException:
                _bury(made)
                raise
            return int(answer.restore.pid)

    def check(self) -> str:
        """What `criu check` complains of, or nothing."""
        try:
            done = subprocess.run(
                [self.program, "check"], capture_output=True, text=True, timeout=30,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        if done.returncode == 0:
            return ""
        return first_error(done.stderr) or f"criu check ended with {done.returncode}"

    def _common(self, tcp: str, log: str) -> dict[str, Any]:
        return {
            "log_level": _LOG_LEVEL,
            "log_file": log,
            "notify_scripts": True,
            "file_locks": True,
            "link_remap": True,
            "ghost_limit": GHOST_LIMIT_BYTES,
            "manage_cgroups_mode": self._rpc.IGNORE,
            "network_lock": self._rpc.SKIP,
            "tcp_established": tcp == "established",
            "tcp_close": tcp == "close",
        }

    @cached_property
    def _rpc(self) -> Any:
        """The generated messages. Only this module of pycriu: the package itself imports all image formats."""
        name = "devproxy_criu_rpc_pb2"
        if name not in sys.modules:
            path = os.path.join(self.pycriu_dir, "pycriu", "rpc_pb2.py")
            spec = importlib.util.spec_from_file_location(name, path)
            if spec is None or spec.loader is None:
                raise Refused(
                    f"{path} cannot be imported", "remove it and run: devproxy doctor --fix"
                )
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            sys.modules[name] = module
        return sys.modules[name]


class _Worker:
    """One `criu swrk`: one request, the notifications in between, one answer."""

    def __init__(
        self,
        criu: Criu,
        stage: str,
        images_dir: str,
        fields: dict[str, Any],
        inherit: dict[str, int] | None = None,
        give_up: threading.Event | None = None,
        overlays: Sequence[Overlay] = (),
    ) -> None:
        self._overlays = overlays
        self._give_up = give_up or threading.Event()
        self._criu, self._stage = criu, stage
        self._log = fields["log_file"]
        self._rpc = criu._rpc
        self._fields = fields
        self._images_dir = images_dir
        self._inherit = dict(inherit or {})
        self._made: list[int] = []  # the root of a tree that is being restored

    def __enter__(self) -> _Worker:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._open: list[int] = []
        try:
            self._images = self._keep(os.open(self._images_dir, os.O_RDONLY | os.O_DIRECTORY))
            folder, self._log_name = os.path.split(os.path.abspath(self._log))
            self._work = self._keep(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
            # Above 2, where the worker has streams of its own.
            for key, fd in self._inherit.items():
                self._inherit[key] = self._keep(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10))
            with suppress(FileNotFoundError):
                os.unlink(self._log)
            self._pid = self._spawn([theirs.fileno(), *self._open])
        except BaseException:
            self._close()
            raise
        finally:
            theirs.close()
        return self

    def _keep(self, fd: int) -> int:
        self._open.append(fd)
        return fd

    def _spawn(self, fds: list[int]) -> int:
        """Not subprocess: our caller blocks signals (SIGCHLD among them), and CRIU needs to get them."""
        null = [(os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_RDWR, 0) for n in range(3)]
        # posix_spawn_file_actions_adddup2(3): onto itself means that it stays open over the exec.
        stay = [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in fds]
        # A session of its own: a Ctrl-C at our terminal must not end it in the middle.
        words = [self._criu.program, "swrk", str(fds[0])]
        if self._overlays:
            words = overlay.command(self._overlays, words)
        return os.posix_spawn(
            words[0], words, dict(os.environ),
            file_actions=[*null, *stay], setsigmask=[], setsigdef=[signal.SIGCHLD, signal.SIGPIPE],
            setsid=True,
        )  # fmt: skip

    def __exit__(self, *_: object) -> None:
        self._ours.close()
        killed, end = False, time.monotonic() + _LEAVE_S
        while not self._gone():
            if time.monotonic() > end:
                if killed:  # it hangs in the kernel, say on a dead file system; nobody can end it
                    break
                os.kill(self._pid, signal.SIGKILL)
                killed, end = True, time.monotonic() + _LEAVE_S
            time.sleep(0.001)
        self._close()

    def _kill_helpers(self) -> None:
        """Whatever the worker has started is in its session."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)

    def _gone(self) -> bool:
        try:
            return os.waitpid(self._pid, os.WNOHANG)[0] != 0
        except ChildProcessError:
            return True  # our caller reaps all children

    def _close(self) -> None:
        self._ours.close()
        for fd in self._open:
            os.close(fd)

    def ask(self, notified: Callable[..., None]) -> Any:
        request = self._rpc.criu_req()
        request.type = self._rpc.DUMP if self._stage == "dump" else self._rpc.RESTORE
        options = request.opts
        options.images_dir_fd = self._images
        options.work_dir_fd = self._work
        for name, value in (self._fields | {"log_file": self._log_name}).items():
            if isinstance(value, list):
                getattr(options, name).extend(value)
            else:
                setattr(options, name, value)
        for key, fd in self._inherit.items():
            options.inherit_fd.add(key=key, fd=fd)
        self._send(request)
        raised: BaseException | None = None
        while True:
            answer = self._receive()
            if answer.type != self._rpc.NOTIFY:
                break
            reply = self._rpc.criu_req(type=self._rpc.NOTIFY, notify_success=True)
            if raised is None:
                try:
                    if answer.notify.HasField("pid"):
                        self._made = [answer.notify.pid]
                        notified(answer.notify.script, answer.notify.pid)
                    else:
                        notified(answer.notify.script)
                except BaseException as error:
                    raised = error
            reply.notify_success = raised is None
            self._send(reply)
        if raised is not None:
            raise raised
        if not answer.success:
            raise self._failure(answer.cr_errmsg or os.strerror(answer.cr_errno or 0))
        return answer

    def _progress(self) -> tuple[int, int] | None:
        """Bytes of the log, and time that CRIU and the tree so far have run; None: one of them runs right now."""
        ticks = 0
        tree = [p for root in self._made for p in (root, *proctree.descendants(root))]
        for pid in (self._pid, *tree):
            try:
                text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            state, *fields = text.rsplit(")", 1)[1].split()
            if state in "RD":
                return None
            ticks += int(fields[10]) + int(fields[11])  # proc_pid_stat(5): utime and stime
        try:
            return os.path.getsize(self._log), ticks
        except OSError:
            return 0, ticks

    def _send(self, message: Any) -> None:
        try:
            self._ours.send(message.SerializeToString())
        except OSError:  # as if it had gone a moment later
            raise self._failure("criu swrk ended before it had answered") from None

    def _receive(self) -> Any:
        poll = select.poll()
        poll.register(self._ours, select.POLLIN)
        last, since = self._progress(), time.monotonic()
        while not poll.poll(_LOOK_MS):
            # A signal has stopped it; or in a restore, a task was killed while it was being made: CRIU waits for its
            # word on a futex, for ever. A killed CRIU's hold on the tasks of a dump ends with it (ptrace(2)).
            now = self._progress()
            if now != last or now is None:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > _STALL_S:
                self._kill_helpers()
                raise self._failure(f"criu swrk has not moved for {_STALL_S:g} s")
            if self._give_up.is_set():
                self._kill_helpers()
                raise self._failure("it was given up")
            # The socket alone does not tell: helpers that a killed CRIU leaves hold its end open.
            if self._gone() and not poll.poll(0):
                self._kill_helpers()
                raise self._failure("criu swrk was killed")
        try:
            data = self._ours.recv(_REPLY_BYTES)
        except ConnectionError:  # it was killed with our last message unread
            data = b""
        if not data:
            self._kill_helpers()
            raise self._failure("criu swrk ended before it had answered")
        return self._rpc.criu_resp.FromString(data)

    def _failure(self, otherwise: str) -> CriuError:
        try:
            text = Path(self._log).read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        return CriuError(self._stage, first_error(text) or otherwise, self._log)


def first_error(log: str) -> str:
    """The first error line of a log that says why: "(00.1)  Error (criu/x.c:1): text" gives "text"."""
    for line in log.splitlines():
        _, found, text = line.partition("Error (")
        if found and not any(word in line for word in _HARMLESS):
            return text.partition("): ")[2].strip() or text.strip()
    return ""


def _bury(pids: list[int]) -> None:
    """A restore that failed: CRIU has killed the tree; its root may be ours to reap."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _frozen_s(folder: str) -> float:
    """From stats-dump, which CRIU leaves in its work folder: stats_entry {dump = 1 {frozen_time = 2, us}}
    (images/stats.proto)."""
    try:
        (entry,) = criu_image.messages(os.path.join(folder, "stats-dump"))
        return entry.message(1).integer(2) / 1e6
    except (OSError, ValueError, criu_image.ImageFileError):
        return 0.0


def _version(program: str) -> tuple[int, ...]:
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=20,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ()
    match = re.search(r"Version:\s*(\d+(?:\.\d+)*)", done.stdout)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def _candidates() -> Iterator[tuple[str, list[str]]]:
    """(program, folders that may hold pycriu), best first."""
    system = ["/usr/lib/python3/dist-packages", *sys.path]
    named = os.environ.get("DEVPROXY_CRIU")
    if named:
        beside = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(named))), "lib")
        yield named, [beside, *system]
        return
    built = config.criu_dir()
    if os.path.isdir(built):
        if config.is_installed():
            state.state_dir()  # it lies there: nobody else may have put it in place
        yield os.path.join(built, "sbin", "criu"), [os.path.join(built, "lib")]
    path = shutil.which("criu") or shutil.which("criu", path="/usr/sbin:/usr/local/sbin")
    if path:
        yield path, [*system, os.path.join(built, "lib")]


def find() -> Criu:
    """$DEVPROXY_CRIU, else the one that scripts/install_criu.sh made, else the one in PATH. Raises Refused."""
    found = "none is here"
    for program, folders in _candidates():
        version = _version(program)
        if not version:
            continue
        text = ".".join(map(str, version))
        if version < OLDEST:
            found = f"{program} is {text}"
            continue
        for folder in folders:
            if os.path.exists(os.path.join(folder, "pycriu", "rpc_pb2.py")):
                return Criu(program, folder, version)
        found = f"{program} ({text}) has no pycriu"
    raise Refused(
        f"CRIU {'.'.join(map(str, OLDEST))} or later is needed, and {found}",
        "run: devproxy doctor --fix",
    )
