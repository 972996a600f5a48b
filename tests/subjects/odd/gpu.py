# SPDX-License-Identifier: Apache-2.0
"""Traits of the GPU, by the driver's API."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
import threading
import time

from tests.subjects.odd.shared import Look, flow, peek, poke, same, trait, wait_for


def cu(name: str, *arguments: object) -> None:
    result = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    same(name, result, 0)


@trait(gpu=True)
def gpu_streams(dice: random.Random) -> Look:
    """Streams, events and memory that come and go, and work that is not awaited within its step."""
    streams = [ctypes.c_void_p() for _ in range(3)]
    for stream in streams:
        cu("cuStreamCreate", ctypes.byref(stream), 1)
    blocks: list[tuple[ctypes.c_uint64, int]] = []
    event = ctypes.c_void_p()
    cu("cuEventCreate", ctypes.byref(event), 0)
    value = 0
    while True:
        yield value
        cu("cuEventSynchronize", event)
        memory, size = ctypes.c_uint64(), 4 * dice.randrange(1, 50_000)
        value = dice.randrange(1 << 32)
        cu("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
        for n, stream in enumerate(streams):
            cu("cuMemsetD32Async", memory, ctypes.c_uint32(value if n == 2 else n), ctypes.c_size_t(size // 4), stream)  # fmt: skip
            cu("cuEventRecord", event, stream)
            if n < 2:
                cu("cuStreamWaitEvent", streams[n + 1], event, 0)
        blocks.append((memory, value))
        if len(blocks) > 3:
            memory, old = blocks.pop(dice.randrange(3))
            back = ctypes.c_uint32()
            cu("cuMemcpyDtoH_v2", ctypes.byref(back), memory, ctypes.c_size_t(4))
            same("device memory", back.value, old)
            cu("cuMemFree_v2", memory)


@trait(gpu=True)
def gpu_pinned(dice: random.Random) -> Look:
    """Page-locked memory that copies go to and come from, also while nobody waits."""
    size = 1 << 18
    pinned, memory, stream = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_void_p()
    cu("cuMemHostAlloc", ctypes.byref(pinned), ctypes.c_size_t(size), 0)
    cu("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
    cu("cuStreamCreate", ctypes.byref(stream), 1)
    address = pinned.value or 0
    poke(address, flow(0, size))
    cu("cuMemcpyHtoDAsync_v2", memory, pinned, ctypes.c_size_t(size), stream)
    while True:
        step = yield None
        cu("cuStreamSynchronize", stream)
        same("page-locked memory", peek(address, size), flow(step - 1, size))
        poke(address, flow(step, size))
        cu("cuMemcpyHtoDAsync_v2", memory, pinned, ctypes.c_size_t(size), stream)
        cu("cuStreamSynchronize", stream)
        poke(address, bytes(size))
        cu("cuMemcpyDtoHAsync_v2", pinned, memory, ctypes.c_size_t(size), stream)


GPU_CHILD = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, memory, back = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint32()
def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    assert code == 0, (name, code)
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(4))
for line in sys.stdin:
    call("cuMemcpyDtoH_v2", ctypes.byref(back), memory, ctypes.c_size_t(4))
    call("cuMemsetD32_v2", memory, ctypes.c_uint32(int(line)), ctypes.c_size_t(1))
    print(back.value, flush=True)
"""


@trait(gpu=True)
def gpu_child(dice: random.Random) -> Look:
    """A second process that uses the GPU, and says in each step what its memory held."""
    child = subprocess.Popen([sys.executable, "-c", GPU_CHILD], stdin=-1, stdout=-1, text=True)
    assert child.stdin and child.stdout
    print(0, file=child.stdin, flush=True)
    child.stdout.readline()
    while True:
        step = yield None
        print(step, file=child.stdin, flush=True)
        same("the other process's memory", child.stdout.readline(), f"{step - 1}\n")


@trait(gpu=True)
def gpu_thread(dice: random.Random) -> Look:
    """A thread that uses the GPU all the time."""
    problems: list[object] = []
    context, turns = ctypes.c_void_p(), [0]
    cu("cuCtxGetCurrent", ctypes.byref(context))

    def work() -> None:
        try:
            cu("cuCtxSetCurrent", context)
            back = ctypes.create_string_buffer(3000)
            while True:
                turns[0] += 1
                memory = ctypes.c_uint64()
                cu("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(3000))
                cu("cuMemsetD8_v2", memory, ctypes.c_ubyte(turns[0] % 256), ctypes.c_size_t(3000))
                cu("cuMemcpyDtoH_v2", back, memory, ctypes.c_size_t(3000))
                same("a thread's memory", back.raw, bytes([turns[0] % 256]) * 3000)
                cu("cuMemFree_v2", memory)
                time.sleep(0.001)
        except BaseException as error:
            problems.append(error)

    threading.Thread(target=work, daemon=True).start()
    while True:
        yield None
        before = turns[0]
        wait_for(lambda: problems or turns[0] > before, "the thread")
        same("problems", problems, [])
