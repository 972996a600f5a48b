# SPDX-License-Identifier: Apache-2.0
"""The verbs of the service Devproxy: to the job's agent, and its answers back."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

from devproxy import __version__, runtime
from devproxy.control import agent_service, client, messages, stage_note
from devproxy.control._pb import job_pb2 as pb
from devproxy.control.devproxyd import restores
from devproxy.control.devproxyd.calls import Calls
from devproxy.control.devproxyd.interrupted import (
    FAILED,
    stopped,
    supervisor_lost,
    verb_stopped,
)
from devproxy.control.devproxyd.log import log
from devproxy.control.devproxyd.stream import until_ended
from devproxy.control.quiet_grpc import grpc
from devproxy.errors import DevproxyError, Refused

MOST_FOLLOWERS = 192
# For the agent of a job that has just begun. With the agent's own time it is less than a caller of ours has.
KILL_WAITS_S = 3.0
WAIT_LOOK_S = 0.2


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
        self.calls = Calls()
        self.agents = restores.Agents()
        self._followers = agent_service.Followers(MOST_FOLLOWERS, "jobs of this user")

    def Ping(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.DaemonInfo:
        with self.calls.running(context):
            return pb.DaemonInfo(version=__version__, pid=os.getpid())

    def Leave(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.Empty:
        with self.calls.running(context):
            self.calls.leave_asked = True
            return pb.Empty()

    def ListJobs(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.JobList:
        with self._call("list", "", context):
            jobs = runtime.list_jobs()
            with futures.ThreadPoolExecutor(8) as pool:  # one that hangs delays no other
                found = pool.map(lambda job: client.agent_status(*job), jobs)
            return pb.JobList(jobs=[messages.status_to_pb(status) for status in found])

    def Status(self, request: pb.JobRequest, context: grpc.ServicerContext) -> pb.JobStatus:
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
        if not context.peer().startswith("unix:"):
            # Code would come with an environment (LD_PRELOAD, PYTHONPATH); another host's is of no use here anyway.
            request.ClearField("environment")
            request.ClearField("cwd")
        with self._call("restore", request.name, context):
            runtime.check_job_name(request.name)
            if request.wait:
                self._followers.enter(context)
            started = self.agents.start(request)
            yield from restores.watch(restores.local_name(request), started, context)
            while request.wait and context.is_active():
                code = started.process.poll()
                if code is not None:
                    code = 128 - code if code < 0 else code
                    yield pb.Event(result=pb.Result(facts_json=json.dumps({"exit_code": code})))
                    return
                time.sleep(WAIT_LOOK_S)

    @contextmanager
    def _call(self, verb: str, job: str, context: grpc.ServicerContext) -> Iterator[None]:
        """Counts the call; an error ends it with its details."""
        with self.calls.running(context):
            try:
                yield
            except Exception as error:
                if not context.is_active():
                    return  # the caller has left, or has its answer: there is nobody to tell
                if isinstance(error, DevproxyError):
                    log(f"{verb} job={job or '-'} failed: {error}")
                else:
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
                    yield from until_ended(
                        stream,
                        lambda: not runtime.is_alive(path),
                        client.WentAway(client.supervisor_of(path)),
                        lambda: stopped(path),
                    )
            except client.SupervisorStopped as error:
                if verb not in FAILED:
                    raise
                raise verb_stopped(verb, name, note.read() or "start", error) from None
            except client.WentAway:
                if verb not in FAILED:
                    raise
                raise supervisor_lost(verb, name, path, note.read() or "start") from None
