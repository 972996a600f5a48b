# SPDX-License-Identifier: Apache-2.0
"""Connections between trees that are encrypted: they carry what plain ones carry, and nobody on the way reads or changes it.

The key and a change of the key in the middle: tests/native/server_tls.cc. Jobs: tests/checkpoint/test_hosts.py.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.comm.test_collectives import FAILURES
from tests.comm.test_trees import PARTS, a_part, connect, frame, hello, until_files
from tests.comm.trees import Trees


def encrypted(places: str, **more: object) -> Trees:
    return Trees(places, encrypts="".join(sorted(set(places))), **more)  # type: ignore[arg-type]


@pytest.mark.every
@pytest.mark.parametrize(("places", "chaos"), [("01", None), ("0120", None), ("0110", 3)])
def test_collectives(places: str, chaos: int | None) -> None:
    with encrypted(places, chaos=chaos) as trees:
        trees.run("collectives.py", a_part("encrypted", places), PARTS)
        assert "has connected, encrypted" in trees.logs()


@pytest.mark.parametrize(("places", "gpus", "chaos"), [("0011", 0, None), ("0101", 1, 5)])
def test_scenarios(places: str, gpus: int, chaos: int | None) -> None:
    with encrypted(places, chaos=chaos, gpus=gpus) as trees:
        trees.run("scenarios.py")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", [name for name in FAILURES if name != "server_dies"])
def test_failures(name: str) -> None:
    with encrypted("0120") as trees:
        trees.run("failures.py", name)


def test_a_server_dies() -> None:
    with encrypted("0011") as trees:
        process = trees.popen("failures.py", "server_dies")
        until_files(trees, process, *(f"posted{rank}" for rank in range(4)))
        place = trees.place(2)
        next(s for s in trees.servers if (s.tree, s.gpu) == place).process.kill()
        (trees.notes / "killed").touch()
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, f"{out}\n{err}\n{trees.logs()}"


def test_servers_move() -> None:
    with encrypted("0110") as trees:
        process = trees.popen("stages.py", 4)
        for stage in range(4):
            (trees.notes / f"go{stage}").touch()
            until_files(trees, process, *(f"done{stage}-{rank}" for rank in range(4)))
            if stage < 3:
                trees.move(1, stage % trees.gpus_of(1))
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, f"{out}\n{err}\n{trees.logs()}"


# -- whoever is on the way ---------------------------------------------------------------------------------------------


class Ways:
    """Between the servers: keeps what they send, and changes a byte of it where it is told to."""

    def __init__(self) -> None:
        self.sent = bytearray()
        self.changes = False
        self._mu = threading.Lock()

    def __call__(self, address: str, port: int) -> tuple[str, int]:
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, args=(listener, (address, port)), daemon=True).start()
        return ("127.0.0.1", listener.getsockname()[1])

    def _accept(self, listener: socket.socket, to: tuple[str, int]) -> None:
        while True:
            near, far = listener.accept()[0], socket.create_connection(to)
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := bytearray(one.recv(1 << 16)):
                with self._mu:
                    self.sent += data
                    if self.changes and len(data) > 4096:
                        self.changes = False
                        data[2000] ^= 1
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            pass


@pytest.mark.every
@pytest.mark.parametrize("encrypts", ["", "01"])
def test_what_is_on_the_wire(encrypts: str) -> None:
    """Rank 1's numbers, and the job's token: there without, not there with."""
    ways = Ways()
    with Trees("01", by_way_of=ways, encrypts=encrypts) as trees:
        process = trees.popen("stages.py", 1)
        (trees.notes / "go0").touch()
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, f"{out}\n{err}\n{trees.logs()}"
        numbers = np.full(64, 10, np.float32).tobytes()  # what rank 1 gives into stage 0's sum
        assert len(ways.sent) > 1 << 20
        plain = not encrypts
        assert (numbers in ways.sent) == plain
        assert (bytes.fromhex(trees.token) in ways.sent) == plain
        assert bytes.fromhex(trees.key) not in ways.sent


def test_a_byte_is_changed_on_the_way() -> None:
    """The connection is cut before anybody uses it: nobody computes with a wrong number, and both ranks hear who is lost."""
    ways = Ways()
    with Trees("01", by_way_of=ways, encrypts="01") as trees:
        process = trees.popen("stages.py", 2)
        (trees.notes / "go0").touch()
        until_files(trees, process, "done0-0", "done0-1")
        ways.changes = True
        (trees.notes / "go1").touch()
        out, err = process.communicate(timeout=60)
        assert process.returncode != 0, out
        assert "AssertionError: (" not in err, err  # stages.py, of a wrong number
        assert "of tree" in err, err  # of a rank that is lost
        assert not ways.changes
        assert "is not what it has sent: decryption failed or bad record mac" in trees.logs()


# -- who does not fit --------------------------------------------------------------------------------------------------


def until(trees: Trees, *words: str) -> None:
    end = time.monotonic() + 30
    while not all(word in trees.logs() for word in words):
        assert time.monotonic() < end, trees.logs()
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("encrypts", "words"),
    [
        pytest.param(
            "0",
            [
                "the server of GPU 0 of tree 1 does not encrypt, and this job's data is encrypted",
                "it takes encrypted connections alone, and this node does not encrypt",
                "a connection from 127.0.0.1 is refused: it encrypts, and this job's data is not encrypted",
                "it takes no encrypted connection",
            ],
            id="one is plain",
        ),
        pytest.param("01", ["a connection from 127.0.0.1 is refused: it has another key than this job's"], id="another key"),
    ],
)  # fmt: skip
def test_who_does_not_fit_is_refused_by_name(encrypts: str, words: list[str]) -> None:
    """At both ends, and no operation of the job's is done."""
    with Trees("01", encrypts=encrypts, late=True) as trees:
        trees.say(keys={1: secrets.token_hex(32)})
        process = trees.popen("stages.py", 1)
        (trees.notes / "go0").touch()
        until(trees, *words)
        assert "has connected" not in trees.logs()
        assert not list(trees.notes.glob("done*"))
        if encrypts == "01":  # the right key comes late
            trees.say()
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, f"{out}\n{err}\n{trees.logs()}"
        else:  # after a while the ranks hear it too
            _, err = process.communicate(timeout=60)
            assert process.returncode != 0
            assert "cannot be reached: it takes" in err, err


def test_a_list_without_the_key_is_not_taken() -> None:
    """The server would speak plainly else."""
    with Trees("01", encrypts="01", late=True) as trees:
        trees.encrypts = ""
        trees.say()
        process = trees.popen("stages.py", 1)
        (trees.notes / "go0").touch()
        time.sleep(0.5)
        assert process.poll() is None
        assert "has connected" not in trees.logs()
        trees.encrypts = "01"
        trees.say()
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, f"{out}\n{err}\n{trees.logs()}"


def test_a_host_without_openssl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is to encrypt does not start there, and says why; others do not miss it."""
    (tmp_path / "libssl.so.3").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with pytest.raises(
        AssertionError, match="error: .*OpenSSL cannot be loaded .*: install the package"
    ):
        encrypted("01").__enter__()  # noqa: PLC2801
    with Trees("01") as trees:
        trees.run("collectives.py", 0, 20 * PARTS)


def answer(trees: Trees, said: bytes) -> bytes:
    with connect(trees) as connection:
        connection.sendall(said)
        try:
            return connection.recv(64)
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize(
    "say",
    [
        pytest.param(lambda trees: hello(trees, token=b"\0" * 32), id="plain, without the token"),
        pytest.param(lambda trees: b"\x16" + hello(trees)[1:], id="no TLS"),
        pytest.param(lambda trees: b"\x16\x03\x01\xff\xff" + b"\0" * 70000, id="long"),
        pytest.param(lambda trees: hello(trees) + frame(1), id="plain, with frames behind it"),
    ],
)
def test_strangers(say: Callable[[Trees], bytes]) -> None:
    """They change nothing, and the server lives and serves the job then."""
    with encrypted("01") as trees:
        said = answer(trees, say(trees))
        # Who has the token hears that it is to encrypt; TLS says what is wrong with TLS; else silence.
        assert said == b"" or said[8:16] == b"\0" * 8 or said[0] == 21, said
        trees.run("collectives.py", 0, 20 * PARTS)
