# SPDX-License-Identifier: Apache-2.0
"""devproxyd: one per user and host. Finds jobs through their folders, forwards verbs to their agents, starts agents.

It keeps no state: killed at any moment it harms no job, and the next one finds the same jobs. It leaves when no job has
lived and no call has run for IDLE_S.

Threads: one per call, daemon threads; the main thread looks for the end. Locks: Calls._lock, a leaf.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from devproxy import __version__, config, proctree, runtime, share, state
from devproxy import log as log_module
from devproxy.control import client, stage_note
from devproxy.control.client import BUSY, READY
from devproxy.control.coordinator_api import RESTORING, STARTING
from devproxy.errors import (
    CheckpointError,
    DevproxyError,
    MigrateError,
    OperationFailed,
    Refused,
    ResizeError,
    RestoreError,
    SuspendError,
)
from devproxy.node import burial
from devproxy.node.spec import own_name

# Late imports: of daemons that start at once, all but one only say BUSY, and load no gRPC.
if TYPE_CHECKING:
    from devproxy.control._pb import job_pb2 as pb
    from devproxy.control.quiet_grpc import grpc

IDLE_S = 10.0
LOOK_S = 0.2
LAST_WORDS_S = 2.0  # how long the stream of an agent that has ended may still bring events
LOOK_FOR_JOBS_S = 1.0
LOG_LIMIT_BYTES = 1 << 20
# For imports and a state folder on a slow disk. Afterwards the agent's own events show that it lives.
AGENT_START_S = 120.0
MOST_CALLS, MOST_FOLLOWERS = 256, 192
# How long a verb under way waits for a supervisor that a signal has stopped.
STOPPED_S = 5.0
# For the agent of a job that has just begun. With the agent's own time it is less than a caller of ours has.
KILL_WAITS_S = 3.0
# From a supervisor's kill -9 to the end of the rest of its job, which the janitor sees to.
REST_ENDS_S = 5.0
FAILED: dict[str, type[OperationFailed]] = {
    "checkpoint": CheckpointError,
    "suspend": SuspendError,
    "resume": RestoreError,
    "migrate": MigrateError,
    "resize": ResizeError,
}


def log(text: str) -> None:
    """One line with a time, on stderr, which is the log unless --foreground."""
    line = f"{time.strftime('%Y-%m-%dT%H:%M:%S')} devproxyd[{os.getpid()}]: {text}"
    if log_module.in_json():
        line = log_module.as_json(text, "devproxyd")
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


class Calls:
    """The calls under way, and since when there is nothing to do.

    One lock decides whether to leave and whether to take a call, so the daemon never takes a call and then cuts it off. A
    caller that comes too late is told that its call was not taken, and asks the next daemon (client.py).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._idle_since = time.monotonic()
        self._leaving = False
        self.leave_asked = False

    @contextmanager
    def running(self, context: grpc.ServicerContext) -> Iterator[None]:
        from devproxy.control import messages

        with self._lock:
            taken = not self._leaving
            self._running += taken
        if not taken:
            messages.not_taken(context)
        try:
            messages.taken(context)
            yield
        finally:
            with self._lock:
                self._running -= 1
                self._idle_since = time.monotonic()

    def busy(self) -> None:
        """A job lives."""
        with self._lock:
            self._idle_since = time.monotonic()

    def should_leave(self, idle_s: float) -> bool:
        with self._lock:
            if self._running:
                return False
            if self.leave_asked or time.monotonic() - self._idle_since >= idle_s:
                self._leaving = True
            return self._leaving

    def take_no_more(self) -> None:
        """A signal ends us; calls under way have the rest of the server's grace."""
        with self._lock:
            self._leaving = True


@dataclass(frozen=True)
class Started:
    """A detached agent that restores a job. log_start: size of its log before."""

    process: subprocess.Popen[bytes]
    spec_path: str
    log_path: str
    log_start: int
    note: stage_note.NoteReader


class Agents:
    """The detached agents that this daemon started. They outlive it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: dict[str, Started] = {}

    def start(self, request: pb.RestoreRequest) -> Started:
        """Raises Refused where that job lives or is being restored."""
        from devproxy.control import messages

        name = _local_name(request)
        log_path = state.log_path(name)
        with self._lock:
            self._reap()
            if name in self._started or any(n == name and a for n, _, a in runtime.list_jobs()):
                raise Refused(
                    f"job {name!r} lives", "end it first (devproxy kill), or give another --name"
                )
            spec = {
                "image": request.image,
                "store": request.store,
                "name": request.name,
                "gpus": list(request.gpus),
                "output": request.output or None,
                "output_stderr": request.output_stderr or None,
                "files": request.files or None,
                "strict": request.strict,
                "device": request.device or None,
                "allow_other_gpu": request.allow_other_gpu,
                "node": request.node if request.HasField("node") else None,
                "meet": request.meet or None,
                "address": request.address or None,
            }
            spec = messages.unpacked(spec)
            cwd = messages.unpacked(request.cwd)
            environment = messages.unpacked(dict(request.environment))
            path = os.path.join(state.subfolder("restores"), f"{name}-{time.time_ns()}.json")
            spec["note"] = path + ".stage"
            _write_private(path + ".stage", "")
            _write_private(path, json.dumps(spec))
            start = os.path.getsize(log_path) if os.path.exists(log_path) else 0
            with open(log_path, "ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "devproxy.control.agent", "--restore", path],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=cwd if os.path.isdir(cwd) else "/",
                    env=client.own_environment(environment or os.environ),
                    start_new_session=True,
                )
            note = stage_note.NoteReader(path + ".stage")
            started = Started(process, path, log_path, start, note)
            self._started[name] = started
        log(f"restore image={request.image} job={name} agent={process.pid}")
        return started

    def reap(self) -> None:
        with self._lock:
            self._reap()

    def _reap(self) -> None:
        for name, started in list(self._started.items()):
            if started.process.poll() is not None:
                code = started.process.returncode
                log(f"agent of job={name} pid={started.process.pid} ended code={code}")
                _unlink(started.spec_path)
                _unlink(started.spec_path + ".stage")
                del self._started[name]


def _local_name(request: pb.RestoreRequest) -> str:
    return own_name(request.name, request.node)


def _write_private(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(text)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _last_words(path: str, start: int) -> str:
    """The last line that was written to the log from that byte on."""
    try:
        with open(path, "rb") as file:
            file.seek(max(start, os.path.getsize(path) - 4096))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _watch_restore(
    name: str, started: Started, context: grpc.ServicerContext
) -> Iterator[pb.Event]:
    """Yields what the agent says about its restore. If the caller leaves, the agent goes on, unless it only waits for the
    job's other nodes: then the restore ends."""
    from devproxy.control import messages
    from devproxy.control._pb import job_pb2 as pb
    from devproxy.node.stages import Progress

    path = os.path.join(runtime.root_path(), name, client.AGENT_SOCKET)
    stage = "start"
    deadline = time.monotonic() + AGENT_START_S

    def left() -> None:
        if started.note.read() == stage_note.MEET:
            started.process.kill()  # the janitor removes its folder

    # Not behind a yield: where the caller has left by then, nobody asks for more.
    if not context.add_callback(left):
        left()
    while context.is_active():
        if started.process.poll() is not None:
            raise _agent_ended(stage, started)
        if started.note.read() == stage_note.MEET:
            deadline = time.monotonic() + AGENT_START_S  # side.MEET_S is its own limit
            if stage != stage_note.MEET:
                stage = stage_note.MEET
                text = "waiting for the job's other nodes"
                yield pb.Event(progress=messages.progress_to_pb(Progress(stage, text)))
        if client.listens(path):
            deadline = time.monotonic() + AGENT_START_S
            news = _agent_news(path, stage, started, context)
            for event in _until_ended(news, lambda: started.process.poll() is not None):
                if event.HasField("progress"):
                    stage = event.progress.stage
                yield event
                if event.HasField("result"):
                    return
        if time.monotonic() > deadline:
            pid = started.process.pid
            raise RestoreError(
                stage,
                f"the agent (process {pid}) does not get ready",
                f"see {started.log_path}; end it: kill {pid}",
                "starting",
            )
        time.sleep(0.05)


def _agent_news(
    path: str, stage: str, started: Started, context: grpc.ServicerContext
) -> Iterator[pb.Event]:
    """What the agent says; nothing where it has not begun, or is ending."""
    from devproxy.control import messages
    from devproxy.control._pb import job_pb2 as pb
    from devproxy.control._pb import job_pb2_grpc
    from devproxy.control.quiet_grpc import grpc

    with messages.open_channel(path) as channel:
        stub = job_pb2_grpc.JobAgentStub(channel)
        try:
            stream = stub.Watch(pb.Empty())
            context.add_callback(stream.cancel)
            yield from stream
        except grpc.RpcError as error:
            if carried := messages.carried_error(error):
                raise carried from None
            code = error.code() if isinstance(error, grpc.Call) else None
            if code == grpc.StatusCode.UNAVAILABLE:  # it is ending; how, its exit code says
                try:
                    started.process.wait(5)
                except subprocess.TimeoutExpired:
                    pass
            elif code == grpc.StatusCode.NOT_FOUND:  # it has not begun, or did not say when
                job = stub.Status(pb.Empty(), timeout=client.ANSWER_TIMEOUT_S)
                if job.phase not in (STARTING, RESTORING):
                    yield pb.Event(result=pb.Result(job=job))
            elif code != grpc.StatusCode.CANCELLED:
                raise RestoreError(stage, f"the agent says {error}") from None


def _until_ended(
    events: Iterator[Any],
    ended: Callable[[], bool],
    lost: DevproxyError | None = None,
    stopped: Callable[[], DevproxyError | None] = lambda: None,
) -> Iterator[Any]:
    """Yields the events of an agent while it lives, then ends or raises `lost`. If `stopped` has returned an error for
    STOPPED_S, that error is raised.

    A thread reads the events. If it never returns it is left alone: when a process ends while a channel of gRPC 1.85
    connects to it, that channel may never answer again, not even to cancel() (about one in a hundred refused restores on
    a loaded machine).
    """
    told: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def read() -> None:
        try:
            for event in events:
                told.put((event, None))
            told.put((None, None))
        except BaseException as error:
            told.put((None, error))

    threading.Thread(target=read, name="news", daemon=True).start()
    deadline = None
    stopped_s: float | None = None
    while True:
        try:
            event, error = told.get(timeout=LOOK_S)
        except queue.Empty:
            why = stopped()
            if why is None:
                stopped_s = None
            elif stopped_s is None:
                stopped_s = time.monotonic()
            elif time.monotonic() - stopped_s > STOPPED_S:
                raise why from None
            if deadline is None:
                deadline = time.monotonic() + LAST_WORDS_S if ended() else None
            elif time.monotonic() > deadline:
                if lost:
                    raise lost from None
                return
            continue
        if error:
            raise error
        if event is None:
            return
        yield event


def _agent_ended(stage: str, started: Started) -> DevproxyError:
    """The error that the agent left beside its orders (agent.py), or else the last line of its log."""
    code = started.process.returncode
    stage = started.note.read() or stage
    name = os.path.basename(started.log_path).removesuffix(".log")
    try:
        with open(started.spec_path + ".failed", encoding="utf-8") as file:
            facts = json.load(file)
        os.unlink(started.spec_path + ".failed")
        if code == Refused.exit_code:
            return Refused(facts["error"], facts["remedy"])
        about = facts.get("object") or f"job {name}"
        why = (facts["stage"], facts["error"], facts["remedy"])
        return RestoreError(*why, "nothing of it runs", about)
    except (OSError, ValueError, KeyError):
        pass
    words = _last_words(started.log_path, started.log_start)
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    said = f"; its last words: {words}" if words else ""
    return RestoreError(
        stage,
        f"the agent {how}{said}",
        f"see {started.log_path}",
        "nothing of it runs",
        f"the agent of job {name}",
    )


def _stopped(path: str) -> client.SupervisorStopped | None:
    pid = client.stopped_supervisor(path)
    return client.SupervisorStopped(client.supervisor_of(path), pid) if pid else None


def _verb_stopped(
    verb: str, name: str, stage: str, error: client.SupervisorStopped
) -> OperationFailed:
    """The error for a verb that has not failed: it goes on when its supervisor does."""
    remedy = f"{error.remedy}; the {verb} goes on with it, see: devproxy watch {name}"
    return FAILED[verb](stage, error.what, remedy, "stopped", f"job {name}")


def _supervisor_lost(verb: str, name: str, path: str, stage: str) -> OperationFailed:
    """The supervisor was killed in the middle of a verb. What it leaves behind is ended before anybody is told."""
    deadline = time.monotonic() + REST_ENDS_S
    while os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.02)
    pid = client.job_file(path).get("pid")
    if isinstance(pid, int) and proctree.lives(pid):
        return FAILED[verb](
            stage,
            f"{client.supervisor_of(path)} (process {pid}) hung up during the call",
            f"it lives, so restore nothing beside it; see: devproxy status {name}",
            "unknown",
            f"job {name}",
        )
    return FAILED[verb](
        stage,
        f"{client.supervisor_of(path)} went away during the call",
        f"if an image of it is whole: devproxy restore {name}",
        "its supervisor is gone" if os.path.exists(path) else "the job has ended",
        f"job {name}",
    )


def _find(verb: str, job: str) -> tuple[str, str]:
    """(name, folder) of the living job. Raises Refused; also for a verb that changes a job and names none."""
    if not job and verb not in ("logs", "watch"):
        raise Refused(f"{verb} needs the name of a job", "see: devproxy ps")
    name, path = client.find_job(job)
    if why := client.supervisor_stopped(path):
        raise Refused(f"{verb} of job {name}: {why}")
    return name, path


class Service:
    """The verbs of the service Devproxy."""

    def __init__(self) -> None:
        from devproxy.control import agent_service

        self.calls = Calls()
        self.agents = Agents()
        self._followers = agent_service.Followers(MOST_FOLLOWERS, "jobs of this user")

    def Ping(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.DaemonInfo:
        from devproxy.control._pb import job_pb2 as pb

        with self.calls.running(context):
            return pb.DaemonInfo(version=__version__, pid=os.getpid())

    def Leave(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.Empty:
        from devproxy.control._pb import job_pb2 as pb

        with self.calls.running(context):
            self.calls.leave_asked = True
            return pb.Empty()

    def ListJobs(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.JobList:
        from devproxy.control import messages
        from devproxy.control._pb import job_pb2 as pb

        with self._call("list", "", context):
            jobs = runtime.list_jobs()
            with futures.ThreadPoolExecutor(8) as pool:  # one that hangs delays no other
                found = pool.map(lambda job: client.agent_status(*job), jobs)
            return pb.JobList(jobs=[messages.status_to_pb(status) for status in found])

    def Status(self, request: pb.JobRequest, context: grpc.ServicerContext) -> pb.JobStatus:
        from devproxy.control import messages

        with self._call("status", request.job, context):
            name, path = client.find_job(request.job)
            return messages.status_to_pb(client.agent_status(name, path, True))

    def Checkpoint(
        self, request: pb.CheckpointRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.Event]:
        return self._forward("checkpoint", request, lambda s: s.Checkpoint(request), context)

    def Suspend(
        self, request: pb.CheckpointRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.Event]:
        return self._forward("suspend", request, lambda s: s.Suspend(request), context)

    def Resume(
        self, request: pb.ResumeRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.Event]:
        return self._forward("resume", request, lambda s: s.Resume(request), context)

    def Migrate(
        self, request: pb.MigrateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.Event]:
        return self._forward("migrate", request, lambda s: s.Migrate(request), context)

    def Resize(
        self, request: pb.ResizeRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.Event]:
        return self._forward("resize", request, lambda s: s.Resize(request), context)

    def Watch(self, request: pb.JobRequest, context: grpc.ServicerContext) -> Iterator[pb.Event]:
        from devproxy.control._pb import job_pb2 as pb

        return self._forward("watch", request, lambda s: s.Watch(pb.Empty()), context)

    def Logs(self, request: pb.LogsRequest, context: grpc.ServicerContext) -> Iterator[pb.LogChunk]:
        return self._forward("logs", request, lambda s: s.Logs(request), context)

    def Check(self, request: pb.CheckpointRequest, context: grpc.ServicerContext) -> pb.CheckResult:
        with self._call("check", request.job, context):
            _, path = _find("check", request.job)
            with client.agent(path) as stub:
                found: pb.CheckResult = stub.Check(request, timeout=client.CHECK_TIMEOUT_S)
            return found

    def Kill(self, request: pb.KillRequest, context: grpc.ServicerContext) -> pb.Empty:
        from devproxy.control._pb import job_pb2 as pb

        with self._call("kill", request.job, context):
            _, path = _find("kill", request.job)
            if not client.wait_for_agent(path, KILL_WAITS_S):
                client.signal_supervisor(path, request.signal)
                return pb.Empty()
            with client.agent(path) as stub:
                stub.Kill(request, timeout=client.ANSWER_TIMEOUT_S)
            return pb.Empty()

    def Restore(
        self, request: pb.RestoreRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.Event]:
        from devproxy.control._pb import job_pb2 as pb

        if not context.peer().startswith("unix:"):
            # Code would come with an environment (LD_PRELOAD, PYTHONPATH); another host's is of no use here anyway.
            request.ClearField("environment")
            request.ClearField("cwd")
        with self._call("restore", request.name, context):
            runtime.check_job_name(request.name)
            if request.wait:
                self._followers.enter(context)
            started = self.agents.start(request)
            yield from _watch_restore(_local_name(request), started, context)
            while request.wait and context.is_active():
                code = started.process.poll()
                if code is not None:
                    code = 128 - code if code < 0 else code
                    yield pb.Event(result=pb.Result(facts_json=json.dumps({"exit_code": code})))
                    return
                time.sleep(LOOK_S)

    @contextmanager
    def _call(self, verb: str, job: str, context: grpc.ServicerContext) -> Iterator[None]:
        """Counts the call; an error ends it with its details."""
        from devproxy.control import messages

        with self.calls.running(context):
            try:
                yield
            except Exception as error:
                if not context.is_active():
                    return  # the caller has left, or has its answer: there is nobody to tell
                if isinstance(error, DevproxyError):
                    log(f"{verb} job={job or '-'} failed: {error}")
                else:
                    import traceback

                    log(f"{verb} job={job or '-'}: {traceback.format_exc()}")
                messages.abort(context, error)

    def _forward(
        self,
        verb: str,
        request: Any,
        call: Callable[[Any], Any],
        context: grpc.ServicerContext,
    ) -> Iterator[Any]:
        """The agent's stream, as it comes. When our caller leaves, the agent's call ends; its operation does not."""

        with self._call(verb, request.job, context):
            name, path = _find(verb, request.job)
            if verb in ("logs", "watch"):
                self._followers.enter(context)
            if not client.wait_for_agent(path):
                raise Refused(
                    f"job {name!r} has no control socket",
                    "it is starting, or runs under an older devproxy; see: devproxy status",
                )
            if verb not in ("logs", "watch"):
                log(f"{verb} job={name}")
            note = stage_note.NoteReader(os.path.join(path, stage_note.NAME))
            try:
                with client.agent(path) as stub:
                    stream = call(stub)
                    context.add_callback(stream.cancel)
                    yield from _until_ended(
                        stream,
                        lambda: not runtime.is_alive(path),
                        client.WentAway(client.supervisor_of(path)),
                        lambda: _stopped(path),
                    )
            except client.SupervisorStopped as error:
                if verb not in FAILED:
                    raise
                raise _verb_stopped(verb, name, note.read() or "start", error) from None
            except client.WentAway:
                if verb not in FAILED:
                    raise
                raise _supervisor_lost(verb, name, path, note.read() or "start") from None


def idle_s() -> float:
    """Seconds with neither job nor call after which the daemon leaves."""
    try:
        return max(0.0, float(os.environ.get(config.DAEMON_IDLE_S) or IDLE_S))
    except ValueError:
        return IDLE_S


@dataclass(frozen=True)
class Wishes:
    """stay: serve until a signal, also without jobs. listen: HOST:PORT for clients on other hosts, by mTLS. metrics: HOST:PORT
    for Prometheus, without any authentication. "": not."""

    stay: bool = False
    listen: str = ""
    metrics: str = ""


def _lock_in_place_of_another() -> int | None:
    """Asks a daemon that a command has started to leave once its calls have ended, so that a service takes its place."""
    deadline = time.monotonic() + client.START_TIMEOUT_S
    while (lock := runtime.take_daemon_lock()) is None and time.monotonic() < deadline:
        client.leave(runtime.daemon_socket())
        time.sleep(0.05)
    return lock


def run(tell: Callable[[bytes], None], wishes: Wishes = Wishes()) -> int:
    """Serves until there is nothing left to do. tell(READY) when it serves, tell(BUSY) when another one does."""
    burial.install()
    lock = _lock_in_place_of_another() if wishes.stay else runtime.take_daemon_lock()
    if lock is None:
        tell(BUSY)
        return 0
    # A plain list: a handler that sets an Event may find its lock held by the wait that it interrupts.
    told_to_end: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: told_to_end.append(number))
    try:
        from devproxy.control import agent_service
        from devproxy.control._pb import job_pb2_grpc

        service = Service()

        def add(server: grpc.Server) -> None:
            job_pb2_grpc.add_DevproxyServicer_to_server(service, server)
            _add_standard_services(server)
            if wishes.listen:
                _listen(server, wishes.listen)

        server = agent_service.make_server(runtime.daemon_socket(), add, MOST_CALLS)
        if wishes.metrics:
            from devproxy.control import metrics  # prometheus_client: for this option alone

            log(f"metrics on http://{metrics.serve(wishes.metrics)}/metrics")
        log(f"serves version={__version__} root={runtime.root_path()}")
        tell(READY)
        why = _serve(service, told_to_end, wishes.stay)
        log(f"leaves: {why}")
        server.stop(1.0).wait(3.0)
    finally:
        runtime.give_daemon_lock_back(lock)
    return 0


def _add_standard_services(server: grpc.Server) -> None:
    """gRPC's own health and reflection, for probes and grpcurl."""
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection

    from devproxy.control import quiet_grpc  # noqa: F401  gRPC with our settings, before the two below
    from devproxy.control._pb import job_pb2 as pb

    ours = pb.DESCRIPTOR.services_by_name["Devproxy"].full_name
    probe = health.HealthServicer()
    for name in ("", ours):
        probe.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(probe, server)
    names = (ours, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)


def _listen(server: grpc.Server, where: str) -> None:
    """Raises Refused."""
    from devproxy.control import trust

    credentials = trust.load().server()
    try:
        port = server.add_secure_port(where, credentials)
    except RuntimeError:
        port = 0
    if not port:
        raise Refused(f"devproxyd cannot listen on {where}", "give another HOST:PORT to --listen")
    log(f"listens host={where.rpartition(':')[0]} port={port}")


def _serve(service: Service, told_to_end: list[int], stay: bool) -> str:
    """Returns why it ends."""
    idle = float("inf") if stay else idle_s()
    next_look = 0.0
    while not told_to_end:
        time.sleep(min(LOOK_S, idle or LOOK_S))
        if time.monotonic() >= next_look:
            service.agents.reap()
            if any(alive for _, _, alive in runtime.list_jobs()):
                service.calls.busy()
            next_look = time.monotonic() + min(LOOK_FOR_JOBS_S, idle)
        if service.calls.should_leave(idle):
            return "asked to" if service.calls.leave_asked else f"nothing to do for {idle:g} s"
    service.calls.take_no_more()
    return f"signal {told_to_end[0]}"


def _open_log() -> int:
    """The log, begun anew when it is long."""
    path = os.path.join(state.subfolder("logs"), "devproxyd.log")
    try:
        if os.path.getsize(path) > LOG_LIMIT_BYTES:
            os.replace(path, path + ".1")
    except FileNotFoundError:
        pass
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _teller(told_fd: int) -> Callable[[bytes], None]:
    """The way to tell our starter how it goes, once."""
    os.set_inheritable(told_fd, False)
    told = False

    def tell(text: bytes) -> None:
        nonlocal told
        if not told:
            told = True
            os.write(told_fd, text)
            os.close(told_fd)

    return tell


def _detach() -> None:
    """Takes the log for stdout and stderr. The rest client.start_daemon has done."""
    # What a supervisor blocks is handed down to us.
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    log_fd = _open_log()
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(log_fd)


def main() -> NoReturn:
    """Entry point of devproxyd."""
    parser = argparse.ArgumentParser(prog="devproxyd", description="Serves this user's jobs.")
    parser.add_argument("--version", action="version", version=f"devproxy {__version__}")
    parser.add_argument("--foreground", action="store_true", help="stay here, say on stderr")
    parser.add_argument(
        "--stay", action="store_true", help="serve until a signal, also without jobs: for a service"
    )
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default="",
        help="also serve other hosts there, that have the certificate of devproxy trust",
    )
    parser.add_argument(
        "--metrics",
        metavar="[HOST:]PORT",
        default="",
        help="answer Prometheus there (HOST: localhost); anybody who gets there may read",
    )
    parser.add_argument(
        "--log-format", choices=log_module.FORMATS, help="how its log and its agents' is written"
    )
    parser.add_argument(
        "--print",
        choices=share.NAMES,
        help="print a file for operators, and end (docs/operators.md)",
    )
    parser.add_argument("--told", type=int, help=argparse.SUPPRESS)  # by client.start_daemon
    arguments = parser.parse_args()
    if arguments.print:
        print(share.text(arguments.print), end="")
        sys.exit(0)
    if arguments.log_format:
        os.environ[log_module.FORMAT] = arguments.log_format
    wishes = Wishes(arguments.stay, arguments.listen, arguments.metrics)
    code = 0
    tell: Callable[[bytes], None] = _say_foreground
    try:
        if arguments.told is not None:
            tell = _teller(arguments.told)
            _detach()
        elif not arguments.foreground:
            if wishes != Wishes():
                raise Refused(
                    "--stay, --listen and --metrics are for a daemon in the foreground",
                    "give --foreground, or run it as a service (docs/operators.md)",
                )
            client.ensure_daemon()
            sys.exit(0)
        code = run(tell, wishes)
    except (DevproxyError, OSError) as error:
        log(f"cannot serve: {error}")
        tell(str(error).encode())
        code = error.exit_code if isinstance(error, DevproxyError) else 1
    sys.stdout.flush()
    os._exit(code)  # threads of calls that were cut off may hang about


def _say_foreground(text: bytes) -> None:
    if text == BUSY:
        log("another devproxyd serves this user")


if __name__ == "__main__":
    main()
