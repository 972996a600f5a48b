# SPDX-License-Identifier: Apache-2.0
"""A coordinator's patience with a server: one that copies may take its time, one that hangs may not."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from devproxy.cli import jobs
from devproxy.control import servers
from devproxy.errors import ServerStopped
from devproxy.proxy import control_channel, stats
from devproxy.proxy.control_channel import ControlChannel, ServerGone

Answer = Callable[[socket.socket, dict[str, str]], None]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="devproxy-test-") as path:  # short: a socket is in it
        yield Path(path)


def served(folder: Path, answer: Answer) -> threading.Thread:
    """A server of GPU 0 that takes one request."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "gpu0.sock"))
    listener.listen()

    def serve() -> None:
        with listener, listener.accept()[0] as peer:
            peer.recv(control_channel._HELLO.size, socket.MSG_WAITALL)
            (length,) = struct.unpack("<I", peer.recv(4, socket.MSG_WAITALL))
            answer(peer, json.loads(peer.recv(length, socket.MSG_WAITALL)))

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_a_dump_that_goes_on_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times as long as the patience; every write begins it anew."""
    monkeypatch.setattr(control_channel, "PATIENCE_S", 1.0)
    monkeypatch.setattr(control_channel, "LOOK_S", 0.02)

    def slowly(peer: socket.socket, request: dict[str, str]) -> None:
        with open(Path(request["dir"]) / "gpu0-1.dev", "wb", buffering=0) as file:
            file.truncate(1 << 24)
            for _ in range(8):
                file.write(b"x" * (1 << 16))
                time.sleep(0.5)
        text = b'{"ok":true,"device_bytes":5}'
        peer.sendall(struct.pack("<I", len(text)) + text)

    thread = served(folder, slowly)
    with ControlChannel(str(folder), 0) as channel:
        assert channel.dump(str(folder))["device_bytes"] == 5
    thread.join()


SERVER = """
import os, signal, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("up", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.parametrize("asked", ["a verb", "its statistics"])
def test_a_server_that_is_stopped_is_named_and_not_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setattr(control_channel, "LOOK_S", 0.02)
    monkeypatch.setattr(control_channel, "STOPPED_S", 0.2, raising=False)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder / "gpu0.sock")], stdout=-1, text=True
    )
    try:
        assert server.stdout is not None
        server.stdout.readline()
        words = f"the server of GPU 0 .*process {server.pid}. is stopped.*kill -CONT {server.pid}"
        if asked == "a verb":
            began = time.monotonic()
            with ControlChannel(str(folder), 0) as channel, pytest.raises(ServerGone, match=words):
                channel.request("cut", 4.0)
            assert time.monotonic() - began < 3
        else:
            with pytest.raises(ServerStopped, match=words):
                stats.query(str(folder), 0, timeout_s=0.2)
            (answer,) = servers.ask(
                {"phase": "running", "here": [0], "gpus": [0]}, str(folder), bytes(32)
            )
            assert jobs.state_of({"alive": True, "servers": [answer]}) == "server stopped"
    finally:
        server.kill()
        server.communicate()


def test_a_server_that_hangs_in_a_dump_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server's writing into the same folder does not count as its own."""
    monkeypatch.setattr(control_channel, "PATIENCE_S", 0.4)
    monkeypatch.setattr(control_channel, "LOOK_S", 0.02)
    end = threading.Event()
    thread = served(folder, lambda peer, request: bool(end.wait()) and None)

    def other() -> None:
        with open(folder / "gpu1-1.dev", "wb", buffering=0) as file:
            while not end.wait(0.05):
                file.write(b"x" * 4096)

    writer = threading.Thread(target=other)
    writer.start()
    try:
        with ControlChannel(str(folder), 0) as channel, pytest.raises(ServerGone) as gone:
            channel.dump(str(folder))
    finally:
        end.set()
        thread.join()
        writer.join()
    assert "GPU 0 did not answer 'dump': no progress for 0.4 s" in str(gone.value)
