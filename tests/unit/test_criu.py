# SPDX-License-Identifier: Apache-2.0
"""The CRIU driver by itself: finding CRIU, reading its log and its statistics, ending one that hangs."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from devproxy.checkpoint import criu
from devproxy.errors import Refused

LOG = """\
(00.003493) Warn  (criu/kerndat.c:1642): CRIU was built without libnftables support
(00.009131) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted
(00.051000) Error (criu/sk-unix.c:818): unix: External socket is used. Consider using --ext-unix-sk option.
(00.051200) Error (criu/cr-dump.c:1978): Dumping FAILED.
"""


def test_the_first_real_error_line_is_the_reason() -> None:
    assert criu.first_error(LOG) == (
        "unix: External socket is used. Consider using --ext-unix-sk option."
    )
    assert criu.first_error("(00.1) Warn  (x.c:1): y\n") == ""


def test_who_was_killed_while_criu_stopped_it() -> None:
    def killed(line: str) -> set[int]:
        return criu.CriuError("dump", line, "log").killed()

    assert killed("Task 29744 is in unexpected state: 9") == {29744}
    assert killed("Task 29744 (name) is in unexpected state: 9") == {29744}
    assert killed("Task 29744 is in unexpected state: 8b") == set()  # SIGSEGV, core
    assert killed("Task 29744 is in unexpected state: 900") == set()  # it exited with 9
    assert killed("unix: External socket is used.") == set()


def test_frozen_time_from_the_statistics(tmp_path: Path) -> None:
    dump = (
        b"\x08\x07" + b"\x10" + b"\xc0\x84\x3d" + b"\x18\x01"
    )  # freezing 7 us, frozen 1 000 000 us
    entry = b"\x0a" + bytes([len(dump)]) + dump
    path = tmp_path / "stats-dump"
    path.write_bytes(struct.pack("<III", 0x55105940, 0x57093306, len(entry)) + entry)
    assert criu._frozen_s(str(tmp_path)) == 1.0
    path.write_bytes(path.read_bytes()[:-4])
    assert criu._frozen_s(str(tmp_path)) >= 0
    path.unlink()
    assert criu._frozen_s(str(tmp_path)) == 0


@pytest.mark.parametrize(
    ("version", "pycriu", "why"),
    [("3.17.1", True, "is 3.17.1"), ("4.2", False, "has no pycriu"), ("4.10.1", True, "")],
)
def test_which_criu_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, pycriu: bool, why: str
) -> None:
    program = tmp_path / "sbin" / "criu"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho 'Version: {version}'\n")
    program.chmod(0o755)
    if pycriu:
        (tmp_path / "lib" / "pycriu").mkdir(parents=True)
        (tmp_path / "lib" / "pycriu" / "rpc_pb2.py").touch()
    monkeypatch.setenv("DEVPROXY_CRIU", os.fspath(program))
    if not why:
        assert criu.find().version == (4, 10, 1)
        return
    with pytest.raises(Refused) as caught:
        criu.find()
    assert why in caught.value.what
    assert "devproxy doctor --fix" in caught.value.remedy
