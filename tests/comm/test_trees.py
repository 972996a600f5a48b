# SPDX-License-Identifier: Apache-2.0
"""Communicators whose ranks are in several process trees, each with a job folder and servers of its own (trees.py)."""

from __future__ import annotations

import random
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests import sweeps
from tests.comm.test_collectives import FAILURES
from tests.comm.trees import Trees

PARTS = 40
# The tree of each rank.
PLACES = ("01", "001", "012", "010", "0001", "0011", "0101", "0120")


def a_part(*of: object) -> int:
    return random.Random(f"{sweeps.seed()} {of}").randrange(PARTS)


@pytest.mark.parametrize("places", PLACES)
def test_collectives(places: str) -> None:
    """A part of all cases, another one after each commit. All of them are the sweep below."""
    with Trees(places) as trees:
        output = trees.run("collectives.py", a_part(places), PARTS)
    assert int(output.split()[0]) > 100


@pytest.mark.parametrize("places", ["01", "0120"])
def test_collectives_in_chaos(places: str) -> None:
    with Trees(places, chaos=a_part("chaos", places)) as trees:
        trees.run("collectives.py", a_part(places), 2 * PARTS)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("part", range(0, PARTS, 8))
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("chaos", [None, 3])
def test_every_collective(places: str, part: int, chaos: int | None) -> None:
    with Trees(places, chaos) as trees:
        for one in range(part, part + 8):
            trees.run("collectives.py", one, PARTS)


@pytest.mark.parametrize(
    ("places", "gpus", "chaos"),
    [
        pytest.param("0011", 0, None, id="2 and 2"),
        pytest.param("0101", 1, None, id="2 and 2 on a GPU each"),
        pytest.param("0001", 0, 5, id="3 and 1 in chaos"),
        pytest.param("012", 0, 11, id="three trees in chaos"),
    ],
)
def test_scenarios(places: str, gpus: int, chaos: int | None) -> None:
    with Trees(places, chaos, gpus=gpus) as trees:
        trees.run("scenarios.py")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("seed", range(200, 210))
def test_scenarios_in_chaos(seed: int) -> None:
    with Trees(random.Random(seed).choice(PLACES), seed) as trees:
        trees.run("scenarios.py")


# -- failures ------------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(8)
@pytest.mark.parametrize("places", ["0011", "0101", "0120"])
@pytest.mark.parametrize("name", [name for name in FAILURES if name != "server_dies"])
def test_failures(name: str, places: str) -> None:
    with Trees(places) as trees:
        trees.run("failures.py", name)


@pytest.mark.parametrize("places", ["0011", "0120"])
def test_a_server_dies(places: str) -> None:
    """kill -9 of rank 2's server under an all_reduce: the ranks of all trees learn which one it was."""
    with Trees(places) as trees:
        process = trees.popen("failures.py", "server_dies")
        until_files(trees, process, *(f"posted{rank}" for rank in range(4)))
        place = trees.place(2)
        next(s for s in trees.servers if (s.tree, s.gpu) == place).process.kill()
        (trees.notes / "killed").touch()
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, f"{out}\n{err}\n{trees.logs()}"


def until_files(trees: Trees, process: subprocess.Popen[str], *names: str) -> None:
    until = time.monotonic() + 60
    while not all((trees.notes / name).exists() for name in names):
        assert time.monotonic() < until, f"{names}\n{trees.logs()}"
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)


# -- servers that move, and lists that come late ----------------------------------------------------------------------


@pytest.mark.parametrize("places", ["01", "0110"])
def test_servers_move(places: str) -> None:
    """Each in turn, while the ranks are idle but rank 0, whose next operation is under way already."""
    with Trees(places) as trees:
        process = trees.popen("stages.py", 4)
        for stage in range(4):
            (trees.notes / f"go{stage}").touch()
            until_files(trees, process, *(f"done{stage}-{rank}" for rank in range(len(places))))
            time.sleep(0.05)
            if stage < 3:
                trees.move(1, stage % trees.gpus_of(1))
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, f"{out}\n{err}\n{trees.logs()}"
        assert trees.moves == 3


def test_the_list_of_trees_comes_late() -> None:
    with Trees("011", late=True) as trees:
        process = trees.popen("collectives.py", 0, 10 * PARTS)
        time.sleep(0.7)
        assert process.poll() is None
        trees.say()
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, f"{out}\n{err}\n{trees.logs()}"


def test_ipv6() -> None:
    with Trees("01", address="::1") as trees:
        trees.run("collectives.py", 0, 10 * PARTS)


# -- whoever connects --------------------------------------------------------------------------------------------------

HELLO = struct.Struct("<II32sIIQ")
FRAME = struct.Struct("<IB3xQQIIIIQQQQQQBBBBiQQQQ")
HELLO_MAGIC, FRAME_MAGIC = 0x48505044, 0x46505044
JOIN, DATA, POST, FINISH, PAIR_POST, PAIR_FINISH, PAIR_WRONG, LEAVE, GONE, BYE, UNPOST, PAIR_UNPOST, MARK = range(1, 14)  # fmt: skip
BASE, BYTES = 1 << 40, 1 << 20


def hello(trees: Trees, **changed: Any) -> bytes:
    said = {"magic": HELLO_MAGIC, "version": 1, "token": bytes.fromhex(trees.token), "tree": 1, "gpu": 0, "server": 7}  # fmt: skip
    return HELLO.pack(*(said | changed).values())


def connect(trees: Trees) -> socket.socket:
    connection = socket.create_connection(trees.endpoint(0, 0))
    connection.settimeout(10)
    return connection


@pytest.mark.parametrize(
    "changed",
    [
        {"token": b"\0" * 32},
        {"magic": 1},
        {"version": 2},
        {"tree": 0},
        {"tree": 64},
        {"gpu": 256},
        {"server": 0},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_stranger_is_cut_off_in_silence(changed: dict[str, Any]) -> None:
    with Trees("01") as trees:
        with connect(trees) as connection:
            connection.sendall(hello(trees, **changed))
            try:
                assert connection.recv(1) == b""
            except ConnectionResetError:
                pass
        trees.run("collectives.py", 0, 20 * PARTS)


def frame(kind: int, **changed: int) -> bytes:
    """Of the communicator of key (5, 6) and two ranks, from rank 1."""
    said = {
        "magic": FRAME_MAGIC, "kind": kind, "low": 5, "high": 6, "ranks": 2, "rank": 1, "other": 0, "slot": 40,
        "incarnation": 9, "base": BASE, "length": BYTES, "addr": 0, "bytes": 0,
        "comm": 0, "op_kind": 0, "type": 7, "reduction": 0, "scalar_on_device": 0, "peer": 0, "send": BASE, "recv": BASE,
        "count": 4, "scalar": 0,
    }  # fmt: skip
    assert set(changed) <= set(said)
    return FRAME.pack(*(said | changed).values())


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([frame(JOIN, magic=3)], id="magic"),
        pytest.param([frame(JOIN), frame(77)], id="kind"),
        pytest.param([frame(JOIN, ranks=0)], id="no ranks"),
        pytest.param([frame(JOIN, ranks=5000)], id="too many ranks"),
        pytest.param([frame(JOIN, rank=2)], id="rank"),
        pytest.param([frame(JOIN, incarnation=0)], id="incarnation"),
        pytest.param([frame(JOIN, length=1 << 60)], id="too much memory"),
        pytest.param([frame(JOIN, base=2**64 - 4096)], id="memory behind the end"),
        pytest.param([frame(POST)], id="post before join"),
        pytest.param([frame(JOIN), frame(POST, rank=0)], id="post of another rank"),
        pytest.param([frame(JOIN), frame(FINISH)], id="finish before post"),
        pytest.param([frame(JOIN), frame(POST), frame(POST)], id="post twice"),
        pytest.param([frame(JOIN), frame(POST, op_kind=10)], id="operation"),
        pytest.param([frame(JOIN), frame(POST, type=12)], id="type"),
        pytest.param([frame(JOIN), frame(POST, peer=2)], id="root"),
        pytest.param([frame(JOIN), frame(POST, peer=-1)], id="negative root"),
        pytest.param([frame(JOIN), frame(DATA, addr=BASE, bytes=0)], id="no data"),
        pytest.param([frame(JOIN), frame(DATA, addr=BASE, bytes=2 << 20)], id="too much data"),
        pytest.param([frame(JOIN), frame(DATA, addr=BASE - 1, bytes=1)], id="data below"),
        pytest.param([frame(JOIN), frame(DATA, addr=BASE + BYTES - 1, bytes=2)], id="data above"),
        pytest.param([frame(JOIN), frame(DATA, addr=2**64 - 1, bytes=2)], id="data that wraps"),
        pytest.param([frame(JOIN), frame(DATA, addr=BASE, bytes=1, incarnation=8)], id="data of another"),
        pytest.param([frame(JOIN), frame(PAIR_FINISH)], id="received without a send"),
        pytest.param([frame(JOIN), frame(PAIR_WRONG)], id="wrong without a send"),
        pytest.param([frame(JOIN), frame(PAIR_POST), frame(PAIR_POST)], id="sent twice"),
        pytest.param([frame(JOIN), frame(PAIR_POST, other=2)], id="sent to nobody"),
        pytest.param([frame(JOIN), frame(UNPOST)], id="taken back before post"),
        pytest.param([frame(JOIN), frame(POST), frame(UNPOST), frame(UNPOST)], id="taken back twice"),
        pytest.param([frame(JOIN), frame(PAIR_UNPOST)], id="send taken back before it was sent"),
    ],
)  # fmt: skip
def test_a_wrong_frame_cuts_its_connection(trees_alone: Trees, frames: list[bytes]) -> None:
    with connect(trees_alone) as connection:
        connection.sendall(hello(trees_alone))
        assert len(connection.recv(16, socket.MSG_WAITALL)) == 16
        connection.sendall(b"".join(frames))
        try:
            assert connection.recv(1) == b""
        except ConnectionResetError:
            pass
    assert "cut off" in trees_alone.logs()
    assert all(server.process.poll() is None for server in trees_alone.servers)
    for path in trees_alone.folder(0).glob("comm-*"):
        path.unlink()
    for path in trees_alone.folder(0).glob("gpu*.log"):
        path.write_text("")


@pytest.fixture(scope="module")
def trees_alone() -> Iterator[Trees]:
    with Trees("01") as trees:
        yield trees


@pytest.mark.parametrize("seed", range(3))
def test_garbage(seed: int) -> None:
    """Bytes of no shape, and frames with some wrong field: the server lives, and serves the job then."""
    dice = random.Random(f"{sweeps.seed()} {seed}")
    with Trees("01") as trees:
        for _ in range(60):
            with connect(trees) as connection:
                try:
                    if dice.random() < 0.2:
                        connection.sendall(dice.randbytes(dice.randrange(300)))
                        continue
                    connection.sendall(hello(trees, gpu=dice.randrange(3), server=dice.randrange(1, 4)))  # fmt: skip
                    for _ in range(dice.randrange(30)):
                        connection.sendall(odd_frame(dice))
                    if dice.random() < 0.3:
                        connection.sendall(dice.randbytes(dice.randrange(2000)))
                except (BrokenPipeError, ConnectionResetError):
                    pass
        trees.run("collectives.py", 0, 10 * PARTS)
        assert all(server.process.poll() is None for server in trees.servers)


def odd_frame(dice: random.Random) -> bytes:
    kind = dice.choice([JOIN, JOIN, DATA, DATA, POST, FINISH, PAIR_POST, PAIR_FINISH, PAIR_WRONG, LEAVE, GONE, UNPOST, PAIR_UNPOST, MARK])  # fmt: skip
    changed = {"low": dice.randrange(2), "rank": dice.randrange(2), "other": dice.randrange(2), "addr": BASE + dice.randrange(4096)}  # fmt: skip
    if kind == DATA:
        changed["bytes"] = dice.randrange(1, 5000)
    if dice.random() < 0.1:
        field = dice.choice(["ranks", "rank", "incarnation", "base", "length", "addr", "bytes", "slot", "count"])  # fmt: skip
        changed[field] = dice.choice([0, 1, 3, 1024, 2**31, 2**32 - 1])
    # A frame may say 4 GiB. What follows is far less: this test sends a frame that breaks off, not 4 GiB.
    return frame(kind, **changed) + (
        dice.randbytes(min(changed["bytes"], 5000)) if kind == DATA else b""
    )
