# SPDX-License-Identifier: Apache-2.0
"""scripts/install_system.sh asks the package server for what is missing, and for nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TOOLS = ["g++", "cc", "c++", "cmake", "ninja", "flock", "ip"]


def install(
    tmp_path: Path, missing: set[str], user: int = 0, given: tuple[str, ...] = (sys.executable,)
) -> tuple[int, list[str], str]:
    """Exit code, calls of apt-get, stderr; on a machine that has TOOLS but `missing`. given: what the script is given.

    The tools do nothing: a compiler that is content has found the headers that it was asked for."""
    tools = tmp_path / "bin"
    tools.mkdir()
    calls = tmp_path / "calls"
    stubs = {name: ":" for name in TOOLS if name not in missing}
    for name, body in (stubs | {"id": f"echo {user}", "apt-get": f'echo "$@" >> {calls}'}).items():
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    line = ["/bin/sh", str(ROOT / "scripts/install_system.sh"), *given]
    done = subprocess.run(line, env={"PATH": str(tools)}, capture_output=True, text=True)
    return done.returncode, calls.read_text().splitlines() if calls.exists() else [], done.stderr


def test_nothing_is_missing(tmp_path: Path) -> None:
    assert install(tmp_path, set()) == (0, [], "")


def test_only_what_is_missing(tmp_path: Path) -> None:
    code, calls, _ = install(tmp_path, {"ninja", "cmake"})
    assert code == 0
    assert calls == ["update -q", "install -y -q --no-install-recommends cmake ninja-build"]


def test_not_root(tmp_path: Path) -> None:
    code, calls, err = install(tmp_path, {"g++"}, user=1000)
    assert (code, calls) == (2, [])
    assert "sudo apt-get install build-essential" in err


def test_a_build_of_the_wheel_names_what_is_missing_and_installs_nothing(tmp_path: Path) -> None:
    given = ("--check", "build")
    code, calls, err = install(tmp_path, {"cmake", "ip", "flock"}, given=given)
    assert (code, calls) == (2, [])
    assert err.endswith("run as root: apt-get install cmake\n")


def test_an_installed_devproxy_needs_a_compiler_alone(tmp_path: Path) -> None:
    given = ("--for", "plugin", sys.executable)
    _, calls, _ = install(tmp_path, {"g++", "cmake", "ninja", "ip"}, given=given)
    assert calls[1] == "install -y -q --no-install-recommends build-essential"
