# SPDX-License-Identifier: Apache-2.0
"""What torch.cuda says of the GPU and of itself: the truth, or an error by name."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch

# -- NVTX ------------------------------------------------------------------------------------------------------------


def test_nvtx_ranges_do_nothing_without_a_tool() -> None:
    nvtx = torch.cuda.nvtx
    assert nvtx.range_push("outer") == -2  # NVTX_NO_PUSH_POP_TRACKING, as natively
    assert nvtx.range_pop() == -2
    assert nvtx.mark("here") is None
    handle = nvtx.range_start("across threads")
    assert isinstance(handle, int)
    assert nvtx.range_end(handle) is None
    with nvtx.range("step {}", 3):
        assert torch.ones(2, device="cuda").sum().item() == 2
    handle = nvtx._device_range_start("in a stream")
    nvtx._device_range_end(handle)
    torch.cuda.synchronize()


# -- NVML ------------------------------------------------------------------------------------------------------------


def test_health_of_a_software_gpu() -> None:
    """Work of the job itself, and sensors that it does not have."""
    torch.cuda.synchronize()
    assert torch.cuda.utilization() == 0
    assert (torch.cuda.temperature(), torch.cuda.power_draw()) == (0, 0)
    assert torch.cuda.clock_rate() > 0
    held = torch.empty(torch.cuda.mem_get_info()[1] // 8, dtype=torch.uint8, device="cuda")
    assert 12 <= torch.cuda.memory_usage() <= 100
    del held
    x = torch.ones(1200, 1200, device="cuda")
    for _ in range(10):
        x = (x @ x).clamp(max=1)
    assert torch.cuda.utilization() > 0
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetFanSpeed(pynvml.nvmlDeviceGetHandleByIndex(0))


def test_what_nvml_answers() -> None:
    free, total = torch.cuda.mem_get_info()
    x = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
    used = torch.cuda.device_memory_used()
    assert used >= x.nbytes
    assert used <= total
    assert torch.cuda.mem_get_info()[0] <= free - x.nbytes
    assert "no processes are running" in torch.cuda.list_gpu_processes()


# -- properties and statistics ---------------------------------------------------------------------------------------

PROPERTIES = {
    "name": str, "uuid": object, "total_memory": int, "major": int, "minor": int, "multi_processor_count": int,
    "is_integrated": int, "is_multi_gpu_board": int, "max_threads_per_multi_processor": int, "warp_size": int,
    "gcnArchName": str, "L2_cache_size": int, "regs_per_multiprocessor": int, "shared_memory_per_block": int,
    "shared_memory_per_block_optin": int, "shared_memory_per_multiprocessor": int, "clock_rate": int,
    "memory_clock_rate": int, "memory_bus_width": int, "pci_bus_id": int, "pci_device_id": int, "pci_domain_id": int,
}  # fmt: skip


def test_properties_have_the_names_of_torchs_own_class() -> None:
    p = torch.cuda.get_device_properties()
    for name, kind in PROPERTIES.items():
        assert isinstance(getattr(p, name), kind), name
    assert torch.cuda.get_device_properties("cuda:0") is torch.cuda.get_device_properties(0)
    assert (p.major, p.minor) == torch.cuda.get_device_capability()
    assert p.total_memory == torch.cuda.mem_get_info()[1]
    with pytest.raises((RuntimeError, AssertionError), match="[Ii]nvalid device"):
        torch.cuda.get_device_properties(99)


def test_statistics_follow_the_allocations() -> None:
    before = torch.cuda.memory_stats()
    x = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    y = torch.empty(5, dtype=torch.uint8, device="cuda")
    now = torch.cuda.memory_stats()

    def grown(key: str) -> Any:
        return now[key] - before[key]

    assert grown("allocated_bytes.all.current") == (3 << 20) + 512
    assert grown("allocated_bytes.large_pool.current") == 3 << 20
    assert grown("allocated_bytes.small_pool.current") == 512
    assert grown("requested_bytes.all.current") == x.nbytes + y.nbytes
    assert grown("allocation.all.allocated") == 2
    assert grown("num_ooms") == 0
    del x, y
    assert (
        torch.cuda.memory_stats()["allocated_bytes.all.current"]
        == before["allocated_bytes.all.current"]
    )


def test_a_snapshot_lists_what_is_allocated(tmp_path: Path) -> None:
    side = torch.cuda.Stream()
    x = torch.empty((2 << 20) + 5, dtype=torch.uint8, device="cuda")
    with torch.cuda.stream(side):
        y = torch.empty(100, dtype=torch.uint8, device="cuda")
    segments = {s["address"]: s for s in torch.cuda.memory_snapshot()}
    large, small = segments[x.data_ptr()], segments[y.data_ptr()]
    assert large["segment_type"] == "large" and small["segment_type"] == "small"
    assert large["requested_size"] == x.nbytes and large["total_size"] == (2 << 20) + 512
    assert small["stream"] == side.cuda_stream and large["stream"] == 0
    assert [b["state"] for b in large["blocks"]] == ["active_allocated"]
    assert sum(s["total_size"] for s in segments.values()) == torch.cuda.memory_reserved()
    assert sum(s["allocated_size"] for s in segments.values()) == torch.cuda.memory_allocated()
    at = x.data_ptr()
    del x
    assert at not in {s["address"] for s in torch.cuda.memory_snapshot()}
    torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot"))
    found = pickle.loads((tmp_path / "snapshot").read_bytes())
    assert y.data_ptr() in {s["address"] for s in found["segments"]}
    assert found["device_traces"] == [[] for _ in range(torch.cuda.device_count())]


def test_a_snapshot_has_the_memory_of_graphs() -> None:
    x = torch.ones(1 << 10, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = (x * 2) + 1
    pool = torch.cuda.memory_snapshot(graph.pool())
    assert y.data_ptr() in {s["address"] for s in pool}
    assert all(tuple(s["segment_pool_id"]) == tuple(graph.pool()) for s in pool)
    assert sum(s["total_size"] for s in pool) > sum(s["allocated_size"] for s in pool)  # of x * 2
    assert (
        sum(s["total_size"] for s in torch.cuda.memory_snapshot()) == torch.cuda.memory_reserved()
    )


# -- cuFFT's plans ---------------------------------------------------------------------------------------------------

PLANS = """
import torch
cache = torch.backends.cuda.cufft_plan_cache
assert cache.size == 0
assert cache.max_size == 4096
torch.fft.rfft(torch.ones(8, device="cuda"))
cache.max_size = 10
assert cache.max_size == 10
assert torch.backends.cuda.cufft_plan_cache[0].max_size == 10
for i in range(1, torch.cuda.device_count()):
    assert torch.backends.cuda.cufft_plan_cache[i].max_size == 4096
cache.clear()
assert cache.size == 0
for wrong, what in (
    (lambda: setattr(cache, "max_size", -1), "must be non-negative, but got -1"),
    (lambda: torch._cufft_get_plan_cache_size(99), "expected 0 <= device_index"),
    (lambda: torch._cufft_get_plan_cache_max_size(-1), "expected 0 <= device_index"),
    (lambda: setattr(cache, "size", 3), "read-only"),
):
    try:
        wrong()
        raise SystemExit(what)
    except RuntimeError as error:
        assert what in str(error), error
assert cache.max_size == 10
"""


@pytest.mark.parametrize("ops", ["", "cuda"])
def test_plan_cache_is_the_servers(ops: str) -> None:
    """There is no cuFFT on the software GPU, so there is no plan; how many may be kept is remembered."""
    env = os.environ | ({"DEVPROXY_TORCH_OPS": ops} if ops else {})
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PLANS)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_streams_have_torchs_priorities() -> None:
    """Of CUDA's 0 to -5 torch's pools have four (c10/cuda/CUDAStream.h), and torch says so."""
    assert torch.cuda.Stream.priority_range() == (0, -3)
    assert torch.cuda.Stream(priority=-9).priority == -3


def test_inductors_code_gets_its_buffers_from_us() -> None:
    """torch's own function asks libtorch_cuda's allocator, past the dispatcher."""
    made = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
    before = torch.cuda.memory_allocated()
    buffer = made((3, 4), (1, 3), torch.float16)
    assert torch.cuda.memory_allocated() == before + 512
    assert (buffer.shape, buffer.stride(), buffer.dtype) == ((3, 4), (1, 3), torch.float16)
    assert str(buffer.device) == f"cuda:{torch.cuda.current_device()}"
    assert buffer.fill_(2).sum().item() == 24
    with pytest.raises(TypeError, match="no dtype"):
        made((3,), (1,), 5)


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.fixture
def sync_debug() -> Iterator[Callable[[str], None]]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        yield torch.cuda.set_sync_debug_mode
        torch.cuda.set_sync_debug_mode(0)


# What torch's CUDA build says it of, and what it does not say it of.
WAIT: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0] > 0),
    "cpu": lambda x: x.cpu(),
    "to the GPU": lambda x: torch.ones(3).cuda(),
    "pinned to the GPU": lambda x: torch.ones(3).pin_memory().cuda(),
    "made there": lambda x: torch.tensor([1.0], device="cuda"),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x + 0),
    "a stream": lambda x: torch.cuda.current_stream().synchronize(),
}
NO_WAIT: dict[str, Callable[[torch.Tensor], object]] = {
    "sum": lambda x: x.sum(),
    "numbers as indices": lambda x: x[torch.zeros(2, dtype=torch.long, device="cuda")],
    "fill": lambda x: torch.full((3,), 2.0, device="cuda"),
    "on the GPU": lambda x: torch.empty_like(x).copy_(x),
    "non_blocking": lambda x: torch.ones(3).cuda(non_blocking=True),
    "non_blocking back": lambda x: x.to("cpu", non_blocking=True),
    "nothing": lambda x: torch.empty(0).cuda(),
    "the GPU": lambda x: torch.cuda.synchronize(),
    "an event": lambda x: torch.cuda.current_stream().record_event().synchronize(),
}


@pytest.mark.parametrize("what", WAIT)
def test_waits_are_found(sync_debug: Callable[[str], None], what: str) -> None:
    x = torch.ones(4, device="cuda")
    sync_debug("error")
    assert torch.cuda.get_sync_debug_mode() == 2
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        WAIT[what](x)
    sync_debug("warn")
    assert torch.cuda.get_sync_debug_mode() == 1
    with pytest.warns(UserWarning, match="called a synchronizing CUDA operation"):
        WAIT[what](x)
    sync_debug("default")
    WAIT[what](x)


@pytest.mark.parametrize("what", NO_WAIT)
def test_what_is_no_wait(sync_debug: Callable[[str], None], what: str) -> None:
    x = torch.ones(4, device="cuda")
    sync_debug("error")
    NO_WAIT[what](x)


def test_a_mode_of_sync_debug_that_there_is_not(sync_debug: Callable[[str], None]) -> None:
    with pytest.raises(RuntimeError, match="expected one of 0,1,2"):
        sync_debug(3)  # type: ignore[arg-type]
    assert torch.cuda.get_sync_debug_mode() == 0


def test_a_stream_sleeps() -> None:
    hertz = torch.cuda.get_device_properties().clock_rate * 1000
    torch.cuda.synchronize()
    begin = time.perf_counter()
    torch.cuda._sleep(hertz // 5)
    done = torch.cuda.current_stream().record_event()
    assert not done.query()
    assert time.perf_counter() - begin < 0.15  # the host goes on
    done.synchronize()
    assert 0.18 < time.perf_counter() - begin < 5
    torch.cuda._sleep(-5)
    torch.cuda.synchronize()


def test_metadata_of_memory_is_kept() -> None:
    metadata = torch.cuda.memory
    assert metadata._get_memory_metadata() == ""
    torch.cuda.memory._record_memory_history()
    try:
        metadata._set_memory_metadata("the first layer")
        assert metadata._get_memory_metadata() == "the first layer"
        x = torch.empty(1000, device="cuda")
        metadata._set_memory_metadata("")
        del x
        trace = metadata._snapshot()["device_traces"][torch.cuda.current_device()]
        said = {e["action"]: e["user_metadata"] for e in trace}
        assert (said["alloc"], said["free_completed"]) == ("the first layer", "")
    finally:
        metadata._set_memory_metadata("")
        torch.cuda.memory._record_memory_history(None)


CARRIED: dict[str, tuple[Callable[[Any], object], object, object]] = {
    "multiprocessors to leave alone": (torch._C._set_sm_carveout_experimental, 8, None),  # type: ignore[attr-defined]
    "the cache after cuDNN's benchmark": (torch._C._cudnn_set_conv_benchmark_empty_cache, False, True),
    "cuDNN's benchmark limit": (torch._C._cuda_set_cudnn_benchmark_limit, 3, 10),
}  # fmt: skip


@pytest.mark.parametrize("what", CARRIED)
def test_a_setting_is_told_to_the_executor(what: str) -> None:
    """Each combination of settings has a number, which the executor was told of and each op carries."""
    number = sys.modules["_devproxy_torch"].settings_number
    put, other, own = CARRIED[what]
    x = torch.ones(2, 2, device="cuda")
    before = number()
    put(other)
    try:
        assert number() != before
        assert (x @ x).sum().item() == 8
    finally:
        put(own)
    assert number() == before
    assert (x @ x).sum().item() == 8


def test_what_reads_back() -> None:
    c: Any = torch._C
    assert c._cuda_get_conv_benchmark_empty_cache() is True  # as natively
    c._cudnn_set_conv_benchmark_empty_cache(False)
    try:
        assert c._cuda_get_conv_benchmark_empty_cache() is False
    finally:
        c._cudnn_set_conv_benchmark_empty_cache(True)


def test_tuning_of_operators_is_refused() -> None:
    """They run in the server, whose torch it would be to tune."""
    tunable = torch.cuda.tunable
    for off in (tunable.enable, tunable.tuning_enable, tunable.record_untuned_enable):
        off(False)
        with pytest.raises(RuntimeError, match="torch.cuda.tunable is not supported behind"):
            off(True)
    assert not tunable.is_enabled()
    assert not tunable.tuning_is_enabled()
    assert not tunable.record_untuned_is_enabled()
    for refused in (
        tunable.get_results,
        tunable.get_validators,
        lambda: tunable.set_filename("results.csv"),
        lambda: tunable.set_max_tuning_duration(1),
    ):
        with pytest.raises(RuntimeError, match="torch.cuda.tunable is not supported behind"):
            refused()


@pytest.mark.parametrize("on", ["1", "0"])
def test_tuning_by_a_variable_changes_nothing_and_says_so(on: str) -> None:
    lines = "import torch; x = torch.ones(2, 2, device='cuda'); print((x @ x).sum().item(), torch.cuda.tunable.is_enabled())"
    done = subprocess.run(
        [sys.executable, "-c", lines],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTORCH_TUNABLEOP_ENABLED": on},
    )
    assert done.stdout.split() == ["8.0", "False"], done.stderr
    assert done.stderr.count("PYTORCH_TUNABLEOP_ENABLED=1 changes nothing") == int(on)


# Of torch._C: what takes a value, and what becomes of it. "kept": a test above, or one of the subject's own file, reads
# it back or sees that it does something. "refused": an error by name.
SETTERS = {
    "_cuda_setDevice": "kept",
    "_cuda_exchangeDevice": "kept",
    "_cuda_maybeExchangeDevice": "kept",
    "_cuda_setStream": "kept",
    "_cuda_setMemoryFraction": "kept",
    "_cuda_setMemoryMetadata": "kept",
    "_cuda_set_sync_debug_mode": "kept",
    "_cuda_set_cudnn_benchmark_limit": "kept",
    "_cudnn_set_conv_benchmark_empty_cache": "kept",
    "_cuda_sleep": "kept",
    "_cuda_record_memory_history": "kept",
    "_cuda_record_memory_history_legacy": "kept",
    "_cuda_attach_out_of_memory_observer": "kept",
    "_cuda_changeCurrentAllocator": "refused",
    "_cuda_setCheckpointPoolState": "refused",
    "_cuda_setCublasWorkspaceSize": "refused",
    "_cuda_setCublasLtWorkspaceSize": "refused",
    "_cuda_tunableop_enable": "refused",
    "_cuda_tunableop_tuning_enable": "refused",
    "_cuda_tunableop_set_filename": "refused",
    "_cuda_tunableop_set_max_tuning_duration": "refused",
    "_cuda_tunableop_set_max_tuning_iterations": "refused",
    "_cuda_tunableop_set_numerical_check_tolerances": "refused",
    "_cuda_tunableop_set_rotating_buffer_size": "refused",
    "_cuda_record_untuned_enable": "refused",
    "_cuda_cudaCachingAllocator_enable": "torch's own cache is not there, on or off",
    "_cuda_cudaCachingAllocator_set_allocator_settings": "said on stderr: devproxy's allocator has no such settings",
}
SETS = {"attach", "change", "enable", "exchange", "record", "set", "sleep"}


def sets_something(name: str) -> bool:
    words = {word.lower() for word in re.findall("[A-Z]?[a-z]+", name)}
    return (
        name.startswith(("_cuda", "_cudnn", "_host")) and bool(words & SETS) and "is" not in words
    )


def test_no_setter_ignores_its_value() -> None:
    """A new name of torch's, or of the plugin's, has to be put into the list with what becomes of its value."""
    assert {name for name in dir(torch._C) if sets_something(name)} - set(SETTERS) == set()
    for name, becomes in SETTERS.items():
        if becomes == "refused":
            with pytest.raises(RuntimeError, match="is not supported behind devproxy"):
                getattr(torch._C, name)(1)


def test_settings_of_an_allocator_that_is_not_there_are_named(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for _ in range(2):
        torch._C._cuda_cudaCachingAllocator_set_allocator_settings("expandable_segments:True")  # type: ignore[attr-defined]
    assert capfd.readouterr().err.count("expandable_segments:True) change nothing") == 1
