# SPDX-License-Identifier: Apache-2.0
"""What torch.cuda.memory tells about memory: its history, snapshots of it, and who is told when it runs out."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

Record = Callable[..., None]
MIB = 1 << 20


@pytest.fixture
def record() -> Iterator[Record]:
    def begin(*args: object, **options: object) -> None:
        torch.cuda.memory._record_memory_history(*args, clear_history=True, **options)  # type: ignore[arg-type]

    yield begin
    torch.cuda.memory._record_memory_history(None, clear_history=True)


def trace() -> list[dict[str, Any]]:
    return torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]  # type: ignore[no-any-return]


def actions() -> list[str]:
    return [e["action"] for e in trace()]


def functions(entry: dict[str, Any]) -> list[str]:
    return [f["name"] for f in entry["frames"]]


def make_in_here(count: int) -> torch.Tensor:
    return torch.empty(count, device="cuda")


def test_a_trace_names_who_allocated_and_who_freed(record: Record) -> None:
    record(stacks="python")
    kept = make_in_here(1000)
    gone = make_in_here(5000)
    address = gone.data_ptr()
    del gone
    entries = trace()
    assert [e["action"] for e in entries] == [
        *("segment_alloc", "alloc") * 2,
        *("free_requested", "free_completed", "segment_free", "snapshot"),
    ]
    assert [e["addr"] for e in entries] == [kept.data_ptr()] * 2 + [address] * 5 + [0]
    assert [e["size"] for e in entries] == [4096] * 2 + [20480] * 5 + [0]
    assert all(functions(e)[0] == "make_in_here" for e in entries[:4])
    this = "test_a_trace_names_who_allocated_and_who_freed"
    assert all(functions(e)[0] == this for e in entries[4:7])
    times = [e["time_us"] for e in entries]
    assert times == sorted(times) and times[0] > 1.7e15


def test_live_memory_has_its_traceback(record: Record, tmp_path: Path) -> None:
    before = make_in_here(300)
    record("state", stacks="python")
    kept = make_in_here(1000)
    file = tmp_path / "snapshot.pickle"
    torch.cuda.memory._dump_snapshot(str(file))
    snapshot = pickle.loads(file.read_bytes())
    assert snapshot["device_traces"] == [[] for _ in range(torch.cuda.device_count())]
    blocks = {b["address"]: b for s in snapshot["segments"] for b in s["blocks"]}
    assert functions(blocks[kept.data_ptr()])[0] == "make_in_here"
    assert blocks[kept.data_ptr()]["requested_size"] == 4000
    assert functions(blocks[before.data_ptr()]) == []
    assert "segments:" in _memory_viz.segsum(snapshot)


def test_threads_of_the_backward_pass_are_in_it(record: Record) -> None:
    record()
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    (x @ x).sum().backward()
    found = [functions(e) for e in trace() if e["action"] == "alloc"]
    assert any("backward" in " ".join(names) for names in found)
    snapshot = torch.cuda.memory._snapshot()
    for picture in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "<script" in picture(snapshot)
    assert "cudaMalloc" in _memory_viz.trace(snapshot)


@pytest.mark.parametrize(
    ("context", "alloc", "free", "live"),
    [(None, 0, 0, 0), ("state", 0, 0, 1), ("alloc", 1, 0, 1), ("all", 1, 1, 1)],
)
def test_when_tracebacks_are_taken(
    record: Record, context: str | None, alloc: bool, free: bool, live: bool
) -> None:
    record(context=context, stacks="python")
    kept = make_in_here(10)
    del kept
    again = make_in_here(10)
    entries = {e["action"]: e for e in trace()}
    assert bool(entries["alloc"]["frames"]) == alloc
    assert bool(entries["free_completed"]["frames"]) == free
    blocks = [b for s in torch.cuda.memory_snapshot() for b in s["blocks"]]
    assert any(functions(b) for b in blocks) == live
    del again


def test_only_the_last_entries_are_kept(record: Record) -> None:
    record(max_entries=5)
    kept = [make_in_here(1000 * (i + 1)) for i in range(20)]
    entries = trace()  # at the end of which it is a snapshot itself
    assert [e["size"] for e in entries] == [76288, 76288, 80384, 80384, 0]
    assert [e["action"] for e in entries[:2]] == ["segment_alloc", "alloc"]
    del kept


def test_actions_that_are_skipped(record: Record) -> None:
    record(skip_actions=["segment_alloc", "free_requested", "segment_free", "snapshot"])
    del [make_in_here(10)][0]
    assert actions() == ["alloc", "free_completed"]
    with pytest.raises(ValueError, match="'frees', which is no action"):
        record(skip_actions=["frees"])


def test_bad_words_and_the_end(record: Record) -> None:
    for wrong in ({"enabled": "most"}, {"context": "most"}, {"stacks": "most"}):
        with pytest.raises(RuntimeError, match="'most'"):
            record(**wrong)
    record()
    assert torch._C._cuda_isHistoryEnabled()
    kept = make_in_here(10)
    torch.cuda.memory._record_memory_history(None)
    assert not torch._C._cuda_isHistoryEnabled()
    del kept
    kept = make_in_here(10)
    assert actions() == ["segment_alloc", "alloc"]
    torch.cuda.memory._record_memory_history(True, record_context=False)  # of old: a bool
    del kept
    assert torch._C._cuda_isHistoryEnabled()


def test_a_pools_memory_in_a_trace(record: Record) -> None:
    pool = torch.cuda.MemPool()
    record()
    with torch.cuda.use_mem_pool(pool):
        first = make_in_here(1000)
        del first
        again = make_in_here(1000)
    del again
    freed = ["free_requested", "free_completed"]
    assert actions()[:-1] == ["segment_alloc", "alloc", *freed, "alloc", *freed]
    del pool
    assert actions()[-3:-1] == ["snapshot", "segment_free"]


def test_observers_of_running_out(record: Record) -> None:
    told: list[tuple[int, ...]] = []
    # An observer stays: there is no way to take one back.
    torch._C._cuda_attach_out_of_memory_observer(lambda *what: told.append(what))
    record()
    free, total = torch.cuda.mem_get_info()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        make_in_here(total)
    ((device, wanted, in_all, left),) = told
    assert (device, wanted, in_all) == (torch.cuda.current_device(), 4 * total, total)
    assert 0 < left <= total
    (entry,) = (e for e in trace() if e["action"] == "oom")
    assert entry["size"] == 4 * total and entry["device_free"] == left
    assert "make_in_here" in functions(entry)
