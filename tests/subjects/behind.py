# SPDX-License-Identifier: Apache-2.0
"""All kinds of commands behind a collective, of which none may run before it: what a cut in its middle must keep.

ranks.py's ranks do this in each step with --behind 1, on top of their own.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "comm"))
import nccl as n  # noqa: E402

COUNT = 1024
BYTES = 4 * COUNT
ROW, ROWS = 64, 32  # of a rectangle; 2 KiB
U64, U32, SIZE = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t
HOST, DEVICE, ARRAY = 1, 2, 3  # cuda.h, CUmemorytype


class Copy2D(ctypes.Structure):
    """cuda.h, CUDA_MEMCPY2D_v2."""

    _fields_ = [
        (f"{side}{name}", kind)
        for side in ("src", "dst")
        for name, kind in (
            ("XInBytes", SIZE),
            ("Y", SIZE),
            ("MemoryType", U32),
            ("Host", n.P),
            ("Device", U64),
            ("Array", n.P),
            ("Pitch", SIZE),
        )  # fmt: skip
    ] + [("WidthInBytes", SIZE), ("Height", SIZE)]


class ArrayShape(ctypes.Structure):
    """cuda.h, CUDA_ARRAY_DESCRIPTOR_v2."""

    _fields_ = [("Width", SIZE), ("Height", SIZE), ("Format", U32), ("NumChannels", U32)]


def rectangle(**fields: Any) -> Copy2D:
    return Copy2D(WidthInBytes=ROW, Height=ROWS, **fields)


class Behind:
    """Buffers of one rank, and what has come of them."""

    def __init__(self, world: n.Comm) -> None:
        self.world = world
        self.other = n.new_stream()
        self.sum, self.copied, self.late, self.captured = (n.Buffer(BYTES) for _ in range(4))
        self.pinned = n.P()
        n.driver("cuMemHostAlloc", ctypes.byref(self.pinned), SIZE(2 * BYTES), 0)
        self.array = n.P()
        shape = ArrayShape(ROW, ROWS, 1, 1)  # CU_AD_FORMAT_UNSIGNED_INT8
        n.driver("cuArrayCreate_v2", ctypes.byref(self.array), ctypes.byref(shape))
        self.calls: list[int] = []
        self.callback = ctypes.CFUNCTYPE(None, n.P)(lambda number: self.calls.append(number or 0))
        self.start, self.end = self.event(), self.event()
        self.instance = self.capture()

    @staticmethod
    def event() -> n.P:
        event = n.P()
        n.driver("cuEventCreate", ctypes.byref(event), 0)
        return event

    def capture(self) -> n.P:
        """A graph with an all_reduce between two copies."""
        graph, instance, stream = n.P(), n.P(), self.world.stream
        n.driver("cuStreamBeginCapture_v2", stream, 0)
        self.copy(self.captured.addr, self.copied.addr, stream)
        self.all_reduce(self.captured)
        self.copy(self.late.addr, self.captured.addr, stream)
        n.driver("cuStreamEndCapture", stream, ctypes.byref(graph))
        n.driver("cuGraphInstantiateWithFlags", ctypes.byref(instance), graph, U64(0))
        n.driver("cuGraphDestroy", graph)
        return instance

    def copy(self, to: int, source: int, stream: n.P) -> None:
        n.driver("cuMemcpyDtoDAsync_v2", U64(to), U64(source), SIZE(BYTES), stream)

    def all_reduce(self, buffer: n.Buffer) -> None:
        self.world.call("ncclAllReduce", buffer.ptr, buffer.ptr, n.SIZE(COUNT), n.INT32, n.SUM)

    def submit(self, number: int) -> None:
        """Waits for nothing."""
        stream = self.world.stream
        mine = np.full(COUNT, number * 1000 + self.world.rank, np.int32)
        n.driver("cuEventRecord", self.start, stream)
        self.sum.write(mine)
        self.all_reduce(self.sum)
        self.copy(self.copied.addr, self.sum.addr, stream)
        n.driver("cuMemsetD32Async", U64(self.copied.addr), U32(number), SIZE(7), stream)
        # Pageable memory, which may be overwritten when the call returns; then pinned, both ways.
        small = np.full(16, -number, np.int32)
        n.driver("cuMemcpyHtoDAsync_v2", U64(self.copied.addr + 128), small.ctypes.data_as(n.P), SIZE(64), stream)  # fmt: skip
        small[:] = 0
        n.driver("cuMemcpyDtoHAsync_v2", self.pinned, U64(self.copied.addr), SIZE(BYTES), stream)
        n.driver("cuMemcpyHtoDAsync_v2", U64(self.late.addr), self.pinned, SIZE(BYTES), stream)
        into = rectangle(srcMemoryType=DEVICE, srcDevice=self.copied.addr, srcPitch=ROW, dstMemoryType=ARRAY, dstArray=self.array)  # fmt: skip
        out = rectangle(srcMemoryType=ARRAY, srcArray=self.array, dstMemoryType=DEVICE, dstDevice=self.late.addr + 2048, dstPitch=ROW)  # fmt: skip
        for box in (into, out):
            n.driver("cuMemcpy2DAsync_v2", ctypes.byref(box), stream)
        n.driver("cuLaunchHostFunc", stream, self.callback, n.P(number))
        # An event that is gone before anything happens; and memory that is.
        gone = self.event()
        n.driver("cuEventRecord", gone, stream)
        n.driver("cuStreamWaitEvent", self.other, gone, 0)
        n.driver("cuEventDestroy_v2", gone)
        passing = U64()
        n.driver("cuMemAllocAsync", ctypes.byref(passing), SIZE(BYTES), self.other)
        self.copy(passing.value, self.late.addr, self.other)
        n.driver("cuMemcpyDtoHAsync_v2", n.P(self.pinned.value + BYTES), passing, SIZE(BYTES), self.other)  # fmt: skip
        n.driver("cuMemFreeAsync", passing, self.other)
        back = self.event()
        n.driver("cuEventRecord", back, self.other)
        n.driver("cuStreamWaitEvent", stream, back, 0)
        n.driver("cuEventDestroy_v2", back)
        n.driver("cuGraphLaunch", self.instance, stream)
        n.driver("cuEventRecord", self.end, stream)

    def finish(self, number: int) -> bytes:
        n.synchronize(self.world.stream)
        n.synchronize(self.other)
        milliseconds = ctypes.c_float()
        n.driver("cuEventElapsedTime", ctypes.byref(milliseconds), self.start, self.end)
        assert milliseconds.value >= 0
        assert self.calls[-1] == number, self.calls[-3:]
        pinned = ctypes.string_at(self.pinned.value, 2 * BYTES)
        buffers = (self.sum, self.copied, self.late, self.captured)
        return b"".join(b.read(np.int32, COUNT).tobytes() for b in buffers) + pinned
