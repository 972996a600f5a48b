# SPDX-License-Identifier: Apache-2.0
"""A job of two trees on two hosts: cut together, brought back together, on whatever hosts."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from devproxy.machine import show_bytes
from tests.checkpoint.hosts import CTL, Hosts
from tests.checkpoint.test_damaged_store import rot
from tests.checkpoint.world import RUN, SUBJECTS, without_pauses
from tests.integration.needs import require_criu

STEPS = 120
ACROSS = (
    sys.executable,
    str(SUBJECTS / "across.py"),
    "--steps",
    str(STEPS),
    "--seconds-per-step",
    "0.05",
)


RANKS = (
    sys.executable,
    str(SUBJECTS / "ranks.py"),
    "--steps",
    "200",
    "--ranks",
    "4",
    "--seconds-per-step",
    "0.1",
)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    require_criu()
    made = Hosts()
    made.hold()
    yield made
    made.close()


def check(hosts: Hosts, log: str = "log") -> None:
    """Both trees got every byte, in order (across.py looks itself); neither began anew."""
    for node in (0, 1):
        assert len(hosts.nonces(f"{log}{node}")) == 1, hosts.tail(f"{log}{node}")
        assert hosts.digest(f"{log}{node}"), hosts.tail(f"{log}{node}")


def test_megabytes_on_their_way(hosts: Hosts) -> None:
    """Checkpoints, suspends: nothing of it is lost or comes twice."""
    dice = random.Random(11)
    jobs = hosts.start(*ACROSS)
    for at in sorted(dice.sample(range(2, 60), 4)):
        hosts.wait_step(at, "log0")
        hosts.until(STEPS - 1)
        verb = dice.choice(("checkpoint", "suspend"))
        hosts.on(0, verb, "j")
        if verb == "suspend":
            hosts.on(0, "resume", "j")
    assert [hosts.end_of(job) for job in jobs] == [0, 0], hosts.tail("log0") + hosts.tail("log1")
    check(hosts)
    assert hosts.steps("log0") == hosts.steps("log1") == list(range(1, STEPS + 1))


# Of its GPU's memory 32 MiB are alike on both nodes, and 8 MiB are this node's own.
ALIKE = """
import ctypes, os, random, time
cuda = ctypes.CDLL("libcuda.so.1")
def check(result):
    assert result == 0, result
context, memory = ctypes.c_void_p(), ctypes.c_uint64()
check(cuda.cuInit(0)); check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)); check(cuda.cuCtxSetCurrent(context))
node = int(os.environ["DEVPROXY_NODE"])
data = random.Random(0).randbytes(32 << 20) + random.Random(node + 1).randbytes(8 << 20)
check(cuda.cuMemAlloc_v2(ctypes.byref(memory), len(data)))
check(cuda.cuMemcpyHtoD_v2(memory, data, len(data)))
back = ctypes.create_string_buffer(len(data))
for step in range(1, 100000):
    check(cuda.cuMemcpyDtoH_v2(back, memory, len(data)))
    print("step", step, back.raw == data, flush=True)
    time.sleep(0.2)
"""


def test_what_two_hosts_hold_alike_is_stored_once(hosts: Hosts) -> None:
    """As replicas do. Of an image's device memory the store gets each block from one of the hosts that hold it."""
    hosts.start(sys.executable, "-c", ALIKE)

    def steps(node: int) -> list[str]:
        lines = (hosts.home / f"log{node}").read_text().splitlines()
        return [line for line in lines if line.startswith("step ")]

    hosts.wait(lambda: steps(0) and steps(1), 60)
    hosts.on(0, "checkpoint", "j")
    listed = json.loads(hosts.on(0, "images", "--store", str(hosts.store), "--json").stdout)
    (image,) = listed["images"]
    count = image["sizes"]["per_kind"]["device"]
    assert count["raw"] == 80 << 20
    assert count["deduplicated"] == 32 << 20
    assert count["new"] == 48 << 20
    assert hosts.kill_everything()
    before = [len(steps(node)) for node in (0, 1)]
    hosts.came_back(hosts.bring_back((1, 0)))
    hosts.wait(lambda: all(len(steps(n)) > before[n] for n in (0, 1)), 60)
    assert all(line.endswith(" True") for node in (0, 1) for line in steps(node))


def test_a_restore_that_is_given_up(hosts: Hosts) -> None:
    """One node waits for the other, and its user ends that by Ctrl-C: nothing is left of it, and both may begin anew."""
    hosts.start(*ACROSS)
    hosts.wait_step(3, "log0")
    hosts.on(0, "checkpoint", "j")
    assert hosts.kill_everything()
    words = ["restore", "j", "--store", str(hosts.store), "--node", "1", "--meet", hosts.meet(0)]
    waits = subprocess.Popen(
        hosts.hosts[1].command([*CTL, *words]), env=hosts.env, stderr=subprocess.PIPE, text=True
    )
    assert waits.stderr is not None
    assert "waiting for the job's other nodes" in waits.stderr.readline()
    waits.send_signal(signal.SIGINT)
    assert "is given up; nothing of it runs here" in waits.communicate(timeout=30)[1]
    assert waits.returncode == 130
    hosts.wait(lambda: not any("control.agent" in " ".join(p.cmdline()) for p in hosts.processes()), 30)  # fmt: skip
    hosts.came_back(hosts.bring_back())
    hosts.wait_end("done", "log0")
    hosts.wait_end("done", "log1")
    check(hosts)


@pytest.mark.parametrize("nodes", [(1, 0), (0, 0), (0, 1)])
def test_restored_elsewhere(hosts: Hosts, nodes: tuple[int, int]) -> None:
    """kill -9 of everything; then the halves exchanged, both on one host, or where they were."""
    hosts.start(*ACROSS)
    hosts.wait_step(15, "log0")
    hosts.on(0, "checkpoint", "j")
    hosts.wait_step(25, "log0")
    assert hosts.kill_everything()
    hosts.came_back(hosts.bring_back(nodes))
    told = hosts.job_status(nodes[0])
    assert told["phase"] == "running"
    assert len(told["nodes"]) == 2  # type: ignore[arg-type]
    hosts.wait_end("done", "log0")
    hosts.wait_end("done", "log1")
    check(hosts)


def test_packs_are_damaged_between_two_images(hosts: Hosts) -> None:
    """It is found at the commit; then each node puts its part once more."""
    hosts.start(*ACROSS)
    hosts.wait_step(10, "log0")
    hosts.on(0, "checkpoint", "j")
    for pack in (hosts.store / "packs").glob("*.pack"):
        rot(pack)
    hosts.wait_step(20, "log0")
    second = json.loads(hosts.on(0, "checkpoint", "j", "--json").stdout)
    assert any("is damaged, or was changed" in text for text in second["warnings"]), second
    words = ("images", "verify", "--image", second["id"], "--store", str(hosts.store))
    assert f"image {second['id']} is whole" in hosts.on(0, *words, check=False).stdout
    assert hosts.kill_everything()
    hosts.came_back(hosts.bring_back())
    hosts.wait_end("done", "log0")
    hosts.wait_end("done", "log1")
    check(hosts)


def test_what_nodes_say(hosts: Hosts) -> None:
    """Verbs belong to node 0; the others name it."""
    hosts.start(*ACROSS)
    hosts.wait_step(3, "log0")
    refused = hosts.on(1, "checkpoint", "j.1", check=False)
    assert refused.returncode == 2
    assert f"give the verb to node 0 ({hosts.meet(0)})" in refused.stderr
    told: dict[str, Any] = hosts.job_status(0)
    assert [line.split(" ")[:2] for line in told["nodes"]] == [["node", "0"], ["node", "1"]]
    [other] = told["elsewhere"]
    assert other["node"].startswith("node 1 (") and other["problem"] == ""
    assert len({server["pid"] for server in told["servers"] + other["servers"]}) == 2
    assert "node 1 (" in (text := hosts.on(0, "status", "j").stdout) and "its servers:" in text
    total = sum(server["memory"]["total"] for server in told["servers"] + other["servers"])
    assert f"/ {show_bytes(total)}" in hosts.on(0, "ps").stdout
    hosts.on(0, "suspend", "j")
    hosts.wait(lambda: hosts.job_status(1, "j.1")["phase"] == "suspended", 20)
    assert hosts.job_status(1, "j.1")["last_image"] == hosts.job_status(0)["last_image"] != ""
    assert " suspended " in (listed := hosts.on(1, "ps").stdout) and "lost" not in listed
    shown = hosts.on(1, "status", "j.1").stdout
    assert f"images of the job: 1, the last one {hosts.job_status(0)['last_image']}" in shown
    hosts.on(0, "resume", "j")
    hosts.wait(lambda: hosts.job_status(1, "j.1")["phase"] == "running", 20)
    hosts.on(0, "kill", "j", "--signal", "KILL")
    assert [job.wait(60) for job in hosts.jobs] == [137, 137]


def test_nodes_that_do_not_fit(hosts: Hosts) -> None:
    """Another --nodes, a number that is taken: named, with nothing started."""
    (first,) = hosts.start(*ACROSS, only=(0,))
    (other,) = hosts.start(*ACROSS, only=(1,), count=3, log="other")
    assert other.wait(60) == 2
    assert "node 1 (" in hosts.text("other1")
    assert "has nodes 3, node 0 has 2" in hosts.text("other1")
    assert "of job j did not start: node 1 (" in hosts.text("log0")
    (absent,) = hosts.start("no-such-program", only=(1,), log="absent")
    assert absent.wait(60) == 127
    assert re.search(r"node 1 \(.*\) of job j did not start: .*no-such-program", hosts.text("log0"))
    (stranger,) = hosts.start(*ACROSS, only=(1,), log="stranger", DEVPROXY_TRUST_DIR="/nowhere")
    assert stranger.wait(60) == 2
    assert "make it once (devproxy trust)" in hosts.text("stranger1")
    supervisor = psutil.Process(first.pid)
    supervisor.send_signal(signal.SIGINT)
    assert first.wait(30) == 128 + signal.SIGINT


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_waits_can_be_killed(hosts: Hosts, node: int) -> None:
    """It is starting, and nothing of it is left afterwards."""
    name = "j.1" if node else "j"
    (waits,) = hosts.start(*ACROSS, only=(node,))

    def status() -> str:
        return hosts.on(node, "status", name, "--json", check=False).stdout

    hosts.wait(lambda: '"phase"' in status(), 30)
    time.sleep(1)  # its servers have begun
    assert json.loads(status())["phase"] == "starting"
    assert "went away" not in hosts.on(node, "kill", name).stderr
    assert waits.wait(30) == 128 + signal.SIGTERM
    assert hosts.on(node, "ps").stdout == "no jobs\n"


@pytest.mark.parametrize("node", [0, 1])
def test_a_restore_that_waits_can_be_killed(hosts: Hosts, node: int) -> None:
    """Nothing of it runs, it says why, and it may begin anew."""
    hosts.start(*ACROSS)
    hosts.wait_step(3, "log0")
    hosts.on(0, "checkpoint", "j")
    assert hosts.kill_everything()
    name = "j.1" if node else "j"
    words = [
        "restore",
        "j",
        "--store",
        str(hosts.store),
        "--node",
        str(node),
        "--meet",
        hosts.meet(0),
    ]
    waits = subprocess.Popen(
        hosts.hosts[node].command([*CTL, *words]), env=hosts.env, stderr=subprocess.PIPE, text=True
    )
    assert waits.stderr is not None
    assert "waiting for the job's other nodes" in waits.stderr.readline()
    assert hosts.job_status(node, name)["phase"] == "starting"
    hosts.on(node, "kill", name)
    said = waits.communicate(timeout=30)[1]
    assert "signal 15 came while it waited for the job's other nodes" in said
    assert waits.returncode == 2
    hosts.came_back(hosts.bring_back())
    hosts.wait_end("done", "log0")
    hosts.wait_end("done", "log1")
    check(hosts)


def test_a_command_that_fails_on_one_node(hosts: Hosts) -> None:
    """It is named where the job's words are read; what goes on elsewhere goes on until somebody ends it."""
    (first,) = hosts.start("sleep", "1000", only=(0,))
    (second,) = hosts.start("sh", "-c", "exit 3", only=(1,))
    words = "its command has ended with exit code 3"
    hosts.wait(lambda: words in hosts.text("log0"), 60, words)
    nodes = hosts.job_status(0)["nodes"]
    assert isinstance(nodes, list)
    assert [words in line for line in nodes] == [False, True]
    assert first.poll() is None
    hosts.on(0, "kill", "j", "--signal", "TERM")
    assert first.wait(60) == 143
    assert second.wait(60) == 3
    assert hosts.text("log0").count(words) == 1


def test_a_node_that_dies(hosts: Hosts) -> None:
    """kill -9 of a node's supervisor: node 0 names it, the job ends, the last image is whole."""
    jobs = hosts.start(*ACROSS)
    hosts.wait_step(5, "log0")
    hosts.on(0, "checkpoint", "j")
    hosts.until("end")
    supervisor = int(hosts.job_status(1, "j.1")["pid"])  # type: ignore[call-overload]
    os.kill(supervisor, signal.SIGKILL)
    hosts.wait(lambda: "node 1 (" in hosts.text("log0"), 30, "the name of the node")
    assert jobs[1].wait(30) == -signal.SIGKILL or jobs[1].returncode == 137
    failed = hosts.on(0, "checkpoint", "j", check=False)
    assert failed.returncode != 0
    hosts.on(0, "kill", "j", "--signal", "KILL", check=False)
    jobs[0].wait(60)
    hosts.kill_everything()
    time.sleep(0.1)
    hosts.came_back(hosts.bring_back((0, 1)))
    hosts.wait_end("done", "log0")
    hosts.wait_end("done", "log1")
    check(hosts)


def on_one_host(hosts: Hosts, ranks: tuple[str, ...] = RANKS) -> list[str]:
    """The digest of the same ranks on four software GPUs of one host: what they compute does not depend on where they are."""
    words = [*RUN, "--name", "alone", "--gpus", "4", "--", *without_pauses(ranks)]
    folder = hosts.home / "alone"
    folder.mkdir()
    with open(hosts.home / "alone.log", "wb") as out:
        done = subprocess.run(
            hosts.hosts[0].command(words),
            env=hosts.env | {"TEST_GATE": ""},
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=folder,
            timeout=120,
        )
    assert done.returncode == 0, hosts.tail("alone.log")
    return hosts.digest("alone.log")


def parted(hosts: Hosts) -> dict[str, int]:
    """The ranks whose bits are not those of one host, with the first step of which they are not."""

    def marks(*logs: str) -> dict[str, list[str]]:
        text = "\n".join(map(hosts.text, logs))
        return {
            rank: m.split() for rank, m in re.findall(r"^marks of rank (\d+): (.*)$", text, re.M)
        }

    alone, here = marks("alone.log"), marks("log0", "log1")
    assert sorted(alone) == sorted(here) == ["0", "1", "2", "3"]
    first = {r: [a == b for a, b in zip(alone[r], here[r], strict=True)] for r in alone}
    return {rank: same.index(False) + 1 for rank, same in first.items() if not all(same)}


def same_bits(hosts: Hosts, expected: list[str]) -> None:
    assert parted(hosts) == {}
    assert hosts.digest("log0") == hosts.digest("log1") == expected


def elsewhere(verb: str, dice: random.Random) -> tuple[str, ...]:
    """What the verb is told of GPUs, two of each node."""
    if verb == "migrate":
        to = [gpu for _ in range(2) for gpu in dice.sample(range(4), 2)]
        return ("--to", ",".join(map(str, to)))
    if verb == "resize":
        to = [gpu for _ in range(2) for gpu in dice.choice([[0, 0], [3, 3], [0, 1]])]
        return ("--gpus", ",".join(map(str, to)))
    return ()


@pytest.mark.parametrize("seed", [1, 2])
def test_collectives_over_two_hosts(hosts: Hosts, seed: int) -> None:
    """Cut, suspended and moved at random moments, killed, and restored on exchanged hosts: the bits of one host."""
    dice = random.Random(seed)
    expected = on_one_host(hosts)
    hosts.start(*RANKS, options=("--gpus", "2"))
    for at in sorted(dice.sample(range(2, 60), 3)):
        hosts.wait_step(at, "log0")
        hosts.until(199)
        verb = dice.choice(("checkpoint", "suspend", "migrate", "resize"))
        hosts.on(0, verb, "j", *elsewhere(verb, dice))
        if verb == "suspend":
            hosts.on(0, "resume", "j")
    hosts.on(0, "checkpoint", "j")
    assert hosts.kill_everything()
    hosts.came_back(hosts.bring_back((1, 0)))
    hosts.wait_end("digest", "log0")
    hosts.wait_end("digest", "log1")
    assert len(hosts.nonces("log0")) == 1
    same_bits(hosts, expected)


def test_on_one_host_and_on_two_again(hosts: Hosts) -> None:
    """Both trees are restored on one host, cut there, and are on two hosts again: the bits of one host."""
    expected = on_one_host(hosts)
    hosts.start(*RANKS, options=("--gpus", "2"))
    for at, nodes in ((10, (0, 0)), (30, (1, 0))):
        hosts.wait_step(at, "log0")
        hosts.until(199)
        hosts.on(0, "checkpoint", "j")
        assert hosts.kill_everything()
        hosts.came_back(hosts.bring_back(nodes))
        listed = [json.loads(hosts.on(host, "ps", "--json").stdout)["jobs"] for host in (0, 1)]
        assert [
            sorted(job["job"] for job in jobs if job["phase"] == "running") for jobs in listed
        ] == [
            [name for name, at in zip(("j", "j.1"), nodes, strict=True) if at == host]
            for host in (0, 1)
        ]
    hosts.wait_end("digest", "log0")
    hosts.wait_end("digest", "log1")
    assert len(hosts.nonces("log0")) == 1
    same_bits(hosts, expected)


# Of a host: all packets that come and go, to stdout; stops with its stdin.
CAPTURE = """
import select, socket, sys
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
print("ready", file=sys.stderr, flush=True)
while sys.stdin not in select.select([wire, sys.stdin], [], [])[0]:
    sys.stdout.buffer.write(wire.recv(1 << 17))
wire.setblocking(False)
try:
    while True:
        sys.stdout.buffer.write(wire.recv(1 << 17))
except BlockingIOError:
    sys.stdout.flush()
"""
# The first bytes of each connection between servers, as hal/links/frame.h has them.
HELLO = struct.pack("<II", 0x48505044, 1)


@pytest.mark.parametrize("option", [(), ("--encrypt-data",)], ids=["plain", "encrypted"])
def test_encrypted_data(hosts: Hosts, tmp_path: Path, option: tuple[str, ...]) -> None:
    """Cut, killed, and restored on exchanged hosts, which takes the encryption over: the bits of one host. On the wire between
    the hosts a server's hello can be read without the option, and cannot with it."""
    expected = on_one_host(hosts)
    at = (
        tmp_path / "wire"
    )  # not in the home of the jobs, by whose name kill_everything knows processes
    there = ["nsenter", "--target", str(hosts.hosts[1].pid), "--net", sys.executable, "-c", CAPTURE]
    with at.open("wb") as out:
        capture = subprocess.Popen(there, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.PIPE)
    assert capture.stdin
    assert capture.stderr
    assert capture.stderr.readline() == b"ready\n"
    hosts.start(*RANKS, options=("--gpus", "2", *option))
    hosts.wait_step(10, "log0")
    hosts.until(199)
    hosts.on(0, "checkpoint", "j")
    assert hosts.kill_everything()
    before = at.stat().st_size
    hosts.came_back(hosts.bring_back((1, 0)))
    hosts.wait_end("digest", "log0")
    hosts.wait_end("digest", "log1")
    assert len(hosts.nonces("log0")) == 1
    same_bits(hosts, expected)
    capture.stdin.close()
    assert capture.wait(30) == 0
    wire = at.read_bytes()
    assert len(wire) > before + (1 << 20)
    for life in (wire[:before], wire[before:]):
        assert (HELLO in life) == (not option)


def test_nodes_that_differ_in_encryption(hosts: Hosts) -> None:
    (first,) = hosts.start(*ACROSS, only=(0,), options=("--encrypt-data",))
    (other,) = hosts.start(*ACROSS, only=(1,), log="other")
    assert other.wait(60) == 2
    assert re.search(r"node 0 has --encrypt-data, node 1 \(.*\) has not", hosts.text("other1"))
    psutil.Process(first.pid).send_signal(signal.SIGINT)
    assert first.wait(30) == 128 + signal.SIGINT


@pytest.mark.sweep(1)
@pytest.mark.parametrize("nodes", [(1, 0), (0, 0)])
def test_a_rank_that_waits(hosts: Hosts, nodes: tuple[int, int]) -> None:
    """Rank 0 stands at the gate, and ranks of both hosts have submitted what it owes. Nothing waits for it."""
    dice = random.Random(f"{nodes}")
    expected = on_one_host(hosts)

    def stand(at: int) -> None:
        hosts.until(at)
        hosts.wait(lambda: max(hosts.steps("log0"), default=0) >= at, 120, f"step {at}")

    hosts.until(2)
    hosts.start(*RANKS, options=("--gpus", "2"))
    for number, verb in enumerate(("checkpoint", "migrate", "resize", "suspend", "checkpoint")):
        stand(3 + 3 * number)
        hosts.on(0, verb, "j", *elsewhere(verb, dice))
        assert str(hosts.job_status(0)["last_cut"]).startswith("take-back: ") or verb == "suspend"
        if verb == "suspend":
            hosts.on(0, "resume", "j")
    assert hosts.kill_everything()
    hosts.came_back(hosts.bring_back(nodes))
    hosts.wait_end("digest", "log0")
    hosts.wait_end("digest", "log1")
    assert len(hosts.nonces("log0")) == 1
    same_bits(hosts, expected)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("node", [0, 1])
def test_a_stage_that_fails_while_a_rank_waits(hosts: Hosts, node: int) -> None:
    """What one node has taken back, and the other perhaps not, is said again: the ranks go on."""
    expected = on_one_host(hosts)
    hosts.until(2)
    jobs = hosts.start(*RANKS, options=("--gpus", "2"))
    at = 2
    for point in ("cut", "quiesced", "device", "frozen", "thaw"):
        at += 3
        hosts.until(at)
        hosts.wait(lambda at=at: max(hosts.steps("log0"), default=0) >= at, 120, f"step {at}")  # type: ignore[misc]
        hosts.arm(node, point)
        failed = hosts.on(0, "checkpoint", "j", check=False)
        assert failed.returncode == 1, (point, failed.stderr)
        assert "the job continues" in failed.stderr
        hosts.arm(node, "")
    hosts.until(at + 3)
    hosts.wait(lambda: max(hosts.steps("log0")) >= at + 3, 60, "more steps")
    hosts.on(0, "migrate", "j", "--to", "1,0,1,0")
    hosts.until("end")
    assert [hosts.end_of(job) for job in jobs] == [0, 0], hosts.tail("log0") + hosts.tail("log1")
    same_bits(hosts, expected)


@pytest.mark.parametrize("node", [0, 1])
def test_a_resume_that_fails_when_the_other_node_runs(hosts: Hosts, node: int) -> None:
    """The job is suspended on both, and the next resume brings it back. Seen when a server was killed there."""
    expected = on_one_host(hosts)
    jobs = hosts.start(*RANKS, options=("--gpus", "2"))
    hosts.wait_step(3, "log0")
    hosts.until(199)
    for _ in range(3):
        hosts.on(0, "suspend", "j")
        hosts.arm(node, "server_resume")
        failed = hosts.on(0, "resume", "j", check=False)
        assert failed.returncode == 1, failed.stderr
        assert "it is still suspended" in failed.stderr, failed.stderr
        assert hosts.job_status(0)["phase"] == "suspended"
        hosts.arm(node, "")
        hosts.on(0, "resume", "j")
        assert hosts.job_status(0)["phase"] == "running"
    hosts.until("end")
    assert [hosts.end_of(job) for job in jobs] == [0, 0], hosts.tail("log0") + hosts.tail("log1")
    same_bits(hosts, expected)


# Ends with 3 as soon as there is a file "go".
ENDS = """
import os, time
print("up", flush=True)
while not os.path.exists("go"):
    time.sleep(0.002)
print("went", flush=True)
raise SystemExit(3)
"""


def test_a_tree_ends_before_a_failed_resume_is_undone(hosts: Hosts) -> None:
    """Ranks that lose their peers do. That is no end of the job, and what they wrote meanwhile is not the job's."""
    jobs = hosts.start(sys.executable, "-c", ENDS)
    for log in ("log0", "log1"):
        hosts.wait(lambda log=log: "up" in hosts.text(log), 60, "up")  # type: ignore[misc]
    hosts.on(0, "suspend", "j")
    (hosts.home / "go").touch()
    for node in (1, 0, 1):
        hosts.arm(node, "restore_go_on")
        failed = hosts.on(0, "resume", "j", check=False)
        assert failed.returncode == 1
        assert "it is still suspended" in failed.stderr, failed.stderr
        hosts.arm(node, "")
        assert hosts.job_status(0)["phase"] == "suspended"
    hosts.on(0, "resume", "j")
    assert [job.wait(60) for job in jobs] == [3, 3]
    assert [hosts.text(log).count("went") for log in ("log0", "log1")] == [1, 1]


@pytest.mark.parametrize("node", [0, 1])
def test_a_stage_that_fails_on_one_node(hosts: Hosts, node: int) -> None:
    """The verb fails on both and names the node; the job goes on, and the next image is whole."""
    hosts.start(*ACROSS)
    hosts.wait_step(3, "log0")
    for point in ("refuse_early", "cut", "quiesced", "device", "frozen", "thaw", "store_pack_write"):  # fmt: skip
        hosts.arm(node, point)
        failed = hosts.on(0, "checkpoint", "j", check=False)
        assert failed.returncode == 1, (point, failed.stderr)
        said = failed.stderr.strip().splitlines()[-1]
        assert ("node 1 (" in said) == (node == 1), failed.stderr
        assert "the job continues" in said
        at = max(hosts.steps("log0"))
        hosts.until(at + 6)
        hosts.wait(lambda at=at: max(hosts.steps("log1")) > at + 1, 60, f"steps after {point}")  # type: ignore[misc]
    whole = len(hosts.on(0, "images", "--store", str(hosts.store), "--json").stdout.split('"id"'))
    hosts.on(0, "checkpoint", "j")
    after = len(hosts.on(0, "images", "--store", str(hosts.store), "--json").stdout.split('"id"'))
    assert after == whole + 1
    assert hosts.kill_everything()
    for one in (0, 1):
        hosts.arm(one, "")
    hosts.came_back(hosts.bring_back((0, 1)))
    hosts.wait_end("done", "log0")
    hosts.wait_end("done", "log1")
    check(hosts)


def test_a_node_killed_in_the_middle_of_an_image(hosts: Hosts) -> None:
    """Its part is written, it does not come to the manifest: the image before stands, and nothing is left."""
    jobs = hosts.start(*ACROSS)
    hosts.wait_step(3, "log0")
    hosts.until(STEPS - 1)
    hosts.on(0, "checkpoint", "j")
    hosts.arm(1, "frozen:kill")
    failed = hosts.on(0, "checkpoint", "j", check=False)
    assert failed.returncode == 1
    assert "node 1 (" in failed.stderr
    assert jobs[1].wait(30) in (-signal.SIGKILL, 137)
    hosts.wait(lambda: "node 1 (" in hosts.text("log0"), 30, "the name of the node")
    assert (
        jobs[0].wait(60) != 0
    )  # across.py: the other tree has hung up, or its connection is silent
    hosts.kill_everything()
    hosts.came_back(hosts.bring_back((1, 0)))
    hosts.wait_end("done", "log0")
    hosts.wait_end("done", "log1")
    check(hosts)


def test_a_host_that_falls_silent(hosts: Hosts) -> None:
    """Named within 30 s; verbs do not wait for it for ever; the job ends, also on that host when it comes back."""
    jobs = hosts.start(*ACROSS)
    hosts.wait_step(3, "log0")
    supervisor = int(hosts.job_status(1, "j.1")["pid"])  # type: ignore[call-overload]
    os.kill(supervisor, signal.SIGSTOP)
    began = time.monotonic()
    failed = hosts.on(0, "checkpoint", "j", check=False)
    assert time.monotonic() - began < 30
    assert failed.returncode != 0
    hosts.wait(lambda: "node 1 (" in hosts.text("log0"), 10, "the name of the node")
    os.kill(supervisor, signal.SIGCONT)
    assert [job.wait(60) != 0 for job in jobs] == [True, True]
