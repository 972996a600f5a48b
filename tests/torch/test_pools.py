# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.MemPool, memory that a program allocates by itself, and memory of the host that it registers."""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading

import pytest
import torch
from torch.cuda import _pin_memory_utils

MIB = 1 << 20


def reserved_in(pool: torch.cuda.MemPool) -> list[int]:
    return sorted(s["total_size"] for s in pool.snapshot())


def test_a_pool_keeps_what_is_freed_until_it_goes() -> None:
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    pool = torch.cuda.MemPool()
    assert pool.use_count() == 1 and pool.device == torch.cuda.current_device()
    with torch.cuda.use_mem_pool(pool):
        assert pool.use_count() == 2
        inside = torch.full((4 * MIB,), 3.0, device="cuda")
    assert pool.use_count() == 1
    outside = torch.ones(MIB, device="cuda")
    assert reserved_in(pool) == [16 * MIB]
    address = inside.data_ptr()
    del inside
    assert reserved_in(pool) == [16 * MIB]
    other = torch.empty(4 * MIB, device="cuda")
    assert other.data_ptr() != address
    with torch.cuda.use_mem_pool(pool):
        again = torch.empty(4 * MIB, device="cuda")
    assert again.data_ptr() == address
    again.fill_(5)
    del pool
    gc.collect()
    assert (again == 5).all()  # what is live outlives it
    del again, other, outside
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] >= free


def test_pools_are_apart_and_nest() -> None:
    first, second = torch.cuda.MemPool(), torch.cuda.MemPool()
    assert first.id != second.id
    with torch.cuda.use_mem_pool(first):
        a = torch.empty(MIB, device="cuda")
        with torch.cuda.use_mem_pool(second):
            b = torch.empty(2 * MIB, device="cuda")
        c = torch.empty(3 * MIB, device="cuda")
    assert reserved_in(first) == [4 * MIB, 12 * MIB] and reserved_in(second) == [8 * MIB]
    whole = {s["segment_pool_id"] for s in torch.cuda.memory_snapshot()}
    assert {first.id, second.id} <= whole
    del a, b, c


def test_only_the_threads_own_allocations_go_to_it() -> None:
    pool = torch.cuda.MemPool()
    made: list[torch.Tensor] = []
    with torch.cuda.use_mem_pool(pool):
        thread = threading.Thread(target=lambda: made.append(torch.empty(MIB, device="cuda")))
        thread.start()
        thread.join()
        assert reserved_in(pool) == []
        torch._C._cuda_beginAllocateToPool(pool.device, pool.id)
        thread = threading.Thread(target=lambda: made.append(torch.empty(MIB, device="cuda")))
        thread.start()
        thread.join()
        assert reserved_in(pool) == [4 * MIB]
        torch._C._cuda_endAllocateToPool(pool.device, pool.id)
        torch._C._cuda_releasePool(pool.device, pool.id)


def test_another_streams_use_is_waited_for() -> None:
    """As anywhere: memory that another stream still reads is not written to by the next that gets it."""
    pool, side = torch.cuda.MemPool(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for turn in range(20):
        with torch.cuda.use_mem_pool(pool):
            x = torch.full((2 * MIB,), float(turn), device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x.clone()
            for _ in range(5):
                y += x
        x.record_stream(side)
        del x
        with torch.cuda.use_mem_pool(pool):
            z = torch.full((2 * MIB,), -1.0, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        assert (y == 6 * turn).all()
        del z
    assert reserved_in(pool) == [8 * MIB]


def test_a_graph_takes_its_memory_from_it() -> None:
    pool = torch.cuda.MemPool()
    x = torch.ones(MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, pool=pool.id):
        y = (x + 1) * 2
    assert len(reserved_in(pool)) == 2 and pool.use_count() == 2
    x.fill_(4)
    graph.replay()
    assert (y == 10).all()
    del graph
    gc.collect()
    assert pool.use_count() == 1


def test_what_is_spare_goes_to_others_before_memory_runs_out() -> None:
    free, _ = torch.cuda.mem_get_info()
    pools = {spare: torch.cuda.MemPool(use_on_oom=spare) for spare in (True, False)}
    for pool in pools.values():
        with torch.cuda.use_mem_pool(pool):
            torch.empty(free // 16, device="cuda")  # a quarter, freed at once
    kept = torch.empty(5 * free // 8, dtype=torch.uint8, device="cuda")
    assert reserved_in(pools[True]) == [] and len(reserved_in(pools[False])) == 1
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(free // 4, dtype=torch.uint8, device="cuda")
    del kept


def test_a_pool_gets_what_was_freed_elsewhere() -> None:
    """Memory that is freed behind work comes back when that is done, and what other pools may spare at once."""
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    pool, spare = torch.cuda.MemPool(), torch.cuda.MemPool(use_on_oom=True)
    with torch.cuda.use_mem_pool(spare):
        torch.empty(free // 4, dtype=torch.uint8, device="cuda")
    gone = torch.empty(free // 4, dtype=torch.uint8, device="cuda")
    x = torch.ones(1000, 1000, device="cuda")
    for _ in range(20):
        x = x @ x / 1000
    del gone
    with torch.cuda.use_mem_pool(pool):
        kept = torch.empty(3 * free // 4, dtype=torch.uint8, device="cuda")
    assert kept.numel() == 3 * free // 4 and reserved_in(spare) == []


def test_a_pool_of_ones_own_allocator_is_refused() -> None:
    with pytest.raises(RuntimeError, match="an allocator of one's own"):
        torch.cuda.MemPool(allocator=object())  # type: ignore[arg-type]


def test_raw_memory() -> None:
    free, _ = torch.cuda.mem_get_info()
    side = torch.cuda.Stream()
    for stream in (None, side, side.cuda_stream):
        at = torch.cuda.caching_allocator_alloc(3 * MIB, stream=stream)
        assert at and torch.cuda.mem_get_info()[0] <= free - 3 * MIB
        lib, back = ctypes.CDLL("libcuda.so.1"), ctypes.create_string_buffer(3 * MIB)
        assert lib.cuMemsetD8_v2(ctypes.c_uint64(at), 7, ctypes.c_size_t(3 * MIB)) == 0
        assert lib.cuMemcpyDtoH_v2(back, ctypes.c_uint64(at), ctypes.c_size_t(3 * MIB)) == 0
        assert back.raw == b"\7" * (3 * MIB)
        torch.cuda.caching_allocator_delete(at)
        with pytest.raises(RuntimeError, match="invalid device pointer"):
            torch.cuda.caching_allocator_delete(at)
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] == free


def test_registered_memory_of_the_host() -> None:
    memory = mmap.mmap(-1, 4 * MIB)
    host = torch.frombuffer(memory, dtype=torch.float32)
    torch.zeros(1, device="cuda")
    assert not host.is_pinned()
    _pin_memory_utils.pin_memory(host.data_ptr(), 4 * MIB)
    assert host.is_pinned()
    with pytest.raises(RuntimeError, match="cudaError: 712"):  # ...HostMemoryAlreadyRegistered
        _pin_memory_utils.pin_memory(host.data_ptr(), 4 * MIB)
    numbers = torch.arange(MIB, dtype=torch.float32, device="cuda")
    host.copy_(numbers, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(host, numbers.cpu())
    host.mul_(2)
    numbers.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(numbers.cpu(), host)
    _pin_memory_utils.unpin_memory(host.data_ptr())
    assert not host.is_pinned()
    with pytest.raises(AssertionError, match="error-code: 713"):
        _pin_memory_utils.unpin_memory(host.data_ptr())


def test_a_state_dict_is_staged_in_shared_pinned_memory() -> None:
    """As torch.distributed.checkpoint.async_save does with a process of its own."""
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager

    stager = StateDictStager(pin_memory=True, share_memory=True)
    state = {"weights": torch.randn(300, 200, device="cuda"), "step": 3}
    for turn in range(2):
        state["weights"] += turn  # type: ignore[operator]
        staged = stager.stage(state)
        torch.cuda.synchronize()
        assert staged["weights"].device.type == "cpu" and staged["weights"].is_shared()
        assert staged["weights"].is_pinned()
        assert torch.equal(staged["weights"], state["weights"].cpu())  # type: ignore[attr-defined]
    stager.close()
