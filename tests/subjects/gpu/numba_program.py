# SPDX-License-Identifier: Apache-2.0
"""numba-cuda, which nobody here wrote, as a driver-API client: compiled by itself, launched, compared. Prints PASS."""

from __future__ import annotations

import numpy as np
from numba import cuda


@cuda.jit
def saxpy(a, x, y):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    if i < y.size:
        y[i] = a * x[i] + y[i]


@cuda.jit
def block_sums(x, out):  # type: ignore[no-untyped-def]
    shared = cuda.shared.array(128, dtype=np.int64)
    t = cuda.threadIdx.x
    shared[t] = x[cuda.blockIdx.x * 128 + t]
    cuda.syncthreads()
    step = 64
    while step:
        if t < step:
            shared[t] += shared[t + step]
        cuda.syncthreads()
        step //= 2
    if t == 0:
        cuda.atomic.add(out, 0, shared[0])


def main() -> None:
    n = 1 << 14
    x, y = np.arange(n, dtype=np.float64), np.full(n, 2.0)
    stream = cuda.stream()
    dx, dy = cuda.to_device(x, stream), cuda.to_device(y, stream)
    saxpy[n // 128, 128, stream](0.5, dx, dy)
    np.testing.assert_array_equal(dy.copy_to_host(stream=stream), 0.5 * x + 2.0)
    numbers, total = (
        cuda.to_device(np.arange(n, dtype=np.int64)),
        cuda.to_device(np.zeros(1, np.int64)),
    )
    block_sums[n // 128, 128](numbers, total)
    assert total.copy_to_host()[0] == n * (n - 1) // 2
    # Which driver was it? numba opens "libcuda.so" before "libcuda.so.1", and may find another file than the preloaded.
    with open("/proc/self/maps") as maps:
        print("mapped:", *sorted({line.split()[-1] for line in maps if "libcuda.so" in line}))
    print("PASS numba_program")


main()
