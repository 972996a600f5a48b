# SPDX-License-Identifier: Apache-2.0
"""The server against a client that knows only the wire (tests/native/server_raw_client.cc)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.integration.test_programs import newer

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "tests" / "native"
BUILD = ROOT / "build" / "tests"
CASES = (
    "basics",
    "memory_is_accounted",
    "streams_and_events",
    "host_functions",
    "faults_stick",
    "crashes_are_told",
    "malformed_messages_poison_one",
    "images_are_kept_once",
    "graph_launches_have_room",
    "arrays_are_checked",
    "killed_clients_leave_nothing",
    "leaves_with_the_lease",
    "sigterm_tells_clients",
    "two_servers_of_a_job",
    "bad_hellos_are_refused",
    "a_flood_behind_a_stream_fills_the_ring",
    "cuts_under_load",
    "chaos_is_legal",
    "round_trip_time",
)


def built() -> tuple[Path, Path]:
    """The raw client and its kernel module, compiled again when something that they are made of has changed."""
    common = ["g++", "-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]
    common += [f"-I{ROOT}", f"-I{ROOT / 'build' / 'gen' / 'wire'}"]
    headers = [
        *NATIVE.glob("*.h"),
        *(ROOT / "devproxy").rglob("*.h"),
        *(ROOT / "build" / "gen" / "wire").glob("*.h"),
    ]
    outs = []
    for name, options in (("client", ["-pthread"]), ("module.so", ["-shared", "-fPIC"])):
        out, source = BUILD / f"server_raw_{name}", NATIVE / f"server_raw_{Path(name).stem}.cc"
        if not newer(out, source, *headers):
            BUILD.mkdir(parents=True, exist_ok=True)
            fresh = out.with_name(f"{out.name}.{os.getpid()}")
            subprocess.run([*common, *options, "-o", str(fresh), str(source)], check=True)
            fresh.rename(out)
        outs.append(out)
    return outs[0], outs[1]


@pytest.fixture(scope="module")
def program() -> tuple[Path, Path]:
    return built()


def test_every_case_is_run(program: tuple[Path, Path]) -> None:
    listed = subprocess.run([program[0], "--list"], capture_output=True, text=True, check=True)
    assert tuple(listed.stdout.split()) == CASES


@pytest.mark.parametrize("case", CASES)
def test_server(case: str, program: tuple[Path, Path], lib_dir: Path) -> None:
    command = [str(program[0]), str(lib_dir / "devproxy-server"), str(program[1]), case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
