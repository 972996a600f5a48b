# SPDX-License-Identifier: Apache-2.0
"""`devproxy trace` and `devproxy explain` of a job that runs, over the real server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2

from tests.conftest import RUN
from tests.integration.test_daemon import ctl, line, one_line_error
from tests.trace_processor import ask

BYTES, ROUNDS, SLEEP_S = 4096, 10, 0.02
SHARES = ("kernel", "ring", "wait", "client")
# check(), and a context.
BEGIN = """
import ctypes, time
cuda = ctypes.CDLL("libcuda.so.1")
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
def check(result):
    assert result == 0, result
check(cuda.cuInit(0))
check(cuda.cuDeviceGet(ctypes.byref(device), 0))
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
check(cuda.cuCtxSetCurrent(context))
"""
# Ten copies and ten memsets on a stream of its own, a wait, a little sleep; the numbers go to the test.
PROGRAM = f"""{BEGIN}
stream = ctypes.c_void_p()
check(cuda.cuMemAlloc_v2(ctypes.byref(memory), {2 * BYTES}))
check(cuda.cuStreamCreate(ctypes.byref(stream), 1))
print("up", flush=True)
there = ctypes.c_uint64(memory.value + {BYTES})
while True:
    for _ in range({ROUNDS}):
        check(cuda.cuMemsetD8Async(memory, 1, {BYTES}, stream))
        check(cuda.cuMemcpyDtoDAsync_v2(there, memory, {BYTES}, stream))
    check(cuda.cuStreamSynchronize(stream))
    check(cuda.cuMemcpyDtoH_v2(ctypes.create_string_buffer(8), memory, 8))
    time.sleep({SLEEP_S})
"""

# Sets a MiB again and again and never waits, so the ring is full.
FULL = f"""{BEGIN}
check(cuda.cuMemAlloc_v2(ctypes.byref(memory), 1 << 20))
print("up", flush=True)
while True:
    check(cuda.cuMemsetD8Async(memory, 1, 1 << 20, None))
"""


@pytest.fixture
def program() -> str:
    return PROGRAM


@pytest.fixture
def job(job_env: dict[str, str], tmp_path: Path, program: str):
    env = job_env | {"DEVPROXY_STATE_DIR": str(tmp_path / "state")}
    process = subprocess.Popen(
        [*RUN, "--device", "soft", "--name", "j", "--", sys.executable, "-c", program],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    yield env
    process.terminate()
    process.communicate(timeout=20)


def test_a_trace_of_a_job(job: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "a.pftrace"
    result = ctl(job, "trace", "j", "--seconds", "1.5", "-o", str(path), "--json")
    assert result.returncode == 0, result
    facts = json.loads(result.stdout)
    assert (facts["file"], facts["lost"]) == (str(path), 0)
    trace = perfetto_trace_pb2.Trace.FromString(path.read_bytes())
    tracks = {p.track_descriptor.uuid: p.track_descriptor.name for p in trace.packet if p.HasField("track_descriptor")}  # fmt: skip
    open_: dict[int, tuple[str, int, dict[str, int]]] = {}
    counts: Counter[tuple[str, str]] = Counter()
    last_end: dict[int, int] = {}
    for packet in trace.packet:
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        if event.type == event.TYPE_SLICE_BEGIN:
            assert event.track_uuid not in open_
            assert packet.timestamp >= last_end.get(
                event.track_uuid, 0
            )  # no two at once on a stream
            values = {a.name: a.uint_value for a in event.debug_annotations}
            open_[event.track_uuid] = (event.categories[0], packet.timestamp, values)
        else:
            kind, since, values = open_.pop(event.track_uuid)
            assert packet.timestamp >= since
            last_end[event.track_uuid] = packet.timestamp
            counts[tracks[event.track_uuid], kind] += 1
            if kind == "memset":
                assert values["bytes"] == BYTES
    assert not open_
    assert counts["job j: phase", "phase"] == 1
    streams = {name for name, _ in counts if name.startswith("stream")}
    assert len(streams) in (1, 2)  # the copy back is on the legacy stream, or on none
    (ours,) = [name for name in streams if counts[name, "memset"]]
    assert counts[ours, "memset"] > 5 * ROUNDS
    # The first and the last round may be cut off.
    assert abs(counts[ours, "memset"] - counts[ours, "copy"]) <= 1
    assert facts["events"] == sum(counts.values())


def test_it_ends_by_itself(job: dict[str, str], tmp_path: Path) -> None:
    """The server records nothing more when nobody has asked for some seconds; the next trace is as the first."""
    for _ in range(2):
        result = ctl(job, "trace", "j", "--seconds", "0.6", "-o", str(tmp_path / "b"), "--json")
        facts = json.loads(result.stdout)
        turns = (
            facts["seconds"] / SLEEP_S + 2
        )  # at most: on a busy machine a trace is longer than was asked for
        assert 4 * ROUNDS < facts["events"] < turns * (2 * ROUNDS + 4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it(job: dict[str, str], tmp_path: Path, number: signal.Signals) -> None:
    """In the background of a shell without job control, too, which has SIGINT ignored."""
    path = tmp_path / "c"
    words = ["trace", "j", "--seconds", "600", "-o", str(path), "--json"]
    tracing = subprocess.Popen(
        ["sh", "-c", 'trap "" INT; exec "$0" "$@"', *line(*words)],
        env=job,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert tracing.stderr is not None
    assert "tracing job j" in tracing.stderr.readline()
    tracing.send_signal(number)
    facts = json.loads(tracing.communicate(timeout=30)[0])
    assert tracing.returncode == 0 and facts["seconds"] < 30
    assert facts["events"] and path.stat().st_size > 0


def test_explain(job: dict[str, str]) -> None:
    result = ctl(job, "explain", "j", "--seconds", "1", "--json")
    assert result.returncode == 0, result
    facts = json.loads(result.stdout)
    (process,) = facts["processes"]
    assert sum(process[share] for share in SHARES) == pytest.approx(1, abs=0.001)
    assert process["client"] > 0.5  # it sleeps
    assert process["ring"] < 0.01
    (server,) = facts["servers"]
    assert server["server"] < 0.5
    assert server["ring_wakes_per_s"] > 5
    assert facts["refused"] == []
    # Whether this machine can take images or not: it says one or the other.
    assert facts["checkpointable"] == (facts["why_not"] == "")
    text = ctl(job, "explain", "j", "--seconds", "0.5").stdout
    assert "job j is running\ncheckpoint: " in text


@pytest.mark.parametrize("program", [FULL])
def test_a_full_ring(job: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "a.pftrace"
    result = ctl(job, "trace", "j", "--seconds", "1", "-o", str(path), "--json")
    assert result.returncode == 0, result
    (rows,) = ask(
        path.read_bytes(),
        """select track.name as track, slice.ts as ts, slice.dur as dur from slice join track on slice.track_id = track.id
           where category = 'room' order by ts""",
    )
    # Only what ends before the trace does is seen, and one that began before it is whole.
    assert {row["track"] for row in rows} == {"thread 0: waits for room"}
    assert sum(row["dur"] for row in rows) > 0.5e9
    assert all(row["dur"] >= 0 for row in rows)
    for one, other in zip(rows, rows[1:], strict=False):
        # Each reading of the two clocks has an error of its own.
        assert other["ts"] >= one["ts"] + one["dur"] - 100_000
    explained = ctl(job, "explain", "j", "--seconds", "1", "--json")
    (process,) = json.loads(explained.stdout)["processes"]
    assert sum(process[share] for share in SHARES) == pytest.approx(1, abs=0.001)
    assert process["client"] < 0.5


def test_what_cannot_be_traced(job: dict[str, str], tmp_path: Path) -> None:
    one_line_error(ctl(job, "trace", "x"), 2, "there is no job 'x'")
    one_line_error(ctl(job, "trace"), 2, "trace needs the name of a job")
    one_line_error(ctl(job, "trace", "j", "--seconds", "0"), 2, "--seconds 0 is out of range")
    one_line_error(ctl(job, "trace", "j", "-o", str(tmp_path / "no" / "x")), 2, "No such file")
