# SPDX-License-Identifier: Apache-2.0
"""Address ranges, what mapping costs, aliases."""

from __future__ import annotations

import ctypes
import time

from devproxy.layout import DEVICE_BYTES, MAX_SLOTS, RANGE_BASE, RANGE_BYTES
from devproxy.machine import MIB
from gpucheck.driver import INT, PTR, SIZE, U32, U64, Gpu, Laps, in_us
from gpucheck.ends import Failed
from gpucheck.report import Report
from gpucheck.setup import Setup
from gpucheck.stage import stage


@stage(25, 3, direct=True)
def a_ranges(setup: Setup, report: Report) -> None:
    """Can every slot's 192 GiB be reserved at the address that devproxy gives it?"""
    gpu = Gpu(setup.driver)
    code, got = gpu.reserve(DEVICE_BYTES, RANGE_BASE)
    report.put("slot_0", {"result": code, "wished": hex(RANGE_BASE), "got": hex(got)})
    if code == 0:
        report.put("reserve_us", in_us(lambda: gpu.unreserve(gpu.reserve(DEVICE_BYTES)[1], DEVICE_BYTES), 5))  # fmt: skip
    held, others = ([got] if code == 0 and got == RANGE_BASE else []), []
    for slot in range(1, MAX_SLOTS):
        wish = RANGE_BASE + slot * RANGE_BYTES
        result, at = gpu.reserve(DEVICE_BYTES, wish)
        if result or at != wish:
            others.append([slot, result, hex(at)])
            if result:
                break
        if result == 0:
            held.append(at)
    report.put("slots_as_wished", len(held) - len([o for o in others if o[1] == 0]))
    report.put("slots_otherwise", others[:10])
    # The pinned window lies in the same process, right behind the device range.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = U64
    libc.mmap.argtypes = [U64, SIZE, INT, INT, INT, ctypes.c_long]
    window = libc.mmap(RANGE_BASE + DEVICE_BYTES, RANGE_BYTES - DEVICE_BYTES, 0, 0x100022 | 0x4000, -1, 0)  # fmt: skip
    report.put("pinned_window_beside_it", hex(window))
    taken = libc.mmap(RANGE_BASE + MAX_SLOTS * RANGE_BYTES, 1 << 30, 0, 0x100022 | 0x4000, -1, 0)
    result, at = gpu.reserve(DEVICE_BYTES, RANGE_BASE + MAX_SLOTS * RANGE_BYTES)
    report.put("where_host_memory_lies", {"host": hex(taken), "result": result, "got": hex(at)})
    for at in held:
        gpu.unreserve(at, DEVICE_BYTES)
    found = {}
    for base in (0x10_0000_0000, 0x40_0000_0000, 0x1000_0000_0000, 0x3000_0000_0000, 0x4000_0000_0000, 0x5000_0000_0000, 0x6000_0000_0000, 0x7000_0000_0000):  # fmt: skip
        result, at = gpu.reserve(DEVICE_BYTES, base)
        found[hex(base)] = hex(at) if result == 0 else gpu.text(result)
        if result == 0:
            gpu.unreserve(at, DEVICE_BYTES)
    report.put("other_bases", found)
    sizes = {}
    for bits in (38, 40, 42, 44, 45, 46, 47):
        result, at = gpu.reserve(1 << bits)
        sizes[f"2^{bits}"] = hex(at) if result == 0 else gpu.text(result)
        if result == 0:
            gpu.unreserve(at, 1 << bits)
    report.put("sizes", sizes)
    if not held or held[0] != RANGE_BASE or others:
        raise Failed("not every slot gets the addresses that it needs")


@stage(30, 3, direct=True)
def a_vmm_cost(setup: Setup, report: Report) -> None:
    """create, map, SetAccess, unmap, release by the size of a handle, and of many small ones in one range."""
    gpu = Gpu(setup.driver)
    report.put("granularity", gpu.granularity())
    code, base = gpu.reserve(DEVICE_BYTES, RANGE_BASE)
    if code:
        raise Failed(f"cuMemAddressReserve: {gpu.text(code)}")
    for size_mib in (2, 16, 64, 128, 1024):
        size, laps = size_mib * MIB, Laps()
        for _ in range(7):
            laps.begin()
            handle = gpu.create(size)
            laps.end("create")
            gpu.map(base, size, handle)
            laps.end("map")
            gpu.allow(base, size)
            laps.end("access")
            gpu.unmap(base, size)
            laps.end("unmap")
            gpu.release(handle)
            laps.end("release")
        report.put(f"{size_mib}MiB_us", laps.medians_us())
    many, piece = 256, 2 * MIB
    handles = [gpu.create(piece) for _ in range(many)]
    begin = time.perf_counter()
    for n, handle in enumerate(handles):
        gpu.map(base + n * piece, piece, handle)
    mapped = time.perf_counter()
    gpu.allow(base, many * piece)
    allowed = time.perf_counter()
    for n in range(many):
        gpu.unmap(base + n * piece, piece)
    ended = time.perf_counter()
    each = {"map": mapped - begin, "access_once": allowed - mapped, "unmap": ended - allowed}
    report.put("256_handles_of_2MiB_us", {k: round(v * 1e6, 1) for k, v in each.items()})


@stage(25, 3, direct=True)
def a_alias(setup: Setup, report: Report) -> None:
    """One handle at two addresses, in one context and in two; memory survives being mapped anew."""
    gpu = Gpu(setup.driver)
    size = 64 * MIB
    _, first = gpu.reserve(size)
    _, second = gpu.reserve(size)
    handle = gpu.create(size)
    for at in (first, second):
        gpu.map(at, size, handle)
        gpu.allow(at, size)
    stream = gpu.stream()
    gpu.call("cuMemsetD32Async", U64(first), U32(7), SIZE(size // 4), stream)
    gpu.wait(stream)
    report.put("seen_at_both", gpu.words(second + size - 64, 16) == [7] * 16)
    gpu.unmap(first, size)
    report.put("one_unmapped", gpu.words(second, 4) == [7] * 4)
    gpu.map(first, size, handle)
    gpu.allow(first, size)
    report.put("mapped_anew", gpu.words(first, 4) == [7] * 4)
    other = PTR()
    gpu.call("cuCtxCreate_v2", ctypes.byref(other), U32(4 | 8), gpu.device)
    _, third = gpu.reserve(size)
    gpu.map(third, size, handle)
    gpu.allow(third, size)
    report.put("in_another_context", gpu.words(third, 4) == [7] * 4)
    report.put("first_address_from_the_other_context", gpu.words(first, 4) == [7] * 4)
    stream = gpu.stream()
    gpu.call("cuMemsetD32Async", U64(third), U32(9), SIZE(size // 4), stream)
    gpu.wait(stream)
    gpu.call("cuCtxSetCurrent", gpu.context)
    report.put("written_by_the_other", gpu.words(first, 4) == [9] * 4)
    half = gpu.result("cuMemUnmap", U64(first), SIZE(size // 2))
    report.put("unmap_of_a_half", gpu.text(half))
    if not all(v for v in report.figures.values() if isinstance(v, bool)):
        raise Failed("aliases do not show the same memory")
