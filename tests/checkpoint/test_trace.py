# SPDX-License-Identifier: Apache-2.0
"""`devproxy trace` of a job that is cut, moved, suspended and resumed meanwhile, as Perfetto's trace processor reads it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.checkpoint.world import CTL, World
from tests.integration.test_trace import BEGIN, FULL
from tests.trace_processor import ask

# Forty memsets a step, and a step every 10 ms or so, counted as the import hook of torch's optimizers counts them.
PROGRAM = f"""{BEGIN}
check(cuda.cuMemAlloc_v2(ctypes.byref(memory), 1 << 20))
print("up", flush=True)
while True:
    for _ in range(40):
        check(cuda.cuMemsetD8Async(memory, 1, 4096, None))
    check(cuda.cuStreamSynchronize(None))
    assert cuda.devproxy_step() == 1
    time.sleep(0.005)
"""
EVENTS = """select track.name as track, category as kind, slice.name as name, ts, dur, depth, ts + dur as till
    from slice join track on slice.track_id = track.id order by ts"""


def of(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == kind]


def within(row: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(other["ts"] <= row["ts"] and row["till"] <= other["till"])


@pytest.fixture
def traced(world: World) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]], dict[str, Any]]:
    """(rows of EVENTS, what each verb says of itself, what the trace does)"""
    world.run(sys.executable, "-c", PROGRAM)
    world.wait(lambda: "up" in world.text())
    target = world.home / "j.pftrace"
    words = ("trace", "j", "--seconds", "120", "-o", str(target), "--json")
    tracer = subprocess.Popen(
        [*CTL, *words], env=world.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert tracer.stderr is not None
    assert tracer.stderr.readline() == "devproxy: tracing job j for 120 s; Ctrl-C ends it\n"
    said = {}
    for verb in (("checkpoint",), ("migrate", "--to", "1"), ("suspend",)):
        said[verb[0]] = world.ctl_json(verb[0], "j", *verb[1:])
    world.ctl("resume", "j")
    time.sleep(0.5)  # some steps more
    tracer.send_signal(signal.SIGINT)
    out, _ = tracer.communicate(timeout=60)
    assert tracer.returncode == 0
    (rows,) = ask(target.read_bytes(), EVENTS)
    return rows, said, json.loads(out)


def test_it_shows_verbs_stages_cuts_and_steps(traced: Any) -> None:
    rows, said, facts = traced
    assert facts["lost"] == 0
    assert facts["events"] == len(rows)
    assert all(row["dur"] >= 0 for row in rows)
    assert all(row["depth"] == 0 for row in rows)  # no two at once on a track

    verbs = {row["name"]: row for row in of(rows, "verb")}
    assert list(verbs) == ["checkpoint", "migrate", "suspend", "resume"]
    for name, row in verbs.items():
        stages = [stage for stage in of(rows, "stage") if within(stage, row)]
        seconds: dict[str, float] = {}
        for stage in stages:
            assert stage["track"] == f"job j: stage {stage['name']}"
            seconds[stage["name"]] = seconds.get(stage["name"], 0.0) + stage["dur"] / 1e9
        if name in ("checkpoint", "suspend"):
            assert seconds == pytest.approx(said[name]["stages"], abs=0.002)
        assert seconds, name
    assert all(any(within(stage, row) for row in verbs.values()) for stage in of(rows, "stage"))

    phases = of(rows, "phase")
    for one, other in zip(phases, phases[1:], strict=False):
        assert 0 <= other["ts"] - one["till"] < 1_000_000
    names = [row["name"] for row in phases]
    image = ["running", "cutting", "quiesced", "dumped", "committing"]
    assert names == [*image, "running", "cutting", "quiesced", *image[:-1], "suspended", "restoring", "running"]  # fmt: skip

    # Those of a server that leaves go with it.
    (cut,) = of(rows, "cut")
    assert within(cut, verbs["checkpoint"])
    assert cut["dur"] / 1e9 == pytest.approx(said["checkpoint"]["still_s"], abs=0.02)
    # What is under way when it begins ends first; nothing begins before it has ended.
    works = of(rows, "memset")
    assert not [w for w in works if cut["ts"] + cut["dur"] // 2 < w["ts"] < cut["till"]]

    steps = of(rows, "step")
    assert len(steps) > 20
    assert all(one["till"] <= other["ts"] for one, other in zip(steps, steps[1:], strict=False))
    # Every memset is in a step; the first and last step of a trace, or of a server, are cut off.
    counts = [len([w for w in works if within(w, step)]) for step in steps[1:-1]]
    assert sum(count == 40 for count in counts) > 0.9 * len(counts), counts


def test_waits_for_room_behind_a_restore(world: World) -> None:
    """The restored tree has a monotonic clock of its own, which is behind the servers'."""
    world.run(sys.executable, "-c", FULL)
    world.wait(lambda: "up" in world.text())
    world.ctl("checkpoint", "j")
    world.kill_everything()
    world.restore()
    target = world.home / "j.pftrace"
    world.ctl("trace", "j", "--seconds", "1", "-o", str(target))
    (rows,) = ask(target.read_bytes(), EVENTS)
    (phase,) = of(rows, "phase")
    waits = [row for row in of(rows, "room") if row["ts"] >= phase["ts"]]
    assert sum(row["dur"] for row in waits) > 0.5e9
    assert all(within(row, phase) for row in waits)
