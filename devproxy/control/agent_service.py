# SPDX-License-Identifier: Apache-2.0
"""The gRPC service JobAgent of one job, served by its supervisor on <job folder>/agent.sock.

A long operation runs in a thread of its own and is watched by the calls: a caller that goes away ends nothing. One
operation at a time is the coordinator's rule, not ours.

Threads: each call, and each operation, has a daemon thread: none of them can keep the supervisor from ending.
Locks: Operations._lock, Operation._changed; never both.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal as signals
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any, cast

from devproxy.control import messages, stage_note
from devproxy.control._pb import job_pb2 as pb
from devproxy.control._pb import job_pb2_grpc
from devproxy.control.coordinator_api import Coordinator
from devproxy.control.quiet_grpc import grpc
from devproxy.control.stage_note import StageNote
from devproxy.errors import DevproxyError, Refused
from devproxy.log import say
from devproxy.node.stages import Progress, Report

SOCKET_NAME = "agent.sock"
MOST_CALLS = 64
MOST_FOLLOWERS = 48  # calls that last as long as their caller likes; the rest is for verbs
# A caller that went away is noticed at this pace.
LOOK_S = 0.5
LOG_CHUNK_BYTES = 1 << 20


class ThreadPerCall(futures.Executor):
    """Daemon threads, made as needed: a call that waits for long takes no other's place and stops no exit."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        future: futures.Future[Any] = futures.Future()

        def work() -> None:
            future.set_running_or_notify_cancel()
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, name="call", daemon=True).start()
        return future


class Operation:
    """One long operation: what it said so far, and how it ended. Any number of calls watch it."""

    def __init__(self, verb: str, note: Callable[[str], None], asked: object = None) -> None:
        self.verb = verb
        self.asked = asked
        self._note = note
        self._changed = threading.Condition()
        # Of each stage the last news, and its number: what a late watcher wants to see, and bounded. Stages of
        # one operation may run side by side.
        self._news: dict[str, tuple[int, Progress]] = {}
        self._serial = 0
        self._result: pb.Result | None = None
        self._error: BaseException | None = None

    @property
    def over(self) -> bool:
        return self._result is not None or self._error is not None

    def report(self, progress: Progress) -> None:
        self._note(progress.stage)
        with self._changed:
            self._serial += 1
            self._news[progress.stage] = (self._serial, progress)
            self._changed.notify_all()

    def finish(self, result: pb.Result) -> None:
        with self._changed:
            self._result = result
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def watch(self, goes_on: Callable[[], bool]) -> Iterator[pb.Event]:
        """Its events until its end; raises what it raised. Ends early when goes_on() does not hold any more."""
        seen = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._serial > seen or self.over, LOOK_S)  # noqa: B023
                fresh = sorted((e for e in self._news.values() if e[0] > seen), key=lambda e: e[0])
                seen = self._serial
                result, error = self._result, self._error
            for _, progress in fresh:
                yield pb.Event(progress=messages.progress_to_pb(progress))
            if error is not None:
                raise error
            if result is not None:
                yield pb.Event(result=result)
                return
            if not goes_on():
                return


class Operations:
    """The operation under way, and else the last one."""

    def __init__(self, note_path: str) -> None:
        self._note = StageNote(note_path)
        self._lock = threading.Lock()
        self._shown: Operation | None = None
        self._running = 0

    def shown(self) -> Operation | None:
        with self._lock:
            return self._shown

    def begin(self, verb: str) -> Operation:
        with self._lock:
            return self._begin(verb)

    def _begin(self, verb: str, asked: object = None) -> Operation:
        operation = Operation(verb, self._note.write, asked)
        # One that is refused because another runs must not hide that other.
        if self._shown is None or self._shown.over:
            self._shown = operation
            self._note.write("start")
        self._running += 1
        return operation

    def ended(self) -> None:
        with self._lock:
            self._running -= 1

    def start(
        self, verb: str, work: Callable[[Report], pb.Result], asked: object = None
    ) -> Operation:
        """Runs it in a thread of its own. asked: who asks for the same while it runs gets the one that runs; None: nobody."""
        with self._lock:
            shown = self._shown
            if asked is not None and shown and shown.asked == asked and not shown.over:
                return shown
            operation = self._begin(verb, asked)

        def run() -> None:
            try:
                operation.finish(work(operation.report))
            except BaseException as error:
                if not isinstance(error, DevproxyError):
                    say(f"{verb}: {traceback.format_exc()}")
                operation.fail(error)
            finally:
                self.ended()

        threading.Thread(target=run, name=verb, daemon=True).start()
        return operation


class Followers:
    """Calls that follow something. They have a limit of their own, so that they keep no verb out."""

    def __init__(self, most: int, of: str) -> None:
        self._most, self._of = most, of
        self._lock = threading.Lock()
        self._now = 0

    def enter(self, context: grpc.ServicerContext) -> None:
        """Until the call ends. Raises Refused where there are too many."""
        with self._lock:
            if self._now >= self._most:
                raise Refused(
                    f"{self._now} calls follow {self._of} already (devproxy logs -f, watch, restore --wait)",
                    "end some of them; the job goes on",
                )
            self._now += 1
        if not context.add_callback(self._left):
            self._left()

    def _left(self) -> None:
        with self._lock:
            self._now -= 1


class Agent(job_pb2_grpc.JobAgentServicer):  # type: ignore[misc, unused-ignore]
    """Each verb of the service, over the coordinator."""

    def __init__(self, coordinator: Coordinator, operations: Operations) -> None:
        self._coordinator = coordinator
        self._operations = operations
        self._followers = Followers(MOST_FOLLOWERS, "this job")

    def Status(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.JobStatus:
        with _errors(context):
            return messages.status_to_pb(self._coordinator.status())

    def Checkpoint(
        self, request: pb.CheckpointRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.Event]:
        def work(report: Report) -> pb.Result:
            image = self._coordinator.checkpoint(
                cut_wait_ms=_cut_wait(request), strict=request.strict, report=report
            )
            return pb.Result(image=messages.image_to_pb(image), job=self._job())

        return self._stream("checkpoint", work, context)

    def Suspend(
        self, request: pb.CheckpointRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.Event]:
        def work(report: Report) -> pb.Result:
            image = self._coordinator.suspend(
                strict=request.strict, cut_wait_ms=_cut_wait(request), report=report
            )
            return pb.Result(image=messages.image_to_pb(image), job=self._job())

        return self._stream("suspend", work, context)

    def Resume(
        self, request: pb.ResumeRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.Event]:
        def work(report: Report) -> pb.Result:
            self._coordinator.resume(gpus=list(request.gpus) or None, report=report)
            return pb.Result(job=self._job())

        return self._stream("resume", work, context)

    def Migrate(
        self, request: pb.MigrateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.Event]:
        def work(report: Report) -> pb.Result:
            facts = self._coordinator.migrate(to=list(request.to), anew=request.anew, report=report)
            return pb.Result(facts_json=json.dumps(facts), job=self._job())

        return self._stream("migrate", work, context)

    def Resize(
        self, request: pb.ResizeRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.Event]:
        def work(report: Report) -> pb.Result:
            facts = self._coordinator.resize(
                gpus=list(request.gpus), onto=list(request.onto), report=report
            )
            return pb.Result(facts_json=json.dumps(facts), job=self._job())

        # A scheduler that has lost its connection asks again, and wants to hear how that one ends.
        asked = ("resize", tuple(request.gpus), tuple(request.onto))
        return self._stream("resize", work, context, asked)

    def Watch(self, request: pb.Empty, context: grpc.ServicerContext) -> Iterator[pb.Event]:
        operation = self._operations.shown()
        if operation is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "no operation so far")
        with _errors(context):
            self._followers.enter(context)
            yield from operation.watch(context.is_active)

    def Check(self, request: pb.CheckpointRequest, context: grpc.ServicerContext) -> pb.CheckResult:
        with _errors(context):
            found = self._coordinator.check(strict=request.strict, report=lambda _: None)
            return pb.CheckResult(warnings=messages.packed(found))

    def History(self, request: pb.HistoryRequest, context: grpc.ServicerContext) -> pb.Spans:
        with _errors(context):
            found = self._coordinator.history(request.since_ns)
            return pb.Spans(spans=(pb.Span(**dataclasses.asdict(span)) for span in found))

    def Elsewhere(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.ServersElsewhere:
        with _errors(context):
            return messages.elsewhere_to_pb(self._coordinator.elsewhere())

    def CountImages(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.Empty:
        with _errors(context):
            self._coordinator.count_images()
            return pb.Empty()

    def Kill(self, request: pb.KillRequest, context: grpc.ServicerContext) -> pb.Empty:
        with _errors(context):
            if request.signal not in signals.valid_signals():
                raise Refused(f"there is no signal {request.signal}", "see: kill -l")
            self._coordinator.kill(request.signal)
            return pb.Empty()

    def Logs(self, request: pb.LogsRequest, context: grpc.ServicerContext) -> Iterator[pb.LogChunk]:
        with _errors(context):
            self._followers.enter(context)
            for data in self._coordinator.follow_log(request.offset):
                for start in range(0, len(data), LOG_CHUNK_BYTES):
                    yield pb.LogChunk(data=data[start : start + LOG_CHUNK_BYTES])
                if not context.is_active():
                    return
                if not data and not request.follow:  # nothing new for now
                    return

    def _job(self) -> pb.JobStatus:
        return messages.status_to_pb(self._coordinator.status())

    def _stream(
        self,
        verb: str,
        work: Callable[[Report], pb.Result],
        context: grpc.ServicerContext,
        asked: object = None,
    ) -> Iterator[pb.Event]:
        operation = self._operations.start(verb, work, asked)
        with _errors(context):
            yield from operation.watch(context.is_active)


def _cut_wait(request: pb.CheckpointRequest) -> int | None:
    return request.cut_wait_ms if request.HasField("cut_wait_ms") else None


@contextmanager
def _errors(context: grpc.ServicerContext) -> Iterator[None]:
    """An error of the coordinator ends the call with its details."""
    try:
        yield
    except GeneratorExit:
        raise
    except Exception as error:
        if not isinstance(error, DevproxyError):
            say(f"control: {traceback.format_exc()}")
        messages.abort(context, error)


class AgentHandle:
    """The running service."""

    def __init__(self, server: grpc.Server, operations: Operations, socket_path: str) -> None:
        self._server = server
        self._operations = operations
        self.socket_path = socket_path

    @contextmanager
    def operation(
        self, verb: str, result: Callable[[], dict[str, Any]] | None = None
    ) -> Iterator[Report]:
        """For an operation that no call began (a restore, a periodic checkpoint): callers of Watch see it.

        with handle.operation("restore") as report: ...   an exception goes to the watchers and on to the caller.
        """
        operation = self._operations.begin(verb)
        try:
            yield operation.report
            facts = result() if result else {}
            operation.finish(pb.Result(facts_json=json.dumps(facts)))
        except BaseException as error:
            operation.fail(error)
            raise
        finally:
            self._operations.ended()

    def stop(self, grace_s: float = 1.0) -> None:
        """Takes no new calls; gives those under way grace_s to hear how their operation ended; ends them."""
        self._server.stop(grace_s).wait(grace_s + 2.0)  # a job's end never waits for a caller
        try:
            os.unlink(self.socket_path)
        except FileNotFoundError:
            pass


def make_server(
    socket_path: str, add: Callable[[grpc.Server], None], most_calls: int = MOST_CALLS
) -> grpc.Server:
    """A started server on that socket, 0600. What is at that path now belongs to nobody that lives.

    The guard is the folder, 0700 and ours: gRPC's Python does not show the peer's credentials.
    Raises Refused where the socket cannot be made.
    """
    server = grpc.server(
        cast(futures.ThreadPoolExecutor, ThreadPerCall()),  # gRPC asks for any Executor
        options=messages.CHANNEL_OPTIONS,
        maximum_concurrent_rpcs=most_calls,
    )
    add(server)
    try:
        os.unlink(socket_path)
    except FileNotFoundError:
        pass
    try:
        if server.add_insecure_port(messages.address(socket_path)) == 0:
            raise RuntimeError("gRPC gives no reason")
        os.chmod(socket_path, 0o600)
    except (RuntimeError, OSError) as error:
        raise Refused(
            f"the control socket {socket_path} cannot be made ({error})",
            "see the folder's permissions and the space left",
        ) from None
    server.start()
    return server


def serve(coordinator: Coordinator, socket_path: str) -> AgentHandle:
    """Serves JobAgent on that socket, in threads of its own. Raises Refused where the socket cannot be made."""
    operations = Operations(os.path.join(os.path.dirname(socket_path), stage_note.NAME))

    def add(server: grpc.Server) -> None:
        job_pb2_grpc.add_JobAgentServicer_to_server(Agent(coordinator, operations), server)

    return AgentHandle(make_server(socket_path, add), operations, socket_path)
