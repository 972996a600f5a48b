# SPDX-License-Identifier: Apache-2.0
"""docs/waits.md lists every call of ours that can wait without an end, with its bound."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from devproxy.errors import DevproxyError, Refused
from devproxy.node import processes
from devproxy.proxy import janitor, server_set
from tests.unit.waits import ROOT, is_unbounded, native_waits, python_waits

NATIVE = [ROOT / "devproxy" / folder for folder in ("csrc", "hal", "interceptors", "torch")]
ROW = re.compile(r"\| (\S+) \| `([^`]+)`(?: x(\d+))? \| (.*) \|")


def listed() -> Counter[tuple[str, str]]:
    rows: Counter[tuple[str, str]] = Counter()
    for line in (ROOT / "docs/waits.md").read_text().splitlines():
        if row := ROW.fullmatch(line):
            file, wait, times, bound = row.groups()
            assert len(bound) > 8, line
            assert (f"devproxy/{file}", wait) not in rows, line
            rows[f"devproxy/{file}", wait] = int(times or 1)
    return rows


def test_every_wait_has_a_bound_and_a_name() -> None:
    found = python_waits(ROOT / "devproxy") + native_waits(*NATIVE)
    here = listed()
    assert len(found) > 50
    new, gone = found - here, here - found
    assert not new, (
        f"give them a time-out, or a row in docs/waits.md that says what bounds them: {dict(new)}"
    )
    assert not gone, f"docs/waits.md lists what is not there any more: {dict(gone)}"


@pytest.mark.parametrize(
    ("text", "unbounded"),
    [
        ("event.wait()", True),
        ("event.wait(None)", True),
        ("event.wait(3)", False),
        ("event.wait(timeout=3)", False),
        ("thread.join()", True),
        ("'/'.join(x)", False),
        ("poll.poll()", True),
        ("poll.poll(5 if late else None)", True),
        ("poll.poll(5)", False),
        ("select.select([a], [], [])", True),
        ("select.select([a], [], [], 1)", False),
        ("fcntl.flock(fd, fcntl.LOCK_EX)", True),
        ("fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)", False),
        ("os.waitpid(pid, 0)", True),
        ("os.waitpid(pid, os.WNOHANG)", False),
        ("subprocess.run(['x'])", True),
        ("subprocess.run(['x'], timeout=3)", False),
        ("stub.Status(request)", True),
        ("stub.Status(request, timeout=3)", False),
        ("link.recv(4)", True),
    ],
)
def test_what_counts_as_a_wait(text: str, unbounded: bool) -> None:
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert is_unbounded(call) is unbounded


def test_a_native_wait_is_found_and_a_comment_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.cc").write_text(
        "// poll(1)\nint a = ::poll(fds, 1, -1);\n/* recv(\n*/ t.join();\nmyrecv(1);\n"
    )
    monkeypatch.setattr("tests.unit.waits.ROOT", tmp_path)
    assert native_waits(tmp_path) == {("a.cc", "poll"): 1, ("a.cc", "join"): 1}


def test_a_janitor_that_a_signal_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor, "END_S", 0.2)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    child.send_signal(signal.SIGSTOP)
    reader, writer = os.pipe()
    began = time.monotonic()
    janitor.Janitor(child.pid, writer).dismiss()
    assert time.monotonic() - began < 5
    assert os.read(reader, 16) == janitor.NORMAL_END
    os.close(reader)
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)


def test_a_server_program_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_set, "ASK_S", 0.2)
    program = tmp_path / "server"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o700)
    began = time.monotonic()
    with pytest.raises(Refused, match="does not answer within"):
        server_set._ask_program(str(program), "--describe")
    assert time.monotonic() - began < 5


def test_a_restore_of_a_twin_that_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "TWIN_S", 0.2)
    path = tmp_path / "ghosts.lock"
    path.touch()
    holder = "import fcntl,sys; f=open(sys.argv[1],'r+'); fcntl.lockf(f, fcntl.LOCK_EX, 1, 77); print(1, flush=True); sys.stdin.read()"
    with (
        subprocess.Popen(
            [sys.executable, "-c", holder, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other,
        open(path, "r+b") as file,
    ):
        assert other.stdout
        assert other.stdout.readline() == b"1\n"
        processes._lock_byte(file.fileno(), 78)
        with pytest.raises(DevproxyError, match="another restore of the same image"):
            processes._lock_byte(file.fileno(), 77)
        assert other.stdin
        other.stdin.close()
