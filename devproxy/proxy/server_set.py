# SPDX-License-Identifier: Apache-2.0
"""The servers of one job: a process for each GPU of the machine, started together, watched, and gone at the end."""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from devproxy import config, layout, runtime
from devproxy.errors import Refused
from devproxy.proxy import elf
from devproxy.proxy.server import Server, ServerProcess, start

ABI_SYMBOL = "devproxy_abi_id"
READY, WAITING = "ready", "waiting"  # what a server writes (csrc/server/main.cc)
POLL_S = 0.05
STOP_GRACE_S = 5.0
LEAVING_S = 5.0  # for a server that has removed its socket; writing a core file may take a while


def client_abi(library: str) -> str:
    """The ABI id of a client library, in hex. Raises Refused where it has none."""
    found = elf.exported_bytes(library, ABI_SYMBOL, layout.ABI_BYTES)
    if found is None:
        raise Refused(f"{library} is not devproxy's client library", "build devproxy: make build")
    return found.hex()


def server_abi(program: str) -> str:
    """What `devproxy-server --print-abi` says. Raises Refused where it cannot be asked."""
    return _ask_program(program, "--print-abi")


def describe(program: str, device: str, gpu: int) -> dict[str, Any]:
    """{"name", "major", "minor", "memory_bytes"} of a GPU that no server has to serve. Raises Refused without such a one."""
    facts: dict[str, Any] = json.loads(_ask_program(program, "--describe", device, str(gpu)))
    return facts


ASK_S = 60.0


def _kill_child(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass  # a supervisor's loop has reaped it


def _ask_program(program: str, *question: str) -> str:
    read_fd, write_fd = os.pipe()
    hidden = ("LD_PRELOAD", config.RECORD)  # a record is of a job
    try:
        pid = os.posix_spawn(
            program,
            [program, *question],
            {k: v for k, v in os.environ.items() if k not in hidden},
            file_actions=[(os.POSIX_SPAWN_DUP2, write_fd, 1)],
            setsigmask=[],
        )
    except OSError as error:
        os.close(read_fd)
        raise Refused(
            f"{program} cannot be started: {error.strerror}", "build devproxy: make build"
        ) from None
    finally:
        os.close(write_fd)
    with os.fdopen(read_fd, "rb") as pipe:
        # A GPU's driver may hang in it.
        late = not select.select([pipe], [], [], ASK_S)[0]
        if late:
            _kill_child(pid)
        text = "" if late else pipe.read(4096).decode(errors="replace").strip()
    if late:
        raise Refused(f"{program} {' '.join(question)} does not answer within {ASK_S:g} s")
    try:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # a supervisor's loop reaps whatever ends
        status = 0
    if text.startswith("error: "):
        raise Refused(text.removeprefix("error: "))
    if status or not text:
        raise Refused(
            f"{program} {' '.join(question)} ended with {status}",
            "build devproxy again: make build",
        )
    return text


def check_same_abi(program: str, library: str) -> str:
    """The ABI id of both, in hex. Raises Refused when server and client are not of one build of the protocol."""
    client, server = client_abi(library), server_abi(program)
    if client != server:
        raise Refused(
            f"{program} is of another version: ABI {server[:16]}, the client library has {client[:16]}",
            "build both from one checkout: make build",
        )
    return client


class ServerSet:
    """Owns the servers of one job and their lease. Precondition: SIGCHLD is blocked; the owner reaps and tells us."""

    def __init__(self) -> None:
        self.members: list[Server] = []
        self._waiting: list[Server] = []  # started, and not told to begin
        self._gone: list[Server] = []  # dismissed ones, whose end may still have to be reaped
        # From a child's waitpid to its noted status, and from a server's start to its place in `members`: else another
        # thread that looks in between takes a server that was killed for one that ended well, with exit code 0.
        self.reaping = threading.Lock()
        self._lease_read, self._lease_write = os.pipe()

    def start_all(
        self,
        program: str,
        job: runtime.JobFolder,
        gpus: list[int],
        device: str,
        gpu_memory_bytes: int,
        chaos: int | None,
        metas: bool,
        more: tuple[str, ...] = (),
        waits: bool = False,
    ) -> list[Server]:
        """Starts one server for each of the job's GPUs, on the machine's GPUs that are named; those of the same one share
        a process. wait_ready then waits for all of them at once. metas: the job's collectives carry metas
        (csrc/server/meta_barrier.h). more: further arguments (--restore DIR). waits: they load what they can, and are
        the job's from begin() on. Returns the new servers, by the job's GPUs."""
        fresh: list[Server] = []
        try:
            for physical in dict.fromkeys(gpus):
                here = [gpu for gpu, behind in enumerate(gpus) if behind == physical]
                arguments = ["--job", job.name, "--job-dir", job.path, "--device", device]
                arguments += [
                    "--gpu-memory",
                    str(gpu_memory_bytes),
                    "--physical-gpu",
                    str(physical),
                ]
                arguments += ["--ledger", runtime.ledger_path(job, device, physical), *more]
                if chaos is not None:
                    arguments += ["--chaos", str(chaos)]
                if metas:
                    arguments.append("--metas")
                if len(gpus) > 1:
                    arguments.append("--collectives")
                    if len(here) == len(gpus):
                        arguments.append("--together")
                log_path = os.path.join(job.path, f"gpu{here[0]}.log")
                record = config.record_path(len(gpus))
                with self.reaping:
                    process = start(
                        program,
                        arguments,
                        here,
                        self._lease_read,
                        job.lock_fd,
                        log_path,
                        record,
                        waits,
                    )
                    servers = [Server(gpu, process) for gpu in here]
                    (self._waiting if waits else self.members).extend(servers)
                fresh += servers
        except BaseException:
            self.dismiss(fresh, grace_s=0.5)
            raise
        fresh.sort(key=lambda server: server.gpu)
        self._in_order()
        return fresh

    def _in_order(self) -> None:
        self.members.sort(key=lambda server: server.gpu)  # the old ones of a GPU before the new one

    def begin(self, servers: list[Server]) -> None:
        """Those that wait take over what they were started for; wait_ready() then waits for them."""
        self._waiting = [server for server in self._waiting if server not in servers]
        self.members += servers
        self._in_order()
        for process in _processes(servers):
            fd, process.begin_fd = process.begin_fd, -1
            try:
                os.write(fd, b"b")
            except BrokenPipeError:
                pass  # it has ended, and wait_ready() says how
            finally:
                os.close(fd)

    def retire(self, servers: Iterable[Server]) -> None:
        """These are not the job's any more, and nobody counts their end as a loss. Call dismiss() too."""
        leaving = list(servers)
        self.members = [server for server in self.members if server not in leaving]
        self._waiting = [server for server in self._waiting if server not in leaving]
        self._gone += [server for server in leaving if server not in self._gone]

    def dismiss(self, servers: Iterable[Server], grace_s: float = STOP_GRACE_S) -> None:
        """They were told to leave, or have failed. Waits, then kills. grace_s 0: nobody has told them."""
        leaving = list(servers)
        self.retire(leaving)
        _close_begin(leaving)
        if not self.wait_gone(leaving, grace_s):
            _kill(leaving)
            self.wait_gone(leaving, grace_s or STOP_GRACE_S)

    def wait_ready(
        self,
        timeout_s: float,
        interrupted: Callable[[], None],
        servers: Iterable[Server] | None = None,
        word: str = READY,
    ) -> None:
        """Returns when every server (of these) listens, or with WAITING: waits. `interrupted` is called often, and may
        raise.

        Raises Refused with the server's own line when one fails, or when timeout_s have passed.
        """
        deadline = time.monotonic() + timeout_s
        waiting = {p.ready_fd: p for p in _processes(self.members if servers is None else servers)}
        texts = dict.fromkeys(waiting, b"")
        poll = select.poll()
        for fd in waiting:
            poll.register(fd, select.POLLIN)
        while waiting:
            interrupted()
            for fd, _ in poll.poll(POLL_S * 1000):
                piece = os.read(fd, 4096)
                texts[fd] += piece
                if piece and b"\n" not in texts[fd]:
                    continue
                poll.unregister(fd)
                self._check_line(waiting.pop(fd), texts[fd].decode(errors="replace"), word)
            if waiting and time.monotonic() > deadline:
                late = next(iter(waiting.values()))
                raise Refused(
                    f"{late.name} was not ready within {timeout_s:g} s ({late.last_words() or 'it said nothing'})",
                    "is the machine overloaded? DEVPROXY_START_TIMEOUT_S sets another limit",
                )

    def _check_line(self, process: ServerProcess, text: str, word: str) -> None:
        line = text.split("\n", 1)[0].strip()
        if word == WAITING and line.startswith(f"{WAITING} "):
            process.left_bytes = int(line.split()[1])
            return
        os.close(process.ready_fd)
        process.ready_fd = -1
        if line == word:
            return
        if line.startswith("error:"):
            raise Refused(f"{process.name} refused: {line[6:].strip()}")
        self.wait_gone([Server(gpu, process) for gpu in process.gpus], 1.0)
        raise Refused(
            f"{process.name} {process.how_it_ended()} before it was ready"
            f" ({process.last_words() or 'it said nothing'})",
            "see: devproxy doctor",
        )

    def note_exit(self, pid: int, wait_status: int) -> bool:
        """Takes the end of a reaped child; False when it was none of our servers.

        Precondition, where verbs run in other threads: the caller has held `reaping` since before its waitpid.
        """
        for process in _processes(self._all()):
            if process.pid == pid and process.status is None:
                process.status = os.waitstatus_to_exitcode(wait_status)
                return True
        return False

    def _all(self) -> list[Server]:
        return [*self.members, *self._waiting, *self._gone]

    def lost(self, job: runtime.JobFolder) -> list[ServerProcess]:
        """Those that are gone although their lease still holds.

        One that crashes removes its socket before it tells the job, so that a job which ended because of it cannot be
        taken for one that ended well: such a server is waited for.
        """
        self._reap()
        sockets = {s: os.path.join(job.path, f"gpu{s.gpu}.sock") for s in self.members}
        leaving = [server for server, path in sockets.items() if not os.path.exists(path)]
        self.wait_gone(leaving, LEAVING_S)
        return [process for process in _processes(self.members) if process.status is not None]

    def _reap(self) -> None:
        with self.reaping:
            for process in _processes(self._all()):
                if process.status is None:
                    try:
                        pid, status = os.waitpid(process.pid, os.WNOHANG)
                    except ChildProcessError:
                        process.status = 0
                        continue
                    if pid:
                        process.status = os.waitstatus_to_exitcode(status)

    def wait_gone(self, servers: Iterable[Server], timeout_s: float) -> bool:
        """Waits until these servers have ended; False when time ran out."""
        deadline = time.monotonic() + timeout_s
        pause = 0.0005
        while True:
            self._reap()
            if all(server.status is not None for server in servers):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 2, 0.02)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Ends the lease and waits; a server that does not go on its own is killed. May be called twice."""
        if self._waiting:
            self.dismiss(list(self._waiting), grace_s)
        processes = _processes(self.members)
        for fd in (self._lease_read, self._lease_write, *(p.ready_fd for p in processes)):
            if fd >= 0:
                os.close(fd)
        self._lease_read = self._lease_write = -1
        for process in processes:
            process.ready_fd = -1
        if self.wait_gone(self.members, grace_s):
            return
        _kill(self.members)
        self.wait_gone(self.members, grace_s)


def _processes(servers: Iterable[Server]) -> list[ServerProcess]:
    return list({id(server.process): server.process for server in servers}.values())


def _close_begin(servers: Iterable[Server]) -> None:
    """Who waits ends then."""
    for process in _processes(servers):
        if process.begin_fd >= 0:
            os.close(process.begin_fd)
            process.begin_fd = -1


def _kill(servers: Iterable[Server]) -> None:
    for process in _processes(servers):
        if process.status is None:
            os.kill(process.pid, signal.SIGKILL)
