# SPDX-License-Identifier: Apache-2.0
"""Cuts, handovers and restores of real servers under real programs, without CRIU: the job's process lives on."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from devproxy.proxy import stats
from devproxy.proxy.control_channel import ControlChannel, ServerError, ServerGone
from tests.integration.test_programs import BUILD, LIB, build_kernels, build_program

MEMORY_BYTES = 1 << 30


class OneServer:
    """A devproxy-server in a job folder, with its lease held here."""

    def __init__(
        self, folder: Path, *more: str, ledger: str = "ledger", env: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        lease_read, self.lease = os.pipe()
        ready_read, ready_write = os.pipe()
        command = [
            LIB / "devproxy-server",
            "--job",
            "cut",
            "--job-dir",
            folder,
            "--gpu",
            "0",
            "--device",
            "soft",
        ]
        command += [
            "--gpu-memory",
            str(MEMORY_BYTES),
            "--ledger",
            folder / ledger,
            "--lease-fd",
            str(lease_read),
        ]
        command += ["--ready-fd", str(ready_write), *more]
        self.process = subprocess.Popen(
            [str(c) for c in command], pass_fds=(lease_read, ready_write), env=os.environ | (env or {}),
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        os.close(lease_read)
        os.close(ready_write)
        with os.fdopen(ready_read) as ready:
            self.ready = ready.read().strip()

    def control(self) -> ControlChannel:
        return ControlChannel(str(self.folder), 0)

    def end(self) -> None:
        if self.lease >= 0:
            os.close(self.lease)
        self.lease = -1
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stderr:
            self.process.stderr.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="devproxy-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def servers(folder: Path) -> Iterator[list[OneServer]]:
    """The servers of the test; the first one runs."""
    first = OneServer(folder)
    assert first.ready == "ready"
    all_servers = [first]
    yield all_servers
    for server in all_servers:
        server.end()


def job(folder: Path, name: str, *arguments: str) -> subprocess.Popen[str]:
    env = os.environ | {
        "DEVPROXY_JOB_DIR": str(folder),
        "DEVPROXY_GPUS": "1",
        "LD_LIBRARY_PATH": str(LIB),
        "TEST_KERNELS": str(build_kernels(BUILD / "kernels.so")),
    }
    return subprocess.Popen(
        [*build_program(name), *arguments], env=env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def passed(process: subprocess.Popen[str], seconds: float = 90) -> str:
    out, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, out
    assert out.splitlines()[-1].startswith("PASS "), out
    return out


def until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def until_clients(control: ControlChannel, count: int) -> None:
    deadline = time.monotonic() + 10
    while len(control.can_dump()["clients"]) != count:
        assert time.monotonic() < deadline, control.can_dump()
        time.sleep(0.01)


def staging(folder: Path, name: str) -> Path:
    path = folder / name
    path.mkdir()
    return path


def move(servers: list[OneServer], number: int) -> None:
    """The clients of the last server go on with a new one, which then is the last."""
    old = servers[-1]
    into = staging(old.folder, f"staging{number}")
    with old.control() as control:
        control.cut()
        control.dump(str(into), moves=True)
        new = OneServer(old.folder, "--restore", str(into), ledger=f"ledger{number}")
        servers.append(new)
        assert new.ready == "ready", new.ready
        with new.control() as control_new:
            assert control_new.can_dump()["clients"]
            control.leave()
            assert old.process.wait(10) == 0
            control_new.resume()
    shutil.rmtree(into)


STRESS = [
    "threads", "host_function", "ordering", "pinned", "managed", "streams", "events", "copies", "launch", "module", "memset",
    "pool", "pointers", "errors", "graphs explicit", "graphs capture", "graphs update", "graphs launches",
]  # fmt: skip


@pytest.mark.parametrize("line", STRESS)
def test_cut_and_resume_at_random_times(line: str, servers: list[OneServer]) -> None:
    name, *arguments = line.split()
    dice = random.Random(name)
    cuts = 0
    with servers[0].control() as control:
        for _ in range(6):
            process = job(servers[0].folder, name, *arguments)
            while process.poll() is None:
                control.cut(wait_ms=dice.choice([0, 0, 0, 5]))
                cuts += 1
                time.sleep(dice.choice([0, 0.001, 0.01]))
                control.resume()
                time.sleep(dice.random() * 0.005)
            passed(process)
    assert cuts >= 6


def test_chain_under_cuts_and_dumps(servers: list[OneServer]) -> None:
    process = job(servers[0].folder, "cut", "chain", "3")
    into = staging(servers[0].folder, "staging")
    dumps = 0
    with servers[0].control() as control:
        while process.poll() is None:
            control.cut()
            answer = control.dump(str(into))
            control.dump_shared(str(into))
            dumps += answer["device_bytes"] > 0
            control.resume()
            time.sleep(0.01)
    passed(process)
    assert dumps >= 10


@pytest.mark.parametrize(
    "line",
    [
        "threads",
        "host_function",
        "ordering",
        "pinned",
        "managed",
        "cut chain 4",
        "graphs launches",
        "graphs threads",
    ],
)
def test_handover_in_the_middle(line: str, servers: list[OneServer]) -> None:
    """A program does a fixed amount of work. Where it was through before the first move, another one runs."""
    moves = 0
    until = time.monotonic() + 60
    while moves == 0 and time.monotonic() < until:
        moves = handed_over(line.split(), servers)
    assert moves >= (3 if line.startswith("cut ") else 1)


def handed_over(words: list[str], servers: list[OneServer]) -> int:
    """Runs a program, and moves it again and again until it ends. How often."""
    process = job(servers[0].folder, *words)
    moves = 0
    deadline = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < deadline:
        with servers[-1].control() as control:
            there = bool(control.can_dump()["clients"])
        if not there:
            time.sleep(0.002)
            continue
        if process.poll() is None:
            try:
                move(servers, len(servers))
            except AssertionError:
                # The program may have left its server, and end now. Then the new one has nobody.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                if process.poll() is None:
                    raise
                nobodys = servers.pop()  # the old one goes on
                nobodys.process.kill()
                nobodys.process.wait()
                break
            moves += 1
            time.sleep(0.05)
    passed(process)
    return moves


@pytest.mark.parametrize("case", ["state", "held", "fault"])
def test_everything_observable_moves(case: str, servers: list[OneServer]) -> None:
    process = job(servers[0].folder, "cut", case)
    until_ready(process)
    for number in range(1, 4):
        move(servers, number)
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    passed(process)


def test_graphs_move(servers: list[OneServer]) -> None:
    """In the middle of a capture, and between launches of executable graphs that were updated."""
    process = job(servers[0].folder, "graphs", "hold")
    assert process.stdin is not None
    for number in range(1, 4):
        until_ready(process)
        move(servers, number)
        process.stdin.write("go\n")
        process.stdin.flush()
    passed(process)


def test_killed_server_comes_back_from_its_dump(servers: list[OneServer]) -> None:
    """The client is stopped meanwhile, as CRIU would have it: no server holds its link for a moment."""
    folder = servers[0].folder
    process = job(folder, "cut", "state")
    until_ready(process)
    into = staging(folder, "staging")
    with servers[0].control() as control:
        control.cut()
        process.send_signal(signal.SIGSTOP)
        control.dump(str(into))
        control.dump_shared(str(into))
        servers[0].process.kill()
        servers[0].process.wait()
    servers.append(OneServer(folder, "--restore", str(into)))
    # The writer is still there, so the client is taken for living.
    assert servers[-1].ready == "ready", servers[-1].ready
    with servers[-1].control() as control:
        control.resume()
    process.send_signal(signal.SIGCONT)
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    passed(process)


def normal(state: dict[str, object]) -> dict[str, object]:
    """A state without what the clock changes."""
    state = json.loads(json.dumps(state))
    state.pop("uptime_us")
    for client in state["clients"]:
        now = client.pop("event_clock_ns")
        # The same distance to the clock: only the time between reading both is lost.
        client["events"] = [[handle, round((now - t) / 1e9)] for handle, t in client["events"]]
        client["counters"].pop("busy_us")
    return state


def test_restore_from_an_image_is_the_same_state(servers: list[OneServer]) -> None:
    """dump -> restore into an empty folder -> dump: the same bytes."""
    folder = servers[0].folder
    process = job(folder, "cut", "state")
    until_ready(process)
    first, second = staging(folder, "first"), staging(folder, "second")
    with servers[0].control() as control:
        control.cut()
        process.send_signal(signal.SIGSTOP)
        control.dump(str(first))
        shared = control.dump_shared(str(first))
        assert shared["shared_bytes"] > 1 << 20
        dumped = {p.name: p.read_bytes() for p in first.iterdir()}  # the restore uses it up
        elsewhere = staging(folder, "elsewhere")
        elsewhere.chmod(0o700)
        other = OneServer(
            elsewhere, "--restore", str(first), "--restore-shared", "--physical-gpu", "3"
        )
        servers.append(other)
        assert other.ready == "ready", other.ready
        with other.control() as control_other:
            control_other.dump(str(second))
            control_other.dump_shared(str(second))
    names = sorted(dumped)
    assert names == sorted(p.name for p in second.iterdir())
    assert len(names) == 6
    for name in names:
        a, b = dumped[name], (second / name).read_bytes()
        if name.endswith("state.json"):
            assert normal(json.loads(a)) == normal(json.loads(b))
        elif not name.endswith("shared.json"):
            assert a == b, name
    process.kill()
    process.wait()


def test_graphs_are_restored_as_they_are(servers: list[OneServer]) -> None:
    """dump -> restore -> dump: the steps of an executable graph, after an update of it, are the same."""
    folder = servers[0].folder
    process = job(folder, "graphs", "hold")
    assert process.stdin is not None
    until_ready(process)
    process.stdin.write("go\n")
    process.stdin.flush()
    until_ready(process)
    first, second = staging(folder, "first"), staging(folder, "second")
    with servers[0].control() as control:
        control.cut()
        control.dump(str(first))
        new = OneServer(folder, "--restore", str(first), ledger="ledger2")
        servers.append(new)
        assert new.ready == "ready", new.ready
        with new.control() as control_new:
            control_new.dump(str(second))
            states = [json.loads((d / "gpu0.state.json").read_text()) for d in (first, second)]
            logs = [[e for e in s["clients"][0]["log"] if e["opcode"] >= 0x700] for s in states]
            assert logs[0] == logs[1]
            assert len(logs[0]) == 2
            assert logs[0][0]["bulk"] != logs[0][1]["bulk"]  # one of the two was updated
            control.leave()
            control_new.resume()
    process.stdin.write("go\ngo\n")
    process.stdin.flush()
    passed(process)


def test_restore_is_refused_where_memory_is_short(servers: list[OneServer]) -> None:
    folder = servers[0].folder
    process = job(folder, "cut", "state")
    until_ready(process)
    into = staging(folder, "staging")
    with servers[0].control() as control:
        control.cut()
        control.dump(str(into))
        refused = OneServer(
            folder, "--restore", str(into), "--gpu-memory", "4096", ledger="ledger2"
        )
        servers.append(refused)
        assert refused.process.wait(10) == 2
        assert "bytes free, the client needs" in refused.ready
        control.resume()  # the job does not notice
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    passed(process)


def spoil_version(into: Path) -> None:
    state = into / "gpu0.state.json"
    state.write_text(state.read_text().replace('"version":2', '"version":1', 1))


def spoil_image(into: Path) -> None:
    images = bytearray((into / "gpu0.images").read_bytes())
    images[len(images) // 2] ^= 1
    (into / "gpu0.images").write_bytes(images)


def cut_image(into: Path) -> None:
    os.truncate(into / "gpu0.images", 1000)


def forget_image(into: Path) -> None:
    state = json.loads((into / "gpu0.state.json").read_text())
    assert (
        len(state["images"]) == 1 and state["images"][0][2] == (into / "gpu0.images").stat().st_size
    )
    (into / "gpu0.state.json").write_text(json.dumps(state | {"images": []}))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (spoil_version, "the state has format version 1, this server reads 2"),
        (spoil_image, "a module image has another content than the state says"),
        (cut_image, "the file is shorter than its table says"),
        (forget_image, "its image is not in the state"),
    ],
)
def test_restore_is_refused_where_the_state_is_not_ours(
    servers: list[OneServer], spoil: Callable[[Path], None], why: str
) -> None:
    """An older format, and images that are not what the replay log names: by name, and the job does not notice."""
    folder = servers[0].folder
    process = job(folder, "cut", "state")
    until_ready(process)
    into = staging(folder, "staging")
    with servers[0].control() as control:
        control.cut()
        control.dump(str(into))
        spoil(into)
        refused = OneServer(folder, "--restore", str(into), ledger="ledger2")
        servers.append(refused)
        assert refused.process.wait(10) == 2
        assert why in refused.ready
        control.resume()
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    passed(process)


def test_a_callback_that_needs_a_lock_of_a_waiting_thread(servers: list[OneServer]) -> None:
    process = job(servers[0].folder, "cut", "lock", "3")
    cuts = 0
    with servers[0].control() as control:
        while process.poll() is None:
            control.cut()
            clients = control.can_dump()["clients"]
            assert all(c["host_functions"] == 0 for c in clients)
            control.resume()
            cuts += 1
            time.sleep(0.003)
    passed(process)
    assert cuts >= 10


def test_a_killed_parked_server_is_noticed(servers: list[OneServer]) -> None:
    process = job(servers[0].folder, "cut", "lost")
    until_ready(process)
    assert process.stdin is not None
    with servers[0].control() as control:
        process.stdin.write("go\n")
        process.stdin.flush()
        time.sleep(0.05)
        control.cut()
        time.sleep(0.2)
        killed = time.monotonic()
        servers[0].process.kill()
    passed(process)
    assert time.monotonic() - killed < 30


def test_a_coordinator_that_hangs_up_leaves_the_job_running(servers: list[OneServer]) -> None:
    process = job(servers[0].folder, "cut", "chain", "1")
    time.sleep(0.3)
    with servers[0].control() as control:
        control.cut()
    passed(process, 20)


def test_a_coordinator_that_does_not_read_holds_up_nobody(servers: list[OneServer]) -> None:
    """It is asked nothing more until it has read; then it gets every answer, in order."""
    text = json.dumps({"op": "can_dump"}).encode()
    request = struct.pack("<I", len(text)) + text
    with servers[0].control() as deaf, servers[0].control() as other:
        sent, link = b"", deaf._socket
        link.setblocking(False)
        stop = time.monotonic() + 1.0  # long enough to fill both buffers
        while time.monotonic() < stop:
            with contextlib.suppress(BlockingIOError):
                rest = request[len(sent) % len(request) :]
                sent += rest[: link.send(rest)]
        assert other.request("can_dump", 5)["ok"]
        assert stats.query(str(servers[0].folder), 0)["clients_now"] == 0
        link.settimeout(10)
        for _ in range(len(sent) // len(request)):
            (length,) = struct.unpack("<I", link.recv(4, socket.MSG_WAITALL))
            assert json.loads(link.recv(length, socket.MSG_WAITALL))["ok"]


def test_a_stranger_holds_the_ledgers_lock(servers: list[OneServer]) -> None:
    """As a stopped server in it would. The allocation fails after a while, and the log names who is in the way."""
    server = servers[0]
    with open(server.folder / "ledger", "rb") as ledger:
        fcntl.flock(ledger, fcntl.LOCK_EX)
        failed = job(server.folder, "memset")
        try:
            failed.communicate(timeout=40)
        finally:
            failed.kill()
        assert failed.returncode != 0
    passed(job(server.folder, "memset"))
    os.close(server.lease)
    server.lease = -1
    _, log = server.process.communicate(timeout=20)
    assert f"{server.folder}/ledger is locked by process {os.getpid()} (" in log, log


def test_a_server_without_descriptors_waits_for_one(servers: list[OneServer]) -> None:
    """Whoever knocks stays in the queue: the server must not ask for it again and again."""
    process = psutil.Process(servers[0].process.pid)
    limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir(f"/proc/{process.pid}/fd")}
    free = min(set(range(1024)) - taken)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (free, limits[1]))
    with servers[0].control() as waiting:
        time.sleep(0.2)
        before = sum(process.cpu_times()[:2])
        time.sleep(1.0)
        assert sum(process.cpu_times()[:2]) - before < 0.3
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
        assert waiting.request("can_dump", 5)["ok"]


def test_the_first_client_attaches_after_the_dump(servers: list[OneServer]) -> None:
    """A dump of nobody is a dump: who comes before the freeze is taken into it."""
    into = staging(servers[0].folder, "staging")
    with servers[0].control() as control:
        control.cut()
        assert control.dump(str(into))["device_bytes"] == 0
        process = job(servers[0].folder, "cut", "lost")
        until_clients(control, 1)
        control.dump_shared(str(into))
        state = json.loads((into / "gpu0.state.json").read_text())
        assert [c["number"] for c in state["clients"]] == [1]
        control.resume()
        control.cut()
        with pytest.raises(ServerError, match="dump first"):
            control.dump_shared(str(into))
        process.kill()
        process.wait()


def test_clients_attach_and_leave_during_a_cut(servers: list[OneServer]) -> None:
    with servers[0].control() as control:
        control.cut()
        process = job(servers[0].folder, "cut", "chain", "1")
        until_clients(control, 1)
        time.sleep(0.1)
        assert process.poll() is None
        into = staging(servers[0].folder, "staging")
        control.dump(str(into))
        second = job(servers[0].folder, "cut", "lost")
        until_clients(control, 2)
        with pytest.raises(ServerError, match="attached after the dump") as error:
            control.leave()
        assert error.value.state == "parked"
        control.dump_shared(str(into))  # takes the late one in
        state = json.loads((into / "gpu0.state.json").read_text())
        assert [c["number"] for c in state["clients"]] == [1, 2]
        second.kill()
        second.wait()
        until_clients(control, 1)
        control.dump_shared(str(into))
        state = json.loads((into / "gpu0.state.json").read_text())
        assert [c["number"] for c in state["clients"]] == [1]
        control.resume()
    passed(process)


@pytest.mark.parametrize("goes_on", [True, False])
def test_who_attaches_behind_the_dump_of_a_move_waits(
    servers: list[OneServer], goes_on: bool
) -> None:
    """For the server, if the move comes to nothing; else for its successor. It is in neither's state before."""
    old = servers[0]
    into = staging(old.folder, "staging")
    with old.control() as control:
        control.cut()
        control.dump(str(into), moves=True)
        newcomer = job(old.folder, "cut", "chain", "1")
        time.sleep(0.5)
        assert newcomer.poll() is None
        assert control.can_dump()["clients"] == []
        if goes_on:
            control.resume()
            passed(newcomer)
            return
        new = OneServer(old.folder, "--restore", str(into), ledger="ledger2")
        servers.append(new)
        with new.control() as taker:
            second = job(old.folder, "cut", "chain", "1")  # this one finds the successor
            time.sleep(0.5)
            assert taker.can_dump()["clients"] == []
            control.leave()
            taker.resume()
        passed(newcomer)
        passed(second)


def test_a_cut_that_cannot_be_is_given_up(servers: list[OneServer]) -> None:
    process = job(servers[0].folder, "cut", "busy")  # a kernel of 6 s
    until_ready(process)
    with servers[0].control() as control:
        with pytest.raises(ServerError, match="does not end") as error:
            control.cut(drain_ms=100)
        assert error.value.state == "running"
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        passed(process)
        control.cut()
        control.resume()


def test_a_kernel_outlives_its_process(servers: list[OneServer]) -> None:
    """Nothing can end it, and no cut waits for it. The log names whose it is; others go on."""
    server = servers[0]
    process = job(server.folder, "cut", "busy", "20")
    until_ready(process)
    process.kill()
    process.communicate()
    log = server.process.stderr
    assert log
    assert select.select([log], [], [], 15)[0], "nobody names it"
    line = log.readline()
    assert f"pid={process.pid} has ended, and its work on GPU 0 has not within 5 s" in line
    passed(job(server.folder, "memset"))
    with server.control() as control:
        control.cut()
        control.resume()


POINTS = {
    "server_cut_parked": "cut",
    "server_dump_start": "dump",
    "server_dump_mid": "dump",
    "server_dump_end": "dump",
    "server_shared_mid": "dump_shared",
    "server_resume": "resume",
}


@pytest.mark.parametrize("point", POINTS)
def test_fault_points_of_the_dump(point: str, folder: Path) -> None:
    """With "error" the verb says so and the job runs on; with "abort" the server is gone."""
    into = staging(folder, "staging")
    server = OneServer(folder, env={"DEVPROXY_FAULT": f"{point}:1:error"})
    try:
        process = job(folder, "cut", "chain", "1")
        with server.control() as control:
            until_clients(control, 1)
            time.sleep(0.1)
            with pytest.raises(ServerError, match=f"fault point {point}"):
                control.cut()
                control.dump(str(into))
                control.dump_shared(str(into))
                control.resume()
        passed(process, 30)
    finally:
        server.end()
    server = OneServer(folder, env={"DEVPROXY_FAULT": f"{point}:1:abort"})
    try:
        process = job(folder, "cut", "lost")
        until_ready(process)
        with server.control() as control, pytest.raises(ServerGone):
            control.cut()
            control.dump(str(into))
            control.dump_shared(str(into))
            control.resume()
        assert server.process.wait(5) == -signal.SIGKILL
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        passed(process, 20)
    finally:
        server.end()


@pytest.mark.parametrize("mode", ["error", "abort"])
@pytest.mark.parametrize(
    "point", ["server_restore_start", "server_restore_mid", "server_restore_end"]
)
def test_fault_points_of_the_restore(point: str, mode: str, servers: list[OneServer]) -> None:
    """The successor fails, the predecessor goes on: nobody notices."""
    folder = servers[0].folder
    process = job(folder, "cut", "chain", "1")
    into = staging(folder, "staging")
    with servers[0].control() as control:
        until_clients(control, 1)
        control.cut()
        control.dump(str(into))
        env = {"DEVPROXY_FAULT": f"{point}:1:{mode}"}
        failed = OneServer(folder, "--restore", str(into), ledger="ledger2", env=env)
        servers.append(failed)
        assert failed.process.wait(10) == (2 if mode == "error" else -signal.SIGKILL)
        assert failed.ready != "ready"
        control.resume()
    passed(process)


def test_a_successor_that_is_not_wanted_goes_in_silence(servers: list[OneServer]) -> None:
    """Restored, listening, then ended: the predecessor takes its name back and goes on."""
    folder = servers[0].folder
    process = job(folder, "cut", "chain", "2")
    into = staging(folder, "staging")
    with servers[0].control() as control:
        until_clients(control, 1)
        control.cut()
        control.dump(str(into))
        successor = OneServer(folder, "--restore", str(into), ledger="ledger2")
        servers.append(successor)
        assert successor.ready == "ready"
        successor.process.terminate()
        assert successor.process.wait(10) == 0
        control.resume()
    with servers[0].control() as control:  # by the name
        assert control.can_dump()["clients"]
    passed(process)


def test_steps_are_counted(servers: list[OneServer]) -> None:
    """devproxy_step() of libcuda.so.1, from a job's process, before and after it has a device. Each GPU of the process
    counts all of its steps."""
    servers[0].end()
    servers.append(both := OneServer(servers[0].folder, "--gpu", "1", ledger="ledger-of-both"))
    assert both.ready == "ready"
    script = (
        "import ctypes, sys\n"
        "cu = ctypes.CDLL('libcuda.so.1')\n"
        "print(cu.devproxy_step())\n"
        "n = ctypes.c_size_t(); m = ctypes.c_size_t(); c = ctypes.c_void_p()\n"
        "assert cu.cuInit(0) == 0 and cu.devproxy_step() == 0\n"
        "for gpu in range(2):\n"
        "    assert cu.cuDevicePrimaryCtxRetain(ctypes.byref(c), gpu) == 0 and cu.cuCtxSetCurrent(c) == 0\n"
        "    assert cu.cuMemGetInfo_v2(ctypes.byref(n), ctypes.byref(m)) == 0\n"
        "print(sum(cu.devproxy_step() for _ in range(5)), flush=True)\n"
        "sys.stdin.readline()\n"
    )
    env = os.environ | {
        "DEVPROXY_JOB_DIR": str(servers[0].folder),
        "DEVPROXY_GPUS": "2",
        "LD_LIBRARY_PATH": str(LIB),
    }
    process = subprocess.Popen(
        ["python3", "-c", script], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "0\n"
    assert process.stdout.readline() == "5\n"
    with ControlChannel(str(both.folder), 1) as second:
        assert second.steps() == 5
    with both.control() as control:
        assert control.steps() == 5
        process.communicate("\n")
        deadline = time.monotonic() + 5
        while control.can_dump()["clients"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert control.steps() == 5  # a client that has gone still counts
