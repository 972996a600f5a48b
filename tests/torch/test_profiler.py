# SPDX-License-Identifier: Apache-2.0
"""torch's profilers in a job: what they record is right, and what they cannot see is said once, by name."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

BOTH = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
# A word of each of devproxy's lines.
KERNELS, RANGES = "sees no GPU kernels", "emit_nvtx"


def run(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    """As a script of its own: what is said once is said once in a process."""
    done = subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def work() -> torch.Tensor:
    x = torch.ones(300, 300, device="cuda")
    return (x @ x).relu().sum()


@pytest.mark.parametrize(
    "activities", [[ProfilerActivity.CPU], BOTH, [ProfilerActivity.CUDA], None]
)
def test_operators_are_counted_and_timed(activities: list[ProfilerActivity] | None) -> None:
    work().item()
    with profile(activities=activities) as p:
        for _ in range(3):
            work()
        torch.cuda.synchronize()
    found = {e.key: e for e in p.key_averages()}
    for op in ("aten::mm", "aten::relu"):
        assert found[op].count == 3
        assert found[op].cpu_time_total > 0
    on_device = activities != [ProfilerActivity.CPU]
    assert (found["aten::mm"].device_time_total > 0) == on_device
    assert "aten::mm" in p.key_averages().table(sort_by="cuda_time_total", row_limit=5)


def test_device_times_are_those_of_the_streams() -> None:
    """A product of 800 rows takes the software GPU far longer than its launch takes the client."""
    x = torch.ones(800, 800, device="cuda")
    (x @ x).sum().item()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with profile(activities=BOTH) as p:
        start.record()
        for _ in range(4):
            x @ x
        end.record()
        torch.cuda.synchronize()
    (mm,) = [e for e in p.key_averages() if e.key == "aten::mm"]
    wall_us = start.elapsed_time(end) * 1e3
    assert 0.5 * wall_us < mm.device_time_total <= 1.02 * wall_us


def test_what_a_profile_lacks_is_said_once_by_name() -> None:
    done = run(
        """
        import torch
        from torch.profiler import ProfilerActivity, profile
        for _ in range(2):
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True):
                torch.ones(3, device="cuda") + 1
        with torch.autograd.profiler.profile(use_device="cuda"):
            torch.ones(3, device="cuda") + 1
        """,
        "-W",
        "error",  # it is no Python warning, which would stop such a script
    )
    lines = [line for line in done.stderr.splitlines() if KERNELS in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("devproxy: torch.profiler ")
    assert "CUPTI" not in done.stderr, done.stderr  # nobody looked for it


def test_a_profile_of_the_cpu_alone_says_nothing() -> None:
    done = run(
        """
        import torch
        from torch.profiler import ProfilerActivity, profile
        with profile(activities=[ProfilerActivity.CPU]) as p:
            torch.ones(3, device="cuda") + 1
        assert any(e.key == "aten::add" for e in p.key_averages())
        """
    )
    assert KERNELS not in done.stderr, done.stderr
    assert "CUPTI" not in done.stderr, done.stderr


def test_schedule_traces_and_stacks(tmp_path: Path) -> None:
    seen = []
    with profile(
        activities=BOTH,
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda p: (
            seen.append(len(p.events())),
            p.export_chrome_trace(str(tmp_path / "t.json")),
        ),
        record_shapes=True,
        with_stack=True,
        with_flops=True,
    ) as p:
        for _ in range(5):
            with torch.profiler.record_function("my step"):
                work()
            p.step()
    assert len(seen) == 1 and seen[0] > 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = [e.get("name") for e in events if e.get("cat") in ("cpu_op", "user_annotation")]
    assert names.count("aten::mm") == 2
    assert names.count("my step") == 2


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_an_exported_trace_has_the_servers_record(tmp_path: Path, name: str) -> None:
    """Each launch once, on its stream, within the profile's time and behind the operator that launched it."""
    side = torch.cuda.Stream()
    work().item()
    torch.cuda.synchronize()
    with profile(activities=BOTH) as p:
        for _ in range(3):
            work()
        with torch.cuda.stream(side):
            torch.zeros(1000, device="cuda")
        work().cpu()
    work()  # behind it
    p.export_chrome_trace(str(tmp_path / name))
    opened = gzip.open if name.endswith(".gz") else open
    with opened(tmp_path / name, "rt") as file:
        trace = json.load(file)
    assert "devproxyLostEvents" not in trace
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    products = sorted(e["ts"] for e in events if e["cat"] == "kernel" and "mm" in e["name"])
    asked = sorted(e["ts"] for e in events if e["cat"] == "cpu_op" and e["name"] == "aten::mm")
    assert len(products) == len(asked) == 4
    # The clocks of two processes, by the time of day.
    assert all(
        began - 1000 < at < asked[-1] + 10e6 for began, at in zip(asked, products, strict=True)
    )
    (zeroed,) = [e for e in events if e["cat"] == "gpu_memset" and e["args"]["bytes"] == 4000]
    assert zeroed["tid"] != next(e["tid"] for e in events if e["cat"] == "kernel")
    assert any(e["cat"] == "gpu_memcpy" for e in events)
    named = [
        e["args"] for e in trace["traceEvents"] if e["name"] == "process_name" and e["ph"] == "M"
    ]
    assert {"name": "GPU 0"} in named


def test_a_profile_of_the_cpu_has_no_record(tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as p:
        work().item()
    p.export_chrome_trace(str(tmp_path / "t.json"))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert not [e for e in events if e.get("cat") == "kernel"]


def test_memory_of_the_device_is_in_a_profile() -> None:
    with profile(activities=BOTH, profile_memory=True) as p:
        x = torch.empty(1 << 18, device="cuda")
        del x
    found = [e for e in p.events() if e.name == "aten::empty"]
    assert sum(e.self_device_memory_usage for e in found) == 1 << 20
    assert sum(e.self_device_memory_usage for e in p.events() if e.name == "[memory]") == -(1 << 20)


def test_collection_can_be_switched() -> None:
    with profile(activities=BOTH) as p:
        work()
        p.toggle_collection_dynamic(False, [ProfilerActivity.CUDA])
        work()
        p.toggle_collection_dynamic(True, [ProfilerActivity.CUDA])
    assert [e.count for e in p.key_averages() if e.key == "aten::mm"] == [2]


def test_supported_activities_are_those_of_a_cuda_build() -> None:
    assert ProfilerActivity.CUDA in torch.profiler.supported_activities()
    assert ProfilerActivity.CPU in torch.profiler.supported_activities()


def test_a_capture_in_a_profile_is_whole() -> None:
    x = torch.ones(16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with profile(activities=BOTH) as p:
        with torch.cuda.graph(graph):
            y = x * 2
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    assert y.tolist() == [2.0] * 16
    assert any(e.key == "aten::mul" for e in p.key_averages())


def test_older_ways_to_profile() -> None:
    done = run(
        """
        import torch
        from torch.autograd import profiler
        x = torch.ones(3, device="cuda", requires_grad=True)
        with profiler.profile(use_cuda=True) as p:
            (x * 2).sum().backward()
        assert any(e.key == "aten::mul" and e.device_time_total > 0 for e in p.key_averages())
        with profiler.emit_nvtx(record_shapes=True):
            (x * 2).sum().backward()
        with profiler.emit_nvtx(enabled=False):
            pass
        with torch.cuda.profiler.profile():
            (x * 2).sum()
        if torch.profiler.itt.is_available():
            with profiler.emit_itt():
                (x * 2).sum()
        torch.cuda.synchronize()
        """
    )
    assert done.stderr.count(RANGES) == 1, done.stderr
    assert done.stderr.count(KERNELS) == 1, done.stderr
