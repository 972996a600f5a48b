# SPDX-License-Identifier: Apache-2.0
"""A small training program on the driver API: two layers, squared error, gradient descent, all in device memory.

A subject like those of tests/subjects: it prints each step's loss and a digest of its weights at the end, equal bit for
bit in every right run. TEST_KERNELS names the kernels (tests/subjects/gpu/kernels.cu).
"""

from __future__ import annotations

import ctypes
import os
import random
import statistics
import struct
import time
from typing import Any

from common import Digest, Steps, check, options

INPUTS, HIDDEN = 32, 64  # as in kernels.cu
U32, U64, FLOAT = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_float


class Gpu:
    """The few calls that are needed, each checked."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.stream, self.module = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuStreamCreate", ctypes.byref(self.stream), 1)
        path = os.environ["TEST_KERNELS"].encode()
        self.call("cuModuleLoad", ctypes.byref(self.module), path)

    def call(self, name: str, *arguments: Any) -> None:
        result = getattr(self.cuda, name)(*arguments)
        check(result == 0, f"{name}: CUresult {result}")

    def put(self, values: list[float]) -> U64:
        """A device buffer with these floats."""
        memory, data = U64(), struct.pack(f"{len(values)}f", *values)
        self.call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(len(data)))
        self.call("cuMemcpyHtoD_v2", memory, data, ctypes.c_size_t(len(data)))
        return memory

    def get(self, memory: U64, count: int) -> bytes:
        data = ctypes.create_string_buffer(count * 4)
        self.call("cuMemcpyDtoHAsync_v2", data, memory, ctypes.c_size_t(count * 4), self.stream)
        self.call("cuStreamSynchronize", self.stream)
        return data.raw

    def kernel(self, name: str) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), self.module, name.encode())
        return function

    def launch(self, function: ctypes.c_void_p, threads: int, *values: Any) -> None:
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        block = min(threads, 128)
        grid = (threads + block - 1) // block
        self.call(
            "cuLaunchKernel", function, grid, 1, 1, block, 1, 1, 0, self.stream, pointers, None
        )


def main() -> None:
    o = options(__doc__, steps=200, rows=64, ballast_mib=0)
    random.seed(7)
    gpu = Gpu()
    rows = U32(o.rows)
    x = gpu.put([random.uniform(-1, 1) for _ in range(o.rows * INPUTS)])
    y = gpu.put([random.uniform(-1, 1) for _ in range(o.rows)])
    w1 = gpu.put([random.uniform(-0.2, 0.2) for _ in range(INPUTS * HIDDEN)])
    w2 = gpu.put([random.uniform(-0.2, 0.2) for _ in range(HIDDEN)])
    h, error, loss = gpu.put([0.0] * o.rows * HIDDEN), gpu.put([0.0] * o.rows), gpu.put([0.0])
    ballast = U64()  # device memory that an image has to carry
    if o.ballast_mib:
        gpu.call("cuMemAlloc_v2", ctypes.byref(ballast), ctypes.c_size_t(o.ballast_mib << 20))
        count = ctypes.c_size_t(o.ballast_mib << 18)
        gpu.call("cuMemsetD32Async", ballast, U32(0x5A5A1234), count, gpu.stream)
    hidden, errors, update = (
        gpu.kernel("train_hidden"),
        gpu.kernel("train_error"),
        gpu.kernel("train_update"),
    )
    digest, took = Digest(), []
    steps = Steps(o)
    for _ in steps:
        begin = time.perf_counter()
        gpu.launch(hidden, o.rows * HIDDEN, x, w1, h, rows)
        gpu.launch(errors, o.rows, h, w2, y, error, rows)
        gpu.launch(update, HIDDEN, x, h, error, w1, w2, loss, rows, FLOAT(0.05))
        (value,) = struct.unpack("f", gpu.get(loss, 1))
        took.append(time.perf_counter() - begin)
        digest.add("loss", value)
        steps.say(f"loss {value:.9g}")
    digest.add("w1", gpu.get(w1, INPUTS * HIDDEN))
    digest.add("w2", gpu.get(w2, HIDDEN))
    if o.ballast_mib:
        digest.add("ballast", gpu.get(ballast, 4096))
    print(f"median step {statistics.median(took) * 1e6:.1f} us", flush=True)
    digest.finish()


if __name__ == "__main__":
    main()
