# SPDX-License-Identifier: Apache-2.0
"""Talks to devproxyd, starting it where it is absent, and to jobs' agents. What failed there is raised here again.

Light to import: gRPC is loaded by the first call.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from devproxy import __version__, config, procfs, proctree, runtime
from devproxy.control import stage_note
from devproxy.control.coordinator_api import (
    GONE,
    RUNNING,
    STARTING,
    STOPPED,
    ImageFacts,
    JobStatus,
    NodeServers,
)
from devproxy.errors import DevproxyError, Refused
from devproxy.node import init
from devproxy.node.history import Span
from devproxy.node.stages import Report
from devproxy.proxy import command as cmd

# Late imports: the first call loads gRPC and protobuf.
if TYPE_CHECKING:
    from devproxy.control._pb import job_pb2 as pb
    from devproxy.control.quiet_grpc import grpc
    from devproxy.control.trust import Trust

AGENT_SOCKET = "agent.sock"
DAEMON = "devproxyd"
START_TIMEOUT_S = 20.0
ANSWER_TIMEOUT_S = 5.0
LEAVE_TIMEOUT_S = 2.0
CHECK_TIMEOUT_S = 60.0
# What a starting daemon tells.
READY = b"ready"
BUSY = b"busy"
WAITS = "it waits for the job's other nodes"
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


@dataclass(frozen=True)
class Result:
    """How a long operation ended well."""

    image: ImageFacts | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    job: JobStatus | None = None


def listens(path: str) -> bool:
    """Does a process listen on that unix socket?"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(ANSWER_TIMEOUT_S)
        try:
            link.connect(path)
        except OSError:
            return False
    return True


def start_daemon(timeout_s: float) -> str:
    """Starts devproxyd detached; returns when it serves or has ended. Returns what it complained about, or ""."""
    reader, writer = os.pipe()
    try:
        daemon = [sys.executable, "-m", "devproxy.control.daemon", "--told", str(writer)]
        with _no_subreaper():
            # The shell ends at once and leaves an orphan: in no way a part of the job that a supervisor around us
            # runs, and whose stragglers it ends.
            subprocess.run(
                ["/bin/sh", "-c", '"$@" &', "sh", *daemon],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=own_environment(os.environ),
                start_new_session=True,
                pass_fds=[writer],
                check=False,
                timeout=ANSWER_TIMEOUT_S,
            )
    except subprocess.TimeoutExpired:
        os.close(reader)
        return f"the shell that starts it does not end within {ANSWER_TIMEOUT_S:g} s"
    finally:
        os.close(writer)
    told = b""
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            readable, _, _ = select.select([reader], [], [], max(0, deadline - time.monotonic()))
            if not readable:
                return "it does not get ready"
            piece = os.read(reader, 4096)
            if not piece:
                break
            told += piece
    finally:
        os.close(reader)
    if not told:
        return "it ended while it started"
    return "" if told in (READY, BUSY) else told.decode(errors="replace")


@contextmanager
def _no_subreaper() -> Iterator[None]:
    """Orphans made in here go to the host's init, and not to us where we are a job's supervisor.

    For the 2 ms that this takes, the job's own orphans would go there, too; in a namespace of its own it has none.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    is_subreaper = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(is_subreaper), 0, 0, 0)
    if is_subreaper.value:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    try:
        yield
    finally:
        if is_subreaper.value:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def own_environment(given: Mapping[str, str]) -> dict[str, str]:
    """For a process of ours, without what a job around us was given: it is no part of that job."""
    env = {k: v for k, v in given.items() if k not in (*config.OF_THE_JOB, "LD_PRELOAD")}
    home = os.path.dirname(config.PACKAGE_DIR)
    if os.path.basename(home) != "site-packages":  # a checkout: -m finds it wherever it starts
        rest = [p for p in env.get("PYTHONPATH", "").split(":") if p and p != home]
        env["PYTHONPATH"] = ":".join([home, *rest])
    return env


def ensure_daemon(timeout_s: float = START_TIMEOUT_S) -> str:
    """The socket of a devproxyd that answers, started if need be. Raises DevproxyError when none can be had.

    A daemon of another version is asked to leave; one that has calls to finish may stay, and then serves us.
    """
    path = runtime.daemon_socket()
    deadline = time.monotonic() + timeout_s
    asked_to_leave = False
    last = "it did not start"
    while True:
        if listens(path):
            if pid := _stopped_daemon(path):
                raise DevproxyError(
                    f"devproxyd (process {pid}) is stopped",
                    f"let it go on: kill -CONT {pid}; jobs are not harmed by it",
                    object=DAEMON,
                )
            try:
                info = ping(path)
            except DevproxyError as error:
                last = error.what
            else:
                if info == __version__ or asked_to_leave:
                    return path
                asked_to_leave = True
                leave(path)
        else:
            if complaint := start_daemon(max(1.0, deadline - time.monotonic())):
                raise DevproxyError(
                    f"devproxyd cannot start: {complaint}", "jobs are not harmed by it"
                )
            if listens(path):
                continue
        if time.monotonic() > deadline:
            raise DevproxyError(
                f"devproxyd does not answer on {path} ({last})",
                "see its log devproxyd.log in the state folder's logs; jobs are not harmed by it",
            )
        time.sleep(0.05)


def _stopped_daemon(path: str) -> int:
    """The process id of one that is stopped; 0 where it runs, or is gone. The kernel knows who listens on the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(ANSWER_TIMEOUT_S)
        try:
            link.connect(path)
            peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return 0
    pid = int(struct.unpack("3i", peer)[0])
    return pid if pid > 0 and proctree.stopped(pid) else 0


def ping(path: str) -> str:
    """The version of the daemon on that socket."""
    from devproxy.control._pb import job_pb2 as pb

    with _daemon(path) as stub:
        return str(stub.Ping(pb.Empty(), timeout=ANSWER_TIMEOUT_S).version)


def leave(path: str) -> None:
    """Asks the daemon to end and waits a little for it."""
    from devproxy.control._pb import job_pb2 as pb

    try:
        with _daemon(path) as stub:
            stub.Leave(pb.Empty(), timeout=ANSWER_TIMEOUT_S)
    except DevproxyError:
        pass
    deadline = time.monotonic() + LEAVE_TIMEOUT_S
    while listens(path) and time.monotonic() < deadline:
        time.sleep(0.05)


@contextmanager
def _daemon(path: str) -> Iterator[Any]:
    from devproxy.control import messages
    from devproxy.control._pb import job_pb2_grpc

    with messages.open_channel(path) as channel, translated(DAEMON):
        yield job_pb2_grpc.DevproxyStub(channel)


def _trust_for(address: str) -> Trust:
    """What the other host knows us by. Raises Refused."""
    from devproxy.control import trust

    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise Refused(f"{address!r} is not HOST:PORT", "give what devproxyd --listen was given")
    return trust.load()


@contextmanager
def _far_daemon(address: str, trust: Trust) -> Iterator[Any]:
    from devproxy.control import messages
    from devproxy.control._pb import job_pb2_grpc

    with (
        messages.open_far_channel(address, trust) as channel,
        translated(f"{DAEMON} on {address}"),
    ):
        yield job_pb2_grpc.DevproxyStub(channel)


@contextmanager
def translated(who: str) -> Iterator[None]:
    """Turns gRPC's error into ours: the one that the other side gave, or what happened to the connection."""
    from devproxy.control import messages
    from devproxy.control.quiet_grpc import grpc

    try:
        yield
    except grpc.RpcError as error:
        raise messages.carried_error(error) or _broken(error, who) from None


def _broken(error: grpc.RpcError, who: str) -> DevproxyError:
    from devproxy.control.quiet_grpc import grpc

    code = error.code() if isinstance(error, grpc.Call) else None
    details = (error.details() if isinstance(error, grpc.Call) else "") or str(error)
    if code == grpc.StatusCode.UNAVAILABLE:
        return WentAway(who) if who != DAEMON else DaemonWentAway()
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return NoAnswer(f"{who} does not answer", "see: devproxy ps", object=who)
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return DevproxyError(f"{who} is older and does not know this verb", "restart the job")
    return DevproxyError(f"{who}: {details}", f"gRPC status {code.name if code else '?'}")


class NoAnswer(DevproxyError):
    """The other side took the call, and said nothing in the time that it had."""


class WentAway(DevproxyError):
    """The other side of a call has ended, or its socket is gone."""

    def __init__(self, who: str) -> None:
        super().__init__(f"{who} went away during the call", "see: devproxy ps", object=who)


class SupervisorStopped(DevproxyError):
    """It lives, and a signal has stopped it: it answers when it goes on."""

    def __init__(self, who: str, pid: int) -> None:
        self.state = "the job lives; a restore would make a second one"
        super().__init__(
            f"{who} (process {pid}) is stopped",
            f"let it go on: fg in its shell, or kill -CONT {pid} ({self.state})",
            object=who,
        )


class DaemonWentAway(DevproxyError):
    """It forwards; what it forwarded is done by others."""

    def __init__(self) -> None:
        self.state = "the job and the operation go on without it"
        super().__init__(
            f"{DAEMON} went away during the call",
            f"{self.state}; see: devproxy watch, devproxy status",
            object=DAEMON,
        )


class Client:
    """The verbs, through devproxyd. Every method raises what the job's coordinator raised, or DevproxyError."""

    def __init__(self, address: str = "") -> None:
        """address: HOST:PORT of a devproxyd that listens there; "" is this host's, which is started where it is absent."""
        self._address = address
        self._path = "" if address else ensure_daemon()
        self._trust = _trust_for(address) if address else None

    def _stub(self) -> AbstractContextManager[Any]:
        return (
            _daemon(self._path) if self._trust is None else _far_daemon(self._address, self._trust)
        )

    @contextmanager
    def _call(self, begin: Callable[[Any], Any]) -> Iterator[Any]:
        """The call that `begin` makes on a daemon's stub. One that was just leaving has not taken it: the next one is
        asked, once."""
        from devproxy.control import messages

        with self._stub() as stub:
            call = begin(stub)
            if self._address or not messages.was_not_taken(call):
                yield call
                return
        self._path = ensure_daemon()
        with _daemon(self._path) as stub:
            yield begin(stub)

    def list_jobs(self) -> list[JobStatus]:
        from devproxy.control import messages
        from devproxy.control._pb import job_pb2 as pb

        with self._call(
            lambda stub: stub.ListJobs.future(pb.Empty(), timeout=2 * ANSWER_TIMEOUT_S)
        ) as call:
            return [messages.status_from_pb(job) for job in call.result().jobs]

    def status(self, job: str) -> JobStatus:
        from devproxy.control import messages
        from devproxy.control._pb import job_pb2 as pb

        request = pb.JobRequest(job=job)
        with self._call(
            lambda stub: stub.Status.future(request, timeout=2 * ANSWER_TIMEOUT_S)
        ) as call:
            return messages.status_from_pb(call.result())

    def checkpoint(
        self, job: str, *, cut_wait_ms: int | None, strict: bool, report: Report
    ) -> Result:
        from devproxy.control._pb import job_pb2 as pb

        request = pb.CheckpointRequest(job=job, cut_wait_ms=cut_wait_ms, strict=strict)
        return self._follow(lambda stub: stub.Checkpoint(request), report)

    def check(self, job: str, *, strict: bool) -> list[str]:
        """What an image of the job would lose. Raises what a checkpoint would raise before it stops anything."""
        from devproxy.control import messages
        from devproxy.control._pb import job_pb2 as pb

        request = pb.CheckpointRequest(job=job, strict=strict)
        with self._call(
            lambda stub: stub.Check.future(request, timeout=CHECK_TIMEOUT_S + ANSWER_TIMEOUT_S)
        ) as call:
            return list(messages.unpacked(list(call.result().warnings)))

    def suspend(self, job: str, *, cut_wait_ms: int | None, strict: bool, report: Report) -> Result:
        from devproxy.control._pb import job_pb2 as pb

        request = pb.CheckpointRequest(job=job, cut_wait_ms=cut_wait_ms, strict=strict)
        return self._follow(lambda stub: stub.Suspend(request), report)

    def resume(self, job: str, *, gpus: list[int], report: Report) -> Result:
        from devproxy.control._pb import job_pb2 as pb

        request = pb.ResumeRequest(job=job, gpus=gpus)
        return self._follow(lambda stub: stub.Resume(request), report)

    def migrate(self, job: str, *, to: list[int], report: Report, anew: bool = False) -> Result:
        from devproxy.control._pb import job_pb2 as pb

        request = pb.MigrateRequest(job=job, to=to, anew=anew)
        return self._follow(lambda stub: stub.Migrate(request), report)

    def resize(
        self, job: str, *, gpus: list[int], report: Report, onto: list[int] | None = None
    ) -> Result:
        from devproxy.control._pb import job_pb2 as pb

        request = pb.ResizeRequest(job=job, gpus=gpus, onto=onto)
        return self._follow(lambda stub: stub.Resize(request), report)

    def watch(self, job: str, report: Report) -> Result:
        """The operation under way in the job, or the last one."""
        from devproxy.control._pb import job_pb2 as pb

        return self._follow(lambda stub: stub.Watch(pb.JobRequest(job=job)), report)

    def restore(self, request: pb.RestoreRequest, report: Report) -> Iterator[Result]:
        """The result when the job runs again; with request.wait another one when it has ended."""
        with self._call(lambda stub: stub.Restore(request)) as events:
            yield follow(events, report)
            if request.wait:
                yield follow(events, report)

    def kill(self, job: str, signal: int) -> None:
        from devproxy.control._pb import job_pb2 as pb

        request = pb.KillRequest(job=job, signal=signal)
        with self._call(
            lambda stub: stub.Kill.future(request, timeout=2 * ANSWER_TIMEOUT_S)
        ) as call:
            call.result()

    def logs(self, job: str, *, offset: int, follow: bool) -> Iterator[bytes]:
        from devproxy.control._pb import job_pb2 as pb

        request = pb.LogsRequest(job=job, offset=offset, follow=follow)
        with self._call(lambda stub: stub.Logs(request)) as chunks:
            for chunk in chunks:
                yield chunk.data

    def _follow(self, call: Callable[[Any], Iterator[pb.Event]], report: Report) -> Result:
        with self._call(call) as events:
            return follow(events, report)


def follow(events: Iterator[pb.Event], report: Report) -> Result:
    """Reports the progress and returns the result. Raises DevproxyError when the stream ends without one."""
    from devproxy.control import messages

    for event in events:
        if event.HasField("progress"):
            report(messages.progress_from_pb(event.progress))
            continue
        result = event.result
        return Result(
            image=messages.image_from_pb(result.image) if result.HasField("image") else None,
            facts=json.loads(result.facts_json) if result.facts_json else {},
            job=messages.status_from_pb(result.job) if result.HasField("job") else None,
        )
    raise DevproxyError("the operation's end was not told", "see: devproxy status")


# -- a job's own agent ----------------------------------------------------------------------------------------------


def wait_for_agent(path: str, timeout_s: float = 5.0) -> bool:
    """A job that has just been started has none for the first half second; one that waits for its other nodes has none for
    longer. False: there is none."""
    deadline = time.monotonic() + timeout_s
    while not os.path.exists(os.path.join(path, AGENT_SOCKET)):
        if time.monotonic() > deadline or waits_for_nodes(path) or not runtime.is_alive(path):
            return False
        time.sleep(0.02)
    return True


def agent_status(name: str, path: str, alive: bool) -> JobStatus:
    """What the job's agent says, or what its folder says where no agent answers. Does not raise for a lost job."""
    if not alive:
        return _from_folder(name, path, GONE, "the job is dead")
    if not os.path.exists(os.path.join(path, AGENT_SOCKET)):
        if waits_for_nodes(path):
            return _from_folder(name, path, STARTING, WAITS)
        return _from_folder(name, path, "", "its supervisor has no control socket (yet)")
    if why := supervisor_stopped(path):
        return _from_folder(name, path, STOPPED, why)
    try:
        status = ask_agent(path)
    except DevproxyError as error:
        return _from_folder(name, path, "", error.what)
    if status.phase == RUNNING and _command_stopped(status.pid):
        return replace(status, phase=STOPPED)
    return status


def waits_for_nodes(path: str) -> bool:
    """Nothing of that job runs here until its other nodes are there."""
    note = stage_note.NoteReader(os.path.join(path, stage_note.NAME))
    return note.read() == stage_note.MEET


def signal_supervisor(path: str, number: int) -> None:
    """For a job whose agent does not answer yet: as a signal from a shell, of those that end it. Raises DevproxyError."""
    name = os.path.basename(path)
    if number not in cmd.ENDING and number != signal.SIGKILL:
        why = WAITS if waits_for_nodes(path) else "its supervisor has no control socket (yet)"
        raise Refused(
            f"kill of job {name}: {why}, and signal {number} would not end it",
            "give TERM, INT, HUP, QUIT or KILL, or try again when it runs",
        )
    try:
        process = _open_supervisor(path)
    except OSError:
        raise DevproxyError(
            f"{supervisor_of(path)} is gone, so nobody takes the signal",
            f"its janitor ends what is left of it, see: devproxy status {name}",
            object=f"job {name}",
        ) from None
    try:
        signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        pass  # it has ended meanwhile, as was wished
    finally:
        os.close(process)


def _open_supervisor(path: str) -> int:
    """A pidfd of it, and not of a process that got its number later: it has the job's lock open. Raises OSError."""
    lock = os.path.join(path, "lock")
    pid = job_file(path).get("pid")
    if not isinstance(pid, int):  # a node that does not know yet which job it belongs to
        with open(lock, "rb") as file:
            pid = procfs.lock_holder(file.fileno())
    if pid <= 0:
        raise ProcessLookupError(pid)
    process = os.pidfd_open(pid)
    try:
        if not _has_open(pid, os.stat(lock)):
            raise ProcessLookupError(pid)
    except BaseException:
        os.close(process)
        raise
    return process


def _has_open(pid: int, file: os.stat_result) -> bool:
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            if os.path.samestat(os.stat(entry.path), file):
                return True
        except OSError:
            pass  # closed meanwhile
    return False


def supervisor_stopped(path: str) -> str:
    """What to do about a supervisor that answers nothing until it goes on; "" for one that runs."""
    if pid := stopped_supervisor(path):
        return f"its supervisor is stopped (Ctrl-Z?): fg in its shell, or kill -CONT {pid}"
    return ""


def stopped_supervisor(path: str) -> int:
    """Its process id; 0 where it runs, or is gone."""
    pid = job_file(path).get("pid")
    return pid if isinstance(pid, int) and proctree.stopped(pid) else 0


def _command_stopped(supervisor: int) -> bool:
    return any(init.command_state(root) == "T" for root in proctree.children(supervisor))


def ask_agent(path: str, timeout_s: float = 2.0) -> JobStatus:
    """Raises DevproxyError."""
    from devproxy.control import messages
    from devproxy.control._pb import job_pb2 as pb

    with agent(path) as stub:
        return messages.status_from_pb(stub.Status(pb.Empty(), timeout=timeout_s))


def history(path: str, since_ns: int) -> list[Span]:
    """The job's phases, verbs and stages that had not ended by then (CLOCK_MONOTONIC). Raises DevproxyError."""
    from devproxy.control._pb import job_pb2 as pb

    with agent(path) as stub:
        found = stub.History(pb.HistoryRequest(since_ns=since_ns), timeout=ANSWER_TIMEOUT_S)
    return [Span(one.kind, one.name, one.begin_ns, one.end_ns) for one in found.spans]


def elsewhere(path: str) -> list[NodeServers]:
    """What the servers on the job's other hosts count. Raises DevproxyError."""
    from devproxy.control import messages
    from devproxy.control._pb import job_pb2 as pb

    with agent(path) as stub:
        return messages.elsewhere_from_pb(stub.Elsewhere(pb.Empty(), timeout=ANSWER_TIMEOUT_S))


def count_images(path: str) -> None:
    """Tells a job that images were removed from its store, or that damage was found there. Raises DevproxyError."""
    from devproxy.control._pb import job_pb2 as pb

    with agent(path) as stub:
        stub.CountImages(pb.Empty(), timeout=ANSWER_TIMEOUT_S)


def tell_jobs(job_ids: set[str]) -> None:
    """The living ones of these here count their images. The others see it at their next image."""
    for _, path, alive in runtime.list_jobs():
        if alive and job_file(path).get("job_id") in job_ids:
            with suppress(DevproxyError):
                count_images(path)


def supervisor_of(path: str) -> str:
    return f"the supervisor of job {os.path.basename(path)!r}"


@contextmanager
def agent(path: str) -> Iterator[Any]:
    """The stub of the agent of that job folder. Raises SupervisorStopped where it does not answer for that reason."""
    from devproxy.control import messages
    from devproxy.control._pb import job_pb2_grpc

    socket_path = os.path.join(path, AGENT_SOCKET)
    who = supervisor_of(path)
    try:
        with messages.open_channel(socket_path) as channel, translated(who):
            yield job_pb2_grpc.JobAgentStub(channel)
    except (WentAway, NoAnswer):
        if pid := stopped_supervisor(path):
            raise SupervisorStopped(who, pid) from None
        raise


def job_file(path: str) -> dict[str, Any]:
    """job.json, or nothing where it is not there (yet)."""
    try:
        with open(os.path.join(path, "job.json"), encoding="utf-8") as file:
            facts = json.load(file)
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _from_folder(name: str, path: str, phase: str, why: str) -> JobStatus:
    facts = job_file(path)
    gpus = facts.get("gpus", [])
    return JobStatus(
        job=name,
        job_id=str(facts.get("job_id", "")),
        phase=phase or ("running" if facts else "starting"),
        device=str(facts.get("device", "?")),
        gpus=list(range(gpus)) if isinstance(gpus, int) else list(gpus),
        pid=int(facts.get("pid", 0)),
        command=list(facts.get("command", [])),
        started_unix_s=float(facts.get("started_unix_s", 0.0)),
        checkpointable=False,
        why_not=why,
    )


def find_job(name: str) -> tuple[str, str]:
    """(name, folder) of a living job; of the only one where name is empty. Raises Refused."""
    jobs = runtime.list_jobs()
    living = [(n, path) for n, path, alive in jobs if alive]
    if not name:
        if len(living) == 1:
            return living[0]
        if not living:
            raise no_job_lives()
        names = ", ".join(n for n, _ in living)
        raise Refused(f"there are {len(living)} jobs: {names}", "name one")
    for n, path in living:
        if n == name:
            return n, path
    if any(n == name for n, _, _ in jobs):
        raise Refused(f"job {name!r} is dead", f"bring it back: devproxy restore {name}")
    raise no_such_job(name, [n for n, _ in living])


def no_job_lives() -> Refused:
    return Refused("no job lives", "start one with devproxy-run, or: devproxy restore IMAGE")


def no_such_job(name: str, living: list[str]) -> Refused:
    """A dead job's folder goes as soon as somebody sweeps, so this may be one of those as well."""
    import difflib  # for this alone

    near = difflib.get_close_matches(name, living, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return Refused(
        f"there is no job {name!r}", f"{hint}see: devproxy ps; if it died: devproxy restore {name}"
    )
