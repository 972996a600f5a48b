# SPDX-License-Identifier: Apache-2.0
"""Host memory that the driver knows; device memory out and in."""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from typing import Any

from devproxy.layout import DEVICE_BYTES, RANGE_BASE
from devproxy.machine import GIB, MIB
from gpucheck.driver import PTR, SIZE, U32, U64, Gpu, host_map, map_at
from gpucheck.ends import Failed
from gpucheck.report import Report
from gpucheck.setup import Setup
from gpucheck.stage import stage


@stage(40, 5, direct=True)
def e_host_memory(setup: Setup, report: Report) -> None:
    """Registering shared memory: from memfd and tmpfs, by size, cost of it, and with pages taken away underneath."""
    gpu = Gpu(setup.driver)
    usual_mib, most_mib = (16, 64) if setup.small else (256, 1024)
    size, most = usual_mib * MIB, most_mib * MIB
    stream, device = gpu.stream(), gpu.memory(size)

    def moved(host: int, size: int) -> dict[str, float]:
        figures = {}
        for way, copy in (("h2d", gpu.to_device), ("d2h", lambda a, b, n, s: gpu.to_host(b, a, n, s))):  # fmt: skip
            took = []
            for _ in range(5):
                begin = time.perf_counter()
                copy(device, host, size, stream)
                gpu.wait(stream)
                took.append(time.perf_counter() - begin)
            figures[f"{way}_GBps"] = round(size / statistics.median(took) / 1e9, 2)
        return figures

    host = gpu.pinned(size)
    ctypes.memset(host, 1, size)
    report.put("driver_allocated", moved(host, size))
    for kind in ("memfd", "tmpfs"):
        if kind == "memfd":
            fd = os.memfd_create("gpu-check")
        else:
            fd = os.open(setup.shm() / "registered", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, most)
        # hal/cuda's is a file of /dev/shm, behind the device's range.
        at = map_at(RANGE_BASE + DEVICE_BYTES, fd, most) if kind == "tmpfs" else 0
        figures: dict[str, Any] = {"at_the_windows_address": at != 0}
        if not at:
            at, _view = host_map(fd, most)
        for size_mib in sorted({2, 64, usual_mib, most_mib}):
            ctypes.memset(at, 2, min(size_mib * MIB, size))
            begin = time.perf_counter()
            code = gpu.result("cuMemHostRegister_v2", PTR(at), SIZE(size_mib * MIB), U32(2))
            took = time.perf_counter() - begin
            figures[f"{size_mib}MiB"] = gpu.text(code) if code else {"register_ms": round(took * 1e3, 2)}  # fmt: skip
            if code:
                continue
            pointer = U64()
            code = gpu.result(
                "cuMemHostGetDevicePointer_v2", ctypes.byref(pointer), PTR(at), U32(0)
            )
            figures[f"{size_mib}MiB"]["same_address"] = (
                gpu.text(code) if code else pointer.value == at
            )
            if size_mib == usual_mib:
                figures[f"{size_mib}MiB"] |= moved(at, size)
                ctypes.memset(at, 3, size)
                gpu.to_device(device, at, size, stream)
                gpu.wait(stream)
                same = gpu.words(device + size - 16, 4) == [0x03030303] * 4
                figures[f"{size_mib}MiB"]["content"] = same
            begin = time.perf_counter()
            gpu.call("cuMemHostUnregister", PTR(at))
            figures[f"{size_mib}MiB"]["unregister_ms"] = round(
                (time.perf_counter() - begin) * 1e3, 2
            )
        report.put(kind, figures)
        # The client gives pages of freed pinned memory back (MADV_REMOVE): what does a registration show then?
        if gpu.result("cuMemHostRegister_v2", PTR(at), SIZE(2 * MIB), U32(2)) == 0:
            removed = ctypes.CDLL(None, use_errno=True).madvise(PTR(at), SIZE(2 * MIB), 9)
            ctypes.memset(at, 4, 2 * MIB)
            gpu.to_device(device, at, 2 * MIB, stream)
            gpu.wait(stream)
            report.put(f"{kind}_after_MADV_REMOVE", {"madvise": removed, "device_sees_new_pages": gpu.words(device, 1) == [0x04040404]})  # fmt: skip
            gpu.call("cuMemHostUnregister", PTR(at))
        os.close(fd)


@stage(40, 6, direct=True)
def e_dump(setup: Setup, report: Report) -> None:
    """Device memory out and in as one thread of hal/cuda does it: staged through page-locked pieces, two in flight, into a memfd."""
    gpu = Gpu(setup.driver)
    total = 64 * MIB if setup.small else GIB
    device, stream = gpu.memory(total, RANGE_BASE), gpu.stream()
    gpu.call("cuMemsetD32Async", U64(device), U32(0x01020304), SIZE(total // 4), stream)
    gpu.wait(stream)
    fd = os.memfd_create("gpu-check")
    os.ftruncate(fd, total)
    at, _view = host_map(fd, total)
    ctypes.memset(at, 0, total)
    raw, once = gpu.pinned(64 * MIB), min(512 * MIB, total)

    def raw_rate(out: bool) -> float:
        took = []
        for _ in range(5):
            begin = time.perf_counter()
            for n in range(once // (64 * MIB)):
                (gpu.to_host if out else lambda h, d, s, t: gpu.to_device(d, h, s, t))(raw, device + n * 64 * MIB, 64 * MIB, stream)  # fmt: skip
            gpu.wait(stream)
            took.append(time.perf_counter() - begin)
        return round(once / statistics.median(took) / 1e9, 2)

    rates = {"out": raw_rate(True), "in": raw_rate(False)}
    report.put("pcie_GBps", rates)
    for piece_mib in (1, 4, 16):
        piece, streams = piece_mib * MIB, (gpu.stream(), gpu.stream())
        slots = (gpu.pinned(piece), gpu.pinned(piece))
        figures = {}
        for way in ("out", "in"):
            begin = time.perf_counter()
            for n in range(total // piece):
                slot, lane, offset = slots[n % 2], streams[n % 2], n * piece
                gpu.wait(lane)
                if way == "out":
                    if n >= 2:
                        ctypes.memmove(at + offset - 2 * piece, slot, piece)
                    gpu.to_host(slot, device + offset, piece, lane)
                else:
                    ctypes.memmove(slot, at + offset, piece)
                    gpu.to_device(device + offset, slot, piece, lane)
            for n in (total // piece, total // piece + 1):
                gpu.wait(streams[n % 2])
                if way == "out":
                    ctypes.memmove(at + (n - 2) * piece, slots[n % 2], piece)
            figures[f"{way}_GBps"] = round(total / (time.perf_counter() - begin) / 1e9, 2)
        figures["of_pcie_out"] = round(figures["out_GBps"] / rates["out"], 2)
        figures["of_pcie_in"] = round(figures["in_GBps"] / rates["in"], 2)
        report.put(f"staged_{piece_mib}MiB", figures)
    same = all(U32.from_address(at + o).value == 0x01020304 for o in range(0, total, 4093 * 4))
    report.put("content", same)
    code = gpu.result("cuMemHostRegister_v2", PTR(at), SIZE(total), U32(0))
    if code == 0:
        begin = time.perf_counter()
        gpu.to_host(at, device, total, stream)
        gpu.wait(stream)
        report.put("straight_into_a_registered_memfd_GBps", round(total / (time.perf_counter() - begin) / 1e9, 2))  # fmt: skip
    else:
        report.put("straight_into_a_registered_memfd_GBps", gpu.text(code))
    if not same:
        raise Failed("what came out is not what was in device memory")
