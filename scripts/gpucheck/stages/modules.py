# SPDX-License-Identifier: Apache-2.0
"""Modules, order, faults."""

from __future__ import annotations

import ctypes
import time
from typing import Any

from devproxy.layout import MAX_SLOTS, RANGE_BASE, RANGE_BYTES
from devproxy.machine import MIB
from gpucheck.driver import INT, PTR, SIZE, U32, U64, Driver, Gpu, in_us
from gpucheck.ends import Failed, Refused
from gpucheck.report import Report
from gpucheck.setup import Setup, kernels
from gpucheck.stage import stage

# Offset and size of each parameter, as a C compiler lays them out (tests/subjects/driver/kernels.c).
LAYOUTS = {
    "fill": [(0, 8), (8, 4), (16, 8)],
    "saxpy": [(0, 4), (8, 8), (16, 8), (24, 8)],
    "mixed": [(0, 1), (8, 8), (16, 2), (24, 8), (32, 1), (36, 4)],
    "noop64": [(8 * i, 8) for i in range(8)],
    "sum_struct": [(0, 8), (8, 32756)],
    "crash": [],
}


def layout(gpu: Driver, function: PTR, call: str) -> list[tuple[int, int]]:
    """Until the driver says that there are no more. What it says then is in the last element where it is not INVALID_VALUE."""
    found: list[tuple[int, int]] = []
    offset, size = SIZE(), SIZE()
    for i in range(100):
        code = gpu.result(call, function, SIZE(i), ctypes.byref(offset), ctypes.byref(size))
        if code:
            return found if code == 1 else [*found, (-code, -code)]
        found.append((offset.value, size.value))
    return found


@stage(25, 3, direct=True)
def b_layouts(setup: Setup, report: Report) -> None:
    """Parameter layouts of functions and kernels, from cubin and from PTX, against C's."""
    gpu, wrong = Gpu(setup.driver), []
    for form in ("cubin", "ptx", "fatbin"):
        try:
            begin = time.perf_counter()
            module = gpu.load(kernels(setup, form))
            report.put(f"load_{form}_ms", round((time.perf_counter() - begin) * 1e3, 2))
        except (Refused, Failed) as why:
            report.say(f"{form}: {why}")
            wrong.append(form)
            continue
        for name, want in LAYOUTS.items():
            got = layout(gpu, gpu.function(module, name), "cuFuncGetParamInfo")
            if got != want:
                wrong.append(f"{form} {name}")
                report.put(f"{form} {name}", got)
    report.put("functions_checked", len(LAYOUTS))
    library, kernel = PTR(), PTR()
    image = kernels(setup) + b"\0"
    gpu.call("cuLibraryLoadData", ctypes.byref(library), image, None, None, U32(0), None, None, U32(0))  # fmt: skip
    for name, want in LAYOUTS.items():
        gpu.call("cuLibraryGetKernel", ctypes.byref(kernel), library, name.encode())
        got = layout(gpu, kernel, "cuKernelGetParamInfo")
        if got != want:
            wrong.append(f"kernel {name}")
            report.put(f"kernel {name}", got)
    if wrong:
        raise Failed(f"not as a C compiler lays them out: {', '.join(wrong)}")


@stage(30, 5, direct=True)
def b_modules(setup: Setup, report: Report) -> None:
    """Load, unload, load again: handles, contents and addresses of globals; loading beside a running kernel."""
    gpu, image = Gpu(setup.driver), kernels(setup)
    device = gpu.memory(64 * MIB, RANGE_BASE)

    def facts(module: PTR) -> dict[str, Any]:
        at, size = gpu.global_of(module, "table")
        return {
            "module": hex(module.value or 0),
            "fill": hex(gpu.function(module, "fill").value or 0),
            "table": hex(at),
            "bytes": size,
            "zeroes": hex(gpu.global_of(module, "zeroes")[0]),
        }

    first, second = gpu.load(image), gpu.load(image)
    report.put("two_loads", [facts(first), facts(second)])
    at, _ = gpu.global_of(first, "table")
    initial = gpu.words(at, 4)
    report.put("initial_table", initial)
    inside = RANGE_BASE <= at < RANGE_BASE + MAX_SLOTS * RANGE_BYTES
    report.put("globals_inside_devproxys_ranges", inside)
    gpu.launch(gpu.function(first, "bump_table"), None, U32(5), block=4)
    gpu.call("cuStreamSynchronize", None)
    report.put("table_after_a_kernel", gpu.words(at, 4))
    stream, host = gpu.stream(), gpu.pinned(16)
    (U32 * 4).from_address(host)[:] = [1, 2, 3, 4]
    gpu.to_device(at, host, 16, stream)
    gpu.wait(stream)
    report.put("table_can_be_written", gpu.words(at, 4) == [1, 2, 3, 4])
    again = []
    for _ in range(3):
        gpu.call("cuModuleUnload", first)
        first = gpu.load(image)
        again.append(facts(first))
    report.put("loaded_again", again)
    report.put("table_after_reload", gpu.words(gpu.global_of(first, "table")[0], 4))
    report.put("same_address_after_reload", all(a["table"] == hex(at) for a in again))
    report.put("load_us", in_us(lambda: gpu.load(image), 10))
    # While a kernel runs: does the call wait for it? 300 ms is far more than any load.
    slow, fill, running = gpu.function(first, "slow"), gpu.function(second, "fill"), gpu.stream()
    gpu.launch(fill, running, U64(device), U32(1), U64(16))
    gpu.wait(running)
    figures = {}
    for name, work in (
        ("load", lambda: gpu.load(image)),
        ("load_and_first_launch", lambda: gpu.launch(gpu.function(gpu.load(image), "fill"), stream, U64(device), U32(2), U64(16))),
        ("cuMemCreate_64MiB", lambda: gpu.create(64 * MIB)),
        ("map_and_access", lambda: gpu.memory(64 * MIB)),
        ("cuMemHostAlloc_4MiB", lambda: gpu.pinned(4 * MIB)),
        ("unload", lambda: gpu.call("cuModuleUnload", gpu.load(image))),
    ):  # fmt: skip
        gpu.launch(slow, running, U64(300_000))
        begin = time.perf_counter()
        work()
        figures[name] = round((time.perf_counter() - begin) * 1e3, 2)
        gpu.wait(running)
    spare = gpu.memory(64 * MIB)
    gpu.launch(slow, running, U64(300_000))
    begin = time.perf_counter()
    gpu.unmap(spare, 64 * MIB)
    figures["cuMemUnmap_64MiB"] = round((time.perf_counter() - begin) * 1e3, 2)
    gpu.wait(running)
    report.put("ms_beside_a_kernel_of_300_ms", figures)
    report.put("waits_for_it", [name for name, ms in figures.items() if ms > 200])
    if initial != [11, 22, 33, 44]:
        raise Failed(f"the table begins as {initial}")


@stage(30, 4, direct=True)
def b_order(setup: Setup, report: Report) -> None:
    """Completion words, events, the legacy stream's rule, the depth of a queue."""
    gpu = Gpu(setup.driver)
    module = gpu.load(kernels(setup))
    slow, fill = gpu.function(module, "slow"), gpu.function(module, "fill")
    noop, device = gpu.function(module, "noop64"), gpu.memory(64 * MIB, RANGE_BASE)
    stream, legacy = gpu.stream(), PTR(1)  # CU_STREAM_LEGACY
    host = gpu.pinned(4 * MIB, 2)  # CU_MEMHOSTALLOC_DEVICEMAP
    word, word_device = U64.from_address(host), U64()
    gpu.call("cuMemHostGetDevicePointer_v2", ctypes.byref(word_device), PTR(host), U32(0))
    report.put("host_memory_same_address_on_device", word_device.value == host)

    def write(value: int, to: PTR) -> None:
        gpu.call("cuStreamWriteValue64_v2", to, word_device, U64(value), U32(0))

    def until(value: int, limit_s: float = 2.0) -> None:
        deadline = time.perf_counter() + limit_s
        while word.value != value:
            if time.perf_counter() > deadline:
                raise Failed(f"the completion word stays at {word.value}, not {value}")

    numbers = iter(range(1, 1 << 30))

    def one(to: PTR) -> None:
        value = next(numbers)
        write(value, to)
        until(value)

    report.put("written_word_us", in_us(lambda: one(stream), 500))
    report.put("written_word_legacy_us", in_us(lambda: one(legacy), 500))

    def launch_and_word() -> None:
        gpu.launch(noop, stream, *[U64(0)] * 8)
        one(stream)

    report.put("launch_and_word_us", in_us(launch_and_word, 500))
    event = PTR()
    gpu.call("cuEventCreate", ctypes.byref(event), U32(2))

    def launch_and_event() -> None:
        gpu.launch(noop, stream, *[U64(0)] * 8)
        gpu.call("cuEventRecord", event, stream)
        while gpu.result("cuEventQuery", event) == 600:
            pass

    report.put("launch_and_event_us", in_us(launch_and_event, 500))
    # Is what a copy wrote visible before the word behind it? The last word of the copy is looked at, 200 times.
    late, size = 0, 1 * MIB
    last = ctypes.c_uint32.from_address(host + MIB + size - 4)
    for n in range(1, 201):
        gpu.launch(fill, stream, U64(device), U32(n), U64(size // 4), grid=64, block=256)
        gpu.to_host(host + MIB, device, size, stream)
        one(stream)
        late += last.value != n
    report.put("copies_not_visible_at_their_word", late)
    # The legacy stream waits for blocking streams, and they for it; a non-blocking one does not.
    blocking = PTR()
    gpu.call("cuStreamCreateWithPriority", ctypes.byref(blocking), U32(0), INT(0))
    gpu.launch(slow, blocking, U64(50_000))
    begin = time.perf_counter()
    one(legacy)
    report.put("legacy_waited_for_blocking_ms", round((time.perf_counter() - begin) * 1e3, 1))
    gpu.launch(slow, legacy, U64(50_000))
    begin = time.perf_counter()
    one(blocking)
    report.put("blocking_waited_for_legacy_ms", round((time.perf_counter() - begin) * 1e3, 1))
    gpu.launch(slow, legacy, U64(50_000))
    begin = time.perf_counter()
    one(stream)
    report.put("non_blocking_waited_ms", round((time.perf_counter() - begin) * 1e3, 1))
    gpu.wait(legacy)
    # Behind a kernel of half a second: the first submission that takes long shows the queue's depth.
    gpu.launch(slow, stream, U64(500_000))
    depth, begun = 0, time.perf_counter()
    while depth < 20_000 and time.perf_counter() - begun < 0.4:
        begin = time.perf_counter()
        gpu.launch(noop, stream, *[U64(0)] * 8)
        if time.perf_counter() - begin > 0.02:
            break
        depth += 1
    report.put("launches_until_the_driver_blocks", depth)
    gpu.wait(stream)
    if late or report.figures["legacy_waited_for_blocking_ms"] < 40:
        raise Failed("the order is not the one that hal/cuda relies on")


@stage(25, 3, direct=True)
def b_faults(setup: Setup, report: Report) -> None:
    """A kernel that faults: which calls say so, and does another context of the process live on?"""
    gpu = Gpu(setup.driver)
    other, image = PTR(), kernels(setup)
    gpu.call("cuCtxCreate_v2", ctypes.byref(other), U32(4 | 8), gpu.device)
    other_stream, other_fill = gpu.stream(), gpu.function(gpu.load(image), "fill")
    other_memory = gpu.memory(2 * MIB)
    gpu.call("cuCtxSetCurrent", gpu.context)
    module, stream, second = gpu.load(image), gpu.stream(), gpu.stream()
    at, event = gpu.memory(2 * MIB), PTR()
    gpu.call("cuEventCreate", ctypes.byref(event), U32(2))
    host = gpu.pinned(4096)
    gpu.launch(gpu.function(module, "crash"), stream)
    found = {"synchronize": gpu.text(gpu.result("cuStreamSynchronize", stream))}
    handle, got = U64(), PTR()
    free, total = SIZE(), SIZE()
    asked: list[tuple[str, tuple[Any, ...]]] = [
        ("cuStreamQuery", (second,)),
        ("cuEventRecord", (event, second)),
        ("cuEventQuery", (event,)),
        ("cuMemcpyDtoHAsync_v2", (PTR(host), U64(at), SIZE(64), second)),
        ("cuMemsetD32Async", (U64(at), U32(1), SIZE(16), second)),
        ("cuMemGetInfo_v2", (ctypes.byref(free), ctypes.byref(total))),
        ("cuModuleLoadDataEx", (ctypes.byref(got), image, U32(0), None, None)),
        ("cuMemCreate", (ctypes.byref(handle), SIZE(2 * MIB), ctypes.byref(gpu.prop), U64(0))),
        ("cuMemUnmap", (U64(at), SIZE(2 * MIB))),
        ("cuMemHostAlloc", (ctypes.byref(got), SIZE(4096), U32(0))),
        ("cuStreamDestroy_v2", (second,)),
    ]
    for name, arguments in asked:
        found[name] = gpu.text(gpu.result(name, *arguments)) if gpu.has(name) else "not there"
    report.put("after_the_fault", found)
    report.put("set_other_current", gpu.text(gpu.result("cuCtxSetCurrent", other)))
    try:
        gpu.launch(other_fill, other_stream, U64(other_memory), U32(3), U64(16))
        code = gpu.result("cuStreamSynchronize", other_stream)
        report.put("other_context", gpu.text(code) if code else "lives on")
    except Failed as dead:
        report.put("other_context", str(dead))
    report.put("destroy", gpu.text(gpu.result("cuCtxDestroy_v2", gpu.context)))
    new = PTR()
    report.put("a_new_context", gpu.text(gpu.result("cuCtxCreate_v2", ctypes.byref(new), U32(12), gpu.device)))  # fmt: skip
