# SPDX-License-Identifier: Apache-2.0
"""The agents that restore a job: started by this daemon, which they outlive, and heard until the job runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from devproxy import runtime, state
from devproxy.control import client, messages, stage_note
from devproxy.control._pb import job_pb2 as pb
from devproxy.control._pb import job_pb2_grpc
from devproxy.control.coordinator_api import RESTORING, STARTING
from devproxy.control.devproxyd.log import log
from devproxy.control.devproxyd.stream import until_ended
from devproxy.control.quiet_grpc import grpc
from devproxy.errors import DevproxyError, Refused, RestoreError
from devproxy.node.spec import own_name
from devproxy.node.stages import Progress

# For imports and a state folder on a slow disk. Afterwards the agent's own events show that it lives.
AGENT_START_S = 120.0


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
        name = local_name(request)
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


def local_name(request: pb.RestoreRequest) -> str:
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


def watch(name: str, started: Started, context: grpc.ServicerContext) -> Iterator[pb.Event]:
    """Yields what the agent says about its restore. If the caller leaves, the agent goes on, unless it only waits for the
    job's other nodes: then the restore ends."""
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
            for event in until_ended(news, lambda: started.process.poll() is not None):
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
