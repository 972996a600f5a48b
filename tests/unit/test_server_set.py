# SPDX-License-Identifier: Apache-2.0
"""Whoever looks after processes hears how each of them ended, whichever thread reaps it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from devproxy.proxy import server_set
from devproxy.proxy.server import Server, ServerProcess, environment

ROOT = Path(__file__).resolve().parent.parent.parent

ENDS_WHILE_LOOKED_FOR = """
import os, time
from devproxy import proctree
from devproxy.proxy import command

begun = command.Command("/bin/sleep", ["sleep", "1000"], dict(os.environ), set())
look = proctree.descendants

def ends(pid, without=frozenset()):
    if begun.status is None:
        os.kill(begun.pid, 9)
        while open(f"/proc/{begun.pid}/stat").read().split()[2] != "Z":
            time.sleep(0.001)
    return look(pid, without)

proctree.descendants = ends
begun.end_stragglers(frozenset(), lambda pid, status: True)
assert begun.status == 137, begun.status
"""


def test_no_server_tunes_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_TUNABLEOP_ENABLED", "1")
    monkeypatch.setenv("PYTORCH_TUNABLEOP_FILENAME", "results.csv")
    monkeypatch.setenv("PYTORCH_OTHER", "1")
    found = environment("/lib")
    assert [name for name in found if name.startswith("PYTORCH_")] == ["PYTORCH_OTHER"]


def test_one_that_ends_while_it_is_looked_for_is_waited_for() -> None:
    line = [sys.executable, "-c", ENDS_WHILE_LOOKED_FOR]
    done = subprocess.run(line, capture_output=True, text=True, timeout=30, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_a_server_that_leaves_is_not_lost(tmp_path: Path) -> None:
    """Another node's supervisor asked between the end of an old server and its dismissal, and a resize failed."""
    servers = server_set.ServerSet()
    folder = SimpleNamespace(path=str(tmp_path))
    both = []
    for gpu in range(2):
        pid = os.posix_spawn("/bin/true", ["true"], {})
        both.append(Server(gpu, ServerProcess([gpu], pid, -1, "")))
    servers.members += both
    servers.retire([both[0]])
    try:
        assert servers.wait_gone(both, 10)
        assert servers.lost(folder) == [both[1].process]  # type: ignore[arg-type]
        servers.dismiss(both)
        assert servers.lost(folder) == []  # type: ignore[arg-type]
    finally:
        servers.stop()


def test_a_server_that_another_thread_reaps_was_killed() -> None:
    """The main thread has reaped it and not noted it yet when a verb's thread looks: not exit code 0.

    Seen as "the server of GPU 0 ended with exit code 0" in the message of a suspend whose server was killed.
    """
    servers = server_set.ServerSet()
    pid = os.posix_spawn("/bin/sleep", ["sleep", "1000"], {})
    server = Server(0, ServerProcess([0], pid, -1, ""))
    servers.members.append(server)
    looks = threading.Thread(target=servers.wait_gone, args=([server], 10))
    try:
        os.kill(pid, signal.SIGKILL)
        with servers.reaping:
            assert os.waitpid(pid, 0)[0] == pid
            looks.start()  # in the gap
            looks.join(0.2)
            assert server.status is None
            assert servers.note_exit(pid, signal.SIGKILL)
        looks.join()
    finally:
        servers.stop()
    assert "signal 9" in server.process.how_it_ended()
