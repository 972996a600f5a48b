# SPDX-License-Identifier: Apache-2.0
"""Communicators of hal/cuda whose ranks are in several process trees, over the fake driver and the fake NCCL (test_cuda.py).

Each tree has a job folder, servers and GPUs of its own, as on hosts of its own.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import sweeps
from tests.comm.test_cuda import FAIL
from tests.comm.test_trees import PARTS, PLACES, until_files
from tests.comm.trees import Trees
from tests.native.test_hal_cuda import fake_gpus

GPUS = 4


@pytest.fixture
def trees(tmp_path: Path) -> Callable[..., Trees]:
    env = fake_gpus(tmp_path / "root", GPUS) | {"DEVPROXY_CUDA_EXECUTOR": "host"}
    return lambda places, more=None, **words: Trees(places, cuda=env | (more or {}), **words)


@pytest.mark.parametrize("places", PLACES)
def test_collectives(trees: Callable[..., Trees], places: str) -> None:
    part = random.Random(f"{sweeps.seed()} cuda {places}").randrange(PARTS)
    with trees(places) as here:
        output = here.run("collectives.py", part, PARTS)
        assert int(output.split()[0]) > 100


@pytest.mark.parametrize("places", ["0011", "0101", "012"])
@pytest.mark.parametrize("late_us", [0, 20_000])
def test_scenarios(trees: Callable[..., Trees], places: str, late_us: int) -> None:
    with trees(places, {"FAKE_NCCL_LATE_US": str(late_us)}) as here:
        here.run("scenarios.py")


@pytest.mark.sweep(8)
@pytest.mark.parametrize("places", ["0011", "0120"])
@pytest.mark.parametrize("name", [name for name in FAIL if name != "server_dies"])
def test_failures(trees: Callable[..., Trees], name: str, places: str) -> None:
    with trees(places) as here:
        here.run("failures.py", name)


@pytest.mark.parametrize("places", ["0011", "0120"])
def test_a_server_dies(trees: Callable[..., Trees], places: str) -> None:
    """kill -9 of rank 2's server under an all_reduce: the ranks of all trees learn which one it was."""
    with trees(places) as here:
        process = here.popen("failures.py", "server_dies")
        until_files(here, process, *(f"posted{rank}" for rank in range(4)))
        place = here.place(2)
        victim = next(s for s in here.servers if (s.tree, s.gpu) == place).process
        victim.kill()
        victim.wait()  # as its supervisor does: nobody asks a zombie
        (here.notes / "killed").touch()
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, f"{out}\n{err}\n{here.logs()}"


def test_the_list_of_trees_comes_late(trees: Callable[..., Trees]) -> None:
    with trees("011", late=True) as here:
        process = here.popen("collectives.py", 0, 10 * PARTS)
        wait(lambda: all(list(here.folder(tree).glob("nccl-*")) for tree in (0, 1)), "boards")
        assert process.poll() is None
        here.say()
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, f"{out}\n{err}\n{here.logs()}"


class Ways:
    """Between the servers, so that their connections can be cut."""

    def __init__(self) -> None:
        self.taken = 0
        self._open: list[socket.socket] = []

    def __call__(self, address: str, port: int) -> tuple[str, int]:
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, args=(listener, (address, port)), daemon=True).start()
        return ("127.0.0.1", listener.getsockname()[1])

    def _accept(self, listener: socket.socket, to: tuple[str, int]) -> None:
        while True:
            near, far = listener.accept()[0], socket.create_connection(to)
            self.taken += 1
            self._open += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(1 << 16):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def cut(self) -> None:
        for one in self._open:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self._open.clear()


@pytest.mark.parametrize("places", ["01", "0110"])
def test_connections_are_cut(trees: Callable[..., Trees], places: str) -> None:
    """Between operations: they are made anew, and everybody is told again."""
    ways = Ways()
    with trees(places, by_way_of=ways) as here:
        process = here.popen("stages.py", 4)
        for stage in range(4):
            (here.notes / f"go{stage}").touch()
            # Rank 0's next operation is under way already behind its stage.
            until_files(here, process, *(f"done{stage}-{rank}" for rank in range(len(places))))
            if stage == 2:
                taken = ways.taken
                ways.cut()
                wait(lambda taken=taken: ways.taken > taken, "another connection")  # type: ignore[misc]
                time.sleep(0.2)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, f"{out}\n{err}\n{here.logs()}"


def test_a_tree_out_of_reach(trees: Callable[..., Trees]) -> None:
    """Whoever waits for it hears which one it is."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with trees("01", by_way_of=lambda _, __: ("127.0.0.1", port)) as here:
        with pytest.raises(AssertionError, match=f"tree 1 at 127.0.0.1:{port} cannot be reached"):
            here.run("collectives.py", 0, 20 * PARTS)


def wait(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_two_trees_on_one_gpu(trees: Callable[..., Trees]) -> None:
    """NCCL takes one rank for each GPU: the ranks hear which two they are."""
    with trees("01", {"FAKE_HOST": "5"}) as here:
        with pytest.raises(AssertionError, match="are on the same GPU") as failed:
            here.run("collectives.py", 0, 20 * PARTS)
        assert "not within" not in str(failed.value)  # it ends both
        assert "rank 0 on GPU 0 of tree 0 and rank 1 on GPU 0 of tree 1" in here.logs()
