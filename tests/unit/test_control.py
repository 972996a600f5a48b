# SPDX-License-Identifier: Apache-2.0
"""The control services in one process: messages, errors with their details, long operations, what the CLI is given."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devproxy import errors, runtime
from devproxy.checkpoint.manifest import Image
from devproxy.cli import progress, verbs
from devproxy.control import agent_service, client, messages, stores
from devproxy.control import coordinator_api as api
from devproxy.control._pb import job_pb2 as pb
from devproxy.control.devproxyd import interrupted, stream
from devproxy.control.devproxyd import service as daemon_service
from devproxy.control.devproxyd.calls import Calls
from devproxy.control.quiet_grpc import grpc
from devproxy.errors import CheckpointError, DevproxyError, Refused, RestoreError
from devproxy.node.stages import Progress
from tests.fake_agent import BUG, FAIL, FakeCoordinator

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="devproxy-test-") as path:  # short: sockets are in it
        monkeypatch.setenv("DEVPROXY_SHM_DIR", path)
        yield path


@pytest.fixture
def fake(folder: str) -> Iterator[FakeCoordinator]:
    coordinator = FakeCoordinator("j", folder)
    handle = agent_service.serve(coordinator, os.path.join(folder, "agent.sock"))
    yield coordinator
    coordinator.ended.set()
    handle.stop(0.1)


def checkpoint(folder: str, news: list[Progress], **request: Any) -> client.Result:
    with client.agent(folder) as stub:
        return client.follow(stub.Checkpoint(pb.CheckpointRequest(**request)), news.append)


# --- messages ---


def test_facts_travel_whole() -> None:
    status = FakeCoordinator("j", "/").status()
    assert messages.status_from_pb(messages.status_to_pb(status)) == status
    due = dataclasses.replace(status, next_checkpoint_unix_s=0.0, checkpointable=False, why_not="x")
    assert messages.status_from_pb(messages.status_to_pb(due)) == due
    image = api.ImageFacts("i", "j", "id", 1.5, 1 << 40, warnings=["a", "ü"], stages={"cut": 0.5})
    assert messages.image_from_pb(messages.image_to_pb(image)) == image
    news = Progress("device", "5 of 7", 5, 7)
    assert messages.progress_from_pb(messages.progress_to_pb(news)) == news


class OfAnother(Refused):
    """A class that the other side does not know, with a constructor of its own."""

    def __init__(self) -> None:
        super().__init__("not this", "do that")


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (Refused("no", "do"), Refused),
        (OfAnother(), Refused),
        (CheckpointError("cut", "it ended", "see", "running", "gpu0"), CheckpointError),
        (RestoreError("fetch", "gone"), RestoreError),
        (DevproxyError("x" * 5000, "ü" * 5000), DevproxyError),
        (ZeroDivisionError("a bug"), DevproxyError),
    ],
)
def test_errors_travel_whole(error: Exception, becomes: type) -> None:
    back = messages.error_from_pb(messages.error_to_pb(error))
    assert type(back) is becomes
    if isinstance(error, DevproxyError) and len(str(error)) < 2000:
        assert str(back) == str(error)
        assert back.exit_code == error.exit_code
        for name in ("stage", "object", "state"):
            assert getattr(back, name, "") == getattr(error, name, "")
    if isinstance(error, ZeroDivisionError):
        assert "ZeroDivisionError: a bug" in str(back)


def test_an_error_of_a_newer_version() -> None:
    for kind in ("SomethingNew", "GRPC_CODES", "annotations"):
        back = messages.error_from_pb(pb.ErrorInfo(kind=kind, what="w", exit_code=4))
        assert (type(back), back.what, back.exit_code) == (DevproxyError, "w", 4)


def test_every_error_has_a_code() -> None:
    ours = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception)]
    order = [cls for cls, _ in errors.GRPC_CODES]
    for cls in ours:
        assert any(issubclass(cls, known) for known in order), cls
    # A class below another one in the tree stands before it.
    for i, above in enumerate(order):
        assert not any(issubclass(below, above) for below in order[i + 1 :]), above


def test_a_machine_without_room_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVPROXY_STATE_DIR", "/some/state")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/some/file")
    error = messages.error_from_pb(messages.error_to_pb(full))
    assert error.what == "No space left on device for /some/file"
    assert "make room in the state folder /some/state" in error.remedy
    assert "internal error" in messages.error_to_pb(OSError(errno.EIO, "x")).what


@pytest.mark.parametrize("text", ["plain ü", "a\udcffb\udc80", "\udce9", ""])
def test_odd_bytes_travel(text: str) -> None:
    value = {text: [text, 1, None], "n": 2}
    assert messages.unpacked(messages.packed(value)) == value
    messages.packed(text).encode()
    error = messages.error_from_pb(messages.error_to_pb(RestoreError("fetch", text, text, text)))
    assert isinstance(error, RestoreError)
    assert (error.what, error.state) == (text, text)


# --- the service ---


def test_a_checkpoint(fake: FakeCoordinator, folder: str) -> None:
    news: list[Progress] = []
    result = checkpoint(folder, news, cut_wait_ms=0)
    assert result.image is not None
    assert result.image.device_bytes == 5 << 30
    assert result.image.stages == {"cut": 0.1, "device": 0.2}
    assert result.job is not None
    assert (result.job.phase, result.job.images) == ("running", 1)
    assert list(dict.fromkeys(n.stage for n in news)) == ["cut", "device", "upload", "commit"]
    assert news[-1].done_bytes == news[-1].total_bytes
    checkpoint(folder, news)
    assert Path(folder, "done").read_text() == "checkpoint 0\ncheckpoint None\n"
    assert os.stat(os.path.join(folder, "agent.sock")).st_mode & 0o777 == 0o600


def test_a_failure_says_all(fake: FakeCoordinator, folder: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        checkpoint(folder, [], cut_wait_ms=FAIL)
    error = caught.value
    assert (error.stage, error.object, error.state) == ("device", "gpu0", "running")
    assert str(error) == (
        "checkpoint failed at device: the server of GPU 0 ended [gpu0]: see gpu0.log (the job: running)"
    )
    with pytest.raises(Refused, match="fd 7"):
        checkpoint(folder, [], strict=True)
    with pytest.raises(DevproxyError, match="internal error: ValueError: a bug"):
        checkpoint(folder, [], cut_wait_ms=BUG)
    assert checkpoint(folder, []).image is not None  # and it serves on


def test_followers_keep_no_verb_out(fake: FakeCoordinator, folder: str) -> None:
    """As many as a user likes; those that are too many are told so."""
    with client.agent(folder) as stub:
        following, refused = [], 0
        for _ in range(agent_service.MOST_CALLS + 6):
            call = stub.Logs(pb.LogsRequest(follow=True))
            try:
                next(call)
                following.append(call)
            except grpc.RpcError as error:
                refused += 1
                carried = messages.carried_error(error)
                assert isinstance(carried, Refused)
                assert "calls follow this job already" in carried.what
        assert len(following) == agent_service.MOST_FOLLOWERS
        assert checkpoint(folder, []).image is not None
        for call in following:
            call.cancel()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:  # their places are free again
            call = stub.Logs(pb.LogsRequest(follow=True))
            with contextlib.suppress(grpc.RpcError):
                next(call)
                break
        else:
            pytest.fail("nobody may follow any more")
        stub.Kill(pb.KillRequest(signal=15))


def test_the_other_verbs(fake: FakeCoordinator, folder: str) -> None:
    with client.agent(folder) as stub:
        result = client.follow(stub.Suspend(pb.CheckpointRequest()), lambda _: None)
        assert result.job is not None
        assert result.job.phase == "suspended"
        result = client.follow(stub.Resume(pb.ResumeRequest(gpus=[3])), lambda _: None)
        assert result.job is not None
        assert (result.job.phase, result.job.gpus) == ("running", [3])
        result = client.follow(stub.Migrate(pb.MigrateRequest(to=[1, 2])), lambda _: None)
        moved = {"gpus": [1, 2], "from_gpus": [3]}
        assert result.facts == moved | {"still_s": 0.5, "device_bytes": 1 << 20}
        assert client.ask_agent(folder).gpus == [1, 2]
        result = client.follow(stub.Resize(pb.ResizeRequest(gpus=[4, 4])), lambda _: None)
        assert client.ask_agent(folder).gpus == [4, 4]
    with pytest.raises(Refused, match="suspend it first"), client.agent(folder) as stub:
        client.follow(stub.Resume(pb.ResumeRequest()), lambda _: None)
    with pytest.raises(Refused, match="no signal 99"), client.agent(folder) as stub:
        stub.Kill(pb.KillRequest(signal=99))


def test_logs(fake: FakeCoordinator, folder: str) -> None:
    with client.agent(folder) as stub:
        assert [c.data for c in stub.Logs(pb.LogsRequest(offset=4))][0] == b"two\n"
        following = stub.Logs(pb.LogsRequest(offset=0, follow=True))
        assert next(following).data == b"one\ntwo\n"
        fake.ended.set()
        assert b"".join(c.data for c in following) == b"three\n"


def test_a_caller_that_leaves_ends_nothing(fake: FakeCoordinator, folder: str) -> None:
    fake.pace_s = 0.1
    with client.agent(folder) as stub:
        stream = stub.Checkpoint(pb.CheckpointRequest(cut_wait_ms=1))
        next(stream)
        stream.cancel()
    with pytest.raises(Refused, match="under way"):  # it runs, and hides nothing:
        checkpoint(folder, [])
    news: list[Progress] = []
    with client.agent(folder) as stub:
        result = client.follow(stub.Watch(pb.Empty()), news.append)
    assert result.image is not None
    assert result.image.id == "j-1"
    assert news[0].stage == "cut"
    assert news[-1].stage == "commit"


def test_the_same_resize_again_is_the_one_that_runs(fake: FakeCoordinator, folder: str) -> None:
    """As of a scheduler that has lost its connection; other GPUs are another resize."""
    fake.pace_s = 0.1
    wanted = pb.ResizeRequest(gpus=[5])
    with client.agent(folder) as stub:
        first = stub.Resize(wanted)
        next(first)
        for other in (pb.ResizeRequest(gpus=[6]), pb.ResizeRequest(onto=[5])):
            with pytest.raises(Refused, match="under way"), client.agent(folder) as second:
                client.follow(second.Resize(other), lambda _: None)
        news: list[Progress] = []
        again = client.follow(stub.Resize(wanted), news.append)
        assert again.facts == client.follow(first, lambda _: None).facts
        assert (again.facts["from_gpus"], again.facts["gpus"]) == ([0], [5])
        assert news[-1].stage == "restore"
        fake.gpus = [7]  # it is over, so that is a resize of its own
        assert client.follow(stub.Resize(wanted), lambda _: None).facts["from_gpus"] == [7]


def test_watchers_of_an_operation_that_no_call_began(folder: str) -> None:
    coordinator = FakeCoordinator("j", folder)
    handle = agent_service.serve(coordinator, os.path.join(folder, "agent.sock"))
    with pytest.raises(DevproxyError, match="no operation so far"), client.agent(folder) as stub:
        client.follow(stub.Watch(pb.Empty()), lambda _: None)
    caught: list[BaseException] = []
    watches = threading.Event()

    def watch() -> None:
        try:
            with client.agent(folder) as stub:
                client.follow(stub.Watch(pb.Empty()), lambda _: watches.set())
        except DevproxyError as error:
            caught.append(error)

    thread = threading.Thread(target=watch)
    with pytest.raises(RestoreError), handle.operation("restore") as report:
        report(Progress("fetch", "chunks"))
        thread.start()
        assert watches.wait(30)
        raise RestoreError("fetch", "a chunk is damaged")
    handle.stop()  # at once, as an agent that ends: the watcher hears it still
    thread.join(10)
    assert [str(e) for e in caught] == ["restore failed at fetch: a chunk is damaged"]
    assert not os.path.exists(handle.socket_path)


def test_a_socket_that_cannot_be_made(folder: str) -> None:
    with pytest.raises(Refused, match="control socket"):
        agent_service.serve(FakeCoordinator("j", folder), f"{folder}/missing/agent.sock")


def test_a_path_with_odd_characters(folder: str) -> None:
    odd = os.path.join(folder, "a%41 #?ü")
    os.mkdir(odd)
    handle = agent_service.serve(FakeCoordinator("j", odd), os.path.join(odd, "agent.sock"))
    assert client.ask_agent(odd).job == "j"
    handle.stop(0)


def test_a_process_may_fork_beside_the_service(fake: FakeCoordinator, folder: str) -> None:
    """devproxy-run starts processes while calls are under way."""
    fake.pace_s = 0.05
    with client.agent(folder) as stub:
        stream = stub.Checkpoint(pb.CheckpointRequest())
        next(stream)
        for _ in range(3):
            if (pid := os.fork()) == 0:
                os._exit(3)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        assert client.follow(stream, lambda _: None).image is not None


# --- a job's folder without an agent ---


def test_jobs_without_an_agent(folder: str) -> None:
    job = runtime.create_job("plain")
    assert client.agent_status("plain", job.path, True).phase == "starting"
    Path(job.path, "job.json").write_text('{"gpus": 2, "device": "soft", "pid": 5}')
    status = client.agent_status("plain", job.path, True)
    assert (status.phase, status.gpus, status.checkpointable) == ("running", [0, 1], False)
    Path(job.path, "agent.sock").touch()  # of an agent that died
    assert "went away" in client.agent_status("plain", job.path, True).why_not
    assert client.agent_status("plain", job.path, False).phase == "gone"
    assert client.find_job("") == ("plain", job.path)
    other = runtime.create_job("other")
    with pytest.raises(Refused, match="there are 2 jobs: other, plain"):
        client.find_job("")
    runtime.remove_job(other)
    runtime.remove_job(job)
    with pytest.raises(Refused, match="no job lives"):
        client.find_job("")
    with pytest.raises(Refused, match="there is no job 'plain'"):
        client.find_job("plain")


# A supervisor that has its job's folder, and serves nothing yet. The note says whether it waits for other nodes.
WITHOUT_AGENT = """
import json, os, sys, time
from devproxy import runtime
from devproxy.control.stage_note import NAME, StageNote
folder = runtime.create_job("w")
if sys.argv[1]:
    StageNote(os.path.join(folder.path, NAME)).write(sys.argv[1])
if sys.argv[2]:
    with open(os.path.join(folder.path, "job.json"), "w") as file:
        json.dump({"gpus": [0], "pid": os.getpid()}, file)
print(folder.path, flush=True)
time.sleep(100)
"""


@contextlib.contextmanager
def without_agent(
    stage: str, *, job_file: bool = True
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    words = [sys.executable, "-c", WITHOUT_AGENT, stage, "yes" if job_file else ""]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.communicate()


def kill(number: int) -> None:
    """As devproxyd does it."""
    with grpc_server() as stub:
        stub.Kill(pb.KillRequest(job="w", signal=number))


@contextlib.contextmanager
def grpc_server() -> Iterator[Any]:
    from devproxy.control._pb import job_pb2_grpc

    path = os.path.join(os.environ["DEVPROXY_SHM_DIR"], "d")
    service = daemon_service.Service()
    server = agent_service.make_server(
        path, lambda server: job_pb2_grpc.add_DevproxyServicer_to_server(service, server)
    )
    try:
        with messages.open_channel(path) as channel, client.translated("devproxyd"):
            yield job_pb2_grpc.DevproxyStub(channel)
    finally:
        server.stop(None)


def test_a_job_that_waits_for_its_other_nodes(folder: str) -> None:
    """It is starting, and a signal that ends it reaches it; there is nothing that could take another one."""
    with without_agent("meet") as (path, process):
        status = client.agent_status("w", path, True)
        assert (status.phase, status.why_not) == ("starting", "it waits for the job's other nodes")
        with pytest.raises(Refused, match="kill of job w: it waits for the job's other nodes"):
            kill(signal.SIGUSR1)
        assert process.poll() is None
        kill(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM


def test_a_node_that_has_not_met_the_first_one(folder: str) -> None:
    """It does not know which job it belongs to, so there is no job.json."""
    with without_agent("", job_file=False) as (path, process):
        assert client.agent_status("w", path, True).phase == "starting"
        kill(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL


def test_a_job_whose_agent_comes_later_is_killed(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that has just begun the agent is waited for. Where none comes, its supervisor passes the signal on."""
    with without_agent("") as (path, process):
        coordinator = FakeCoordinator("w", path)
        handles: list[agent_service.AgentHandle] = []

        def serve() -> None:
            handles.append(agent_service.serve(coordinator, os.path.join(path, "agent.sock")))

        late = threading.Timer(0.5, serve)
        late.start()
        kill(signal.SIGUSR1)
        late.join()
        assert Path(path, "done").read_text() == f"kill {signal.SIGUSR1:d}\n"
        handles[0].stop(0)
        monkeypatch.setattr(daemon_service, "KILL_WAITS_S", 0.2)
        kill(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM


def test_a_number_that_another_process_got_is_not_killed(folder: str) -> None:
    with without_agent("meet") as (path, process), subprocess.Popen(["sleep", "100"]) as other:
        Path(path, "job.json").write_text(json.dumps({"gpus": [0], "pid": other.pid}))
        try:
            with pytest.raises(DevproxyError, match="the supervisor of job 'w' is gone"):
                kill(signal.SIGTERM)
            assert other.poll() is None
            assert process.poll() is None
        finally:
            other.kill()


# --- the daemon's lock and its files in the runtime folder ---


def test_the_daemons_files_are_respected(folder: str) -> None:
    lock = runtime.take_daemon_lock()
    assert lock is not None
    assert runtime.take_daemon_lock() is None
    runtime.remove_job(runtime.create_job("j"))  # the last job
    root = Path(runtime.root_path())
    assert sorted(p.name for p in root.iterdir()) == [".devproxyd.lock"]
    Path(runtime.daemon_socket()).touch()
    runtime.give_daemon_lock_back(lock)
    assert not root.exists()


def test_what_a_killed_daemon_left_is_swept(folder: str) -> None:
    lock = runtime.take_daemon_lock()
    assert lock is not None
    Path(runtime.daemon_socket()).touch()
    os.close(lock)
    runtime.sweep()
    assert os.listdir(folder) == []


class NotTaken(Exception):
    """What gRPC's abort raises."""


class Told:
    """What the caller hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def send_initial_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self.heard += [key for key, _ in metadata]

    def abort(self, code: Any, details: str) -> None:
        self.heard.append(code.name)
        raise NotTaken


def test_when_the_daemon_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    calls = Calls()
    assert not calls.should_leave(10)
    now += 9
    calls.busy()
    now += 9
    assert not calls.should_leave(10)
    told = Told()
    with calls.running(told):
        assert told.heard == ["devproxy-taken"]
        now += 100
        assert not calls.should_leave(10)
    assert not calls.should_leave(10)
    now += 10
    assert calls.should_leave(10)
    with pytest.raises(NotTaken), calls.running(told):
        raise AssertionError("a call was taken by a daemon that leaves")
    assert told.heard == ["devproxy-taken", "UNAVAILABLE"]


@pytest.mark.parametrize("how", ["asked", "signal"])
def test_a_daemon_that_leaves_takes_no_call(how: str) -> None:
    calls = Calls()
    told = Told()
    with calls.running(told):
        calls.leave_asked = how == "asked"
        if how == "signal":
            calls.take_no_more()
    assert calls.should_leave(10)
    with pytest.raises(NotTaken), calls.running(told):
        raise AssertionError("it was taken")


# --- the command line ---


def test_gpus() -> None:
    assert verbs.parse_gpus(None) == []
    assert verbs.parse_gpus(["0,2", "3"]) == [0, 2, 3]
    assert verbs.parse_gpus(["0,0", "1"]) == [0, 0, 1]  # shared
    for bad in (["0,,1"], ["x"], ["-1"], ["9999"], [""], ["²"]):
        with pytest.raises(Refused):
            verbs.parse_gpus(bad)


def test_cut_wait() -> None:
    for text, milliseconds in (("500ms", 500), ("2s", 2000), ("0", 0), ("0.5s", 500), ("0ms", 0)):
        assert verbs.parse_wait_ms(text) == milliseconds
    assert verbs.parse_wait_ms(None) is None
    for bad in ("5", "-1s", "nan", "nans", "infs", "1e99s", "ms", "", "soon"):
        with pytest.raises(Refused):
            verbs.parse_wait_ms(bad)


def test_signals() -> None:
    assert [verbs.parse_signal(s) for s in ("9", "KILL", "sigterm")] == [9, 9, 15]
    for bad in ("0", "99", "-9", "SIG", "x", ""):
        with pytest.raises(Refused):
            verbs.parse_signal(bad)


class FakeStore:
    url = "file:///s"

    def __init__(self, *given: tuple[str, str, bool]) -> None:
        self._images = [
            Image(
                i, j, j, created=n, sequence=n, whole=w, problem="" if w else "a chunk is damaged"
            )
            for n, (i, j, w) in enumerate(given)
        ]

    def images(self) -> list[Any]:
        return self._images

    def older_whole(self, image_id: str, say: object) -> str | None:
        del image_id, say
        return next((i.id for i in self._images if i.whole), None)


def test_which_image_is_meant() -> None:
    store: Any = FakeStore(
        ("a-1", "a", True), ("a-2", "a", True), ("b-17", "b", True), ("a-3", "a", False)
    )
    for text, image in (("a-1", "a-1"), ("a", "a-2"), ("latest", "b-17"), ("b-", "b-17")):
        assert stores.find_image([store], text)[1].id == image
    with pytest.raises(Refused, match="not whole: a chunk is damaged: use an older one: .* a-1"):
        stores.find_image([store], "a-3")
    with pytest.raises(Refused, match="beginning of 2 images: a-1, a-2"):
        stores.find_image([store], "a-")
    for nothing in ("c", "a-9"):
        with pytest.raises(Refused, match="no whole image"):
            stores.find_image([store], nothing)
    with pytest.raises(Refused, match="did you mean latest-job"):
        stores.find_image([FakeStore(("x", "latest-job", True))], "latst-job")  # type: ignore[list-item]
    with pytest.raises(Refused, match="no whole image"):
        stores.find_image([FakeStore()], "latest")  # type: ignore[list-item]


@pytest.mark.parametrize("mode", progress.MODES)
def test_progress_is_shown(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.Show(mode, "checkpoint") as show:
        for stage, done, total in (
            ("cut", 0, 0),
            ("device", 1, 4),
            ("host", 0, 0),
            ("device", 4, 4),
        ):
            show(Progress(stage, f"[red]{stage}[/]", done, total))
    out, err = capsys.readouterr()
    assert out == ""
    if mode == "json":
        assert err.count("\n") == 4
    if mode in ("auto", "lines"):  # no terminal here
        assert err.splitlines() == [
            f"devproxy: checkpoint: {stage}: [red]{stage}[/]" for stage in ("cut", "device", "host")
        ]


# --- what a job's start must not pay for ---


@pytest.mark.parametrize(
    "imports", ["devproxy.cli.run", "devproxy.control.coordinator_api, devproxy.control.client"]
)
def test_nothing_heavy_is_imported(imports: str) -> None:
    body = f"import sys, {imports}; print([m for m in ('grpc', 'google.protobuf', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", body], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


# --- an agent that ends, and a channel that never says so ---


def test_the_news_of_a_channel_that_goes_deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing wakes its reader again; what had been said by then is told, and the end of the process ends it."""
    monkeypatch.setattr(stream, "LOOK_S", 0.01)
    monkeypatch.setattr(stream, "LAST_WORDS_S", 0.1)
    never, dead = threading.Event(), threading.Event()

    def deaf() -> Iterator[str]:
        yield "one"
        dead.set()
        yield "two"  # told after the end
        never.wait()

    told = []
    with pytest.raises(DevproxyError, match="gone"):
        for event in stream.until_ended(deaf(), dead.is_set, DevproxyError("gone")):
            told.append(event)
    assert told == ["one", "two"]
    assert list(stream.until_ended(deaf(), dead.is_set)) == ["one", "two"]
    never.set()


def test_the_news_of_a_living_agent_may_be_silent_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LOOK_S", 0.01)
    monkeypatch.setattr(stream, "LAST_WORDS_S", 0.0)

    def slow() -> Iterator[int]:
        time.sleep(0.2)
        yield 1

    assert list(stream.until_ended(slow(), lambda: False, DevproxyError("gone"))) == [1]


def test_a_supervisor_that_lives_is_not_replaced_by_a_restore(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection broke, say because it was stopped; the process is there."""
    monkeypatch.setattr(interrupted, "REST_ENDS_S", 0.1)
    job = runtime.create_job("j")
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        Path(job.path, "job.json").write_text(json.dumps({"pid": sleeper.pid}))
        error = str(interrupted.supervisor_lost("checkpoint", "j", job.path, "cut"))
        assert f"process {sleeper.pid}" in error
        assert "devproxy restore" not in error
    finally:
        sleeper.kill()
        sleeper.wait()
    error = str(interrupted.supervisor_lost("checkpoint", "j", job.path, "cut"))
    assert "devproxy restore j" in error
    runtime.remove_job(job)


def test_the_error_of_a_channel_arrives_as_it_is() -> None:
    def fails() -> Iterator[int]:
        yield 1
        raise RestoreError("fetch", "no such chunk", "try another", "nothing runs")

    events = stream.until_ended(fails(), lambda: False)
    assert next(events) == 1
    with pytest.raises(RestoreError, match="no such chunk"):
        next(events)
