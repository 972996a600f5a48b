"""The server against a client that knows only the wire (tests/unit/server_raw_client.cc)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "tests" / "unit"
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


@pytest.fixture(scope="module")
def program() -> tuple[Path, Path]:
    """The raw client and its kernel module."""
    BUILD.mkdir(parents=True, exist_ok=True)
    client, module = BUILD / "server_raw_client", BUILD / "server_raw_module.so"
    common = ["g++", "-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]
    common += [f"-I{ROOT}", f"-I{ROOT / 'build' / 'gen'}"]
    command = [*common, "-pthread", "-o", str(client), str(UNIT / "server_raw_client.cc")]
    subprocess.run(command, check=True)
    command = [*common, "-shared", "-fPIC", "-o", str(module), str(UNIT / "server_raw_module.cc")]
    subprocess.run(command, check=True)
    return client, module


def test_every_case_is_run(program: tuple[Path, Path]) -> None:
    listed = subprocess.run([program[0], "--list"], capture_output=True, text=True, check=True)
    assert tuple(listed.stdout.split()) == CASES


@pytest.mark.parametrize("case", CASES)
def test_server(case: str, program: tuple[Path, Path], lib_dir: Path) -> None:
    command = [str(program[0]), str(lib_dir / "devproxy-server"), str(program[1]), case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
