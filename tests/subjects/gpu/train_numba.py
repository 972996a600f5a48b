# SPDX-License-Identifier: Apache-2.0
"""A training program on numba-cuda, which compiles its kernels while it runs: two layers, squared error, SGD or Adam.

A subject like those of tests/subjects: it prints each step's loss and a digest of its weights at the end. Every sum has
one order, so every right run is equal bit for bit.
"""

from __future__ import annotations

import math
import os
import statistics
import time

import numpy as np
from common import Digest, Steps, check, options
from numba import cuda, float32

INPUTS, OUTPUTS, TILE, BLOCK = 32, 8, 16, 128


@cuda.jit
def hidden_of(x, w1, b1, h):  # type: ignore[no-untyped-def]
    """h = tanh(x w1 + b1), a tile of shared memory at a time."""
    tile = cuda.shared.array((TILE, INPUTS), float32)
    column, row = cuda.grid(2)
    local = cuda.threadIdx.y
    for k in range(cuda.threadIdx.x, INPUTS, TILE):
        tile[local, k] = x[row, k] if row < h.shape[0] else float32(0)
    cuda.syncthreads()
    if row < h.shape[0] and column < h.shape[1]:
        total = float32(b1[column])
        for k in range(INPUTS):
            total += tile[local, k] * w1[k, column]
        h[row, column] = math.tanh(total)


@cuda.jit
def error_of(h, w2, b2, want, error):  # type: ignore[no-untyped-def]
    column, row = cuda.grid(2)
    if row < error.shape[0] and column < error.shape[1]:
        total = float32(b2[column])
        for k in range(h.shape[1]):
            total += h[row, k] * w2[k, column]
        error[row, column] = total - want[row, column]


@cuda.jit
def slopes_of_output(h, error, slope, bias_slope):  # type: ignore[no-untyped-def]
    column, row = cuda.grid(2)
    if row < slope.shape[0] and column < slope.shape[1]:
        scale = float32(2) / float32(error.size)
        total, alone = float32(0), float32(0)
        for k in range(error.shape[0]):
            total += h[k, row] * error[k, column]
            alone += error[k, column]
        slope[row, column] = total * scale
        if row == 0:
            bias_slope[column] = alone * scale


@cuda.jit
def slopes_of_hidden(x, h, error, w2, slope, bias_slope):  # type: ignore[no-untyped-def]
    """One thread for each hidden unit."""
    unit = cuda.grid(1)
    if unit < h.shape[1]:
        scale = float32(2) / float32(error.size)
        alone = float32(0)
        for i in range(INPUTS):
            slope[i, unit] = float32(0)
        for row in range(h.shape[0]):
            back = float32(0)
            for k in range(OUTPUTS):
                back += error[row, k] * w2[unit, k]
            back *= (float32(1) - h[row, unit] * h[row, unit]) * scale
            alone += back
            for i in range(INPUTS):
                slope[i, unit] += x[row, i] * back
        bias_slope[unit] = alone


@cuda.jit
def mean_square(error, loss):  # type: ignore[no-untyped-def]
    """One block."""
    part = cuda.shared.array(BLOCK, float32)
    t = cuda.threadIdx.x
    total = float32(0)
    for i in range(t, error.size, BLOCK):
        one = error[i // OUTPUTS, i % OUTPUTS]
        total += one * one
    part[t] = total
    cuda.syncthreads()
    step = BLOCK // 2
    while step > 0:
        if t < step:
            part[t] += part[t + step]
        cuda.syncthreads()
        step //= 2
    if t == 0:
        loss[0] = part[0] / float32(error.size)


@cuda.jit
def sgd(values, slopes, rate):  # type: ignore[no-untyped-def]
    for i in range(cuda.grid(1), values.size, cuda.gridsize(1)):
        values[i] -= rate * slopes[i]


@cuda.jit
def adam(values, slopes, first, second, rate, left1, left2):  # type: ignore[no-untyped-def]
    for i in range(cuda.grid(1), values.size, cuda.gridsize(1)):
        slope = slopes[i]
        first[i] = float32(0.9) * first[i] + float32(0.1) * slope
        second[i] = float32(0.999) * second[i] + float32(0.001) * slope * slope
        values[i] -= rate * (first[i] / left1) / (math.sqrt(second[i] / left2) + float32(1e-8))


def main() -> None:
    o = options(__doc__ or "", steps=200, rows=64, width=64, adam=0, ballast_mib=0)
    random = np.random.default_rng(7)

    def some(*shape: int, span: float) -> np.ndarray:
        return random.uniform(-span, span, shape).astype(np.float32)

    stream = cuda.stream()
    x = cuda.to_device(some(o.rows, INPUTS, span=1), stream)
    want = cuda.to_device(some(o.rows, OUTPUTS, span=0.5), stream)
    # All weights in one buffer; the layers' are views of it.
    sizes = [INPUTS * o.width, o.width, o.width * OUTPUTS, OUTPUTS]
    ends = [int(end) for end in np.cumsum(sizes)]
    begin = np.zeros(ends[-1], np.float32)
    begin[: sizes[0]] = some(sizes[0], span=1 / math.sqrt(INPUTS))
    begin[ends[1] : ends[2]] = some(sizes[2], span=1 / math.sqrt(o.width))
    values, slopes, first, second = (
        cuda.to_device(data, stream) for data in (begin, begin * 0, begin * 0, begin * 0)
    )

    def views(of):  # type: ignore[no-untyped-def]
        w1, b1, w2, b2 = (of[end - size : end] for end, size in zip(ends, sizes))
        return w1.reshape(INPUTS, o.width), b1, w2.reshape(o.width, OUTPUTS), b2

    (w1, b1, w2, b2), (g1, gb1, g2, gb2) = views(values), views(slopes)
    h = cuda.to_device(np.zeros((o.rows, o.width), np.float32), stream)
    error = cuda.to_device(np.zeros((o.rows, OUTPUTS), np.float32), stream)
    loss = cuda.to_device(np.zeros(1, np.float32), stream)
    answer = cuda.pinned_array(1, np.float32)
    answer[0] = 0
    ballast = None  # device memory that an image has to carry
    if o.ballast_mib:
        ballast = cuda.to_device(np.full(o.ballast_mib << 18, 0x5A5A1234, np.uint32), stream)
    square, rows_up = (TILE, TILE), (o.rows + TILE - 1) // TILE
    of_hidden, of_out = (
        ((o.width + TILE - 1) // TILE, rows_up),
        ((OUTPUTS + TILE - 1) // TILE, rows_up),
    )
    of_w2 = ((OUTPUTS + TILE - 1) // TILE, (o.width + TILE - 1) // TILE)
    blocks = (ends[-1] + BLOCK - 1) // BLOCK
    digest, took, losses = Digest(), [], []
    steps = Steps(o)
    for step in steps:
        began = time.perf_counter()
        hidden_of[of_hidden, square, stream](x, w1, b1, h)
        error_of[of_out, square, stream](h, w2, b2, want, error)
        mean_square[1, BLOCK, stream](error, loss)
        slopes_of_output[of_w2, square, stream](h, error, g2, gb2)
        slopes_of_hidden[(o.width + 31) // 32, 32, stream](x, h, error, w2, g1, gb1)
        if o.adam:
            lefts = np.float32(1 - 0.9**step), np.float32(1 - 0.999**step)
            adam[blocks, BLOCK, stream](values, slopes, first, second, np.float32(0.002), *lefts)
        else:
            sgd[blocks, BLOCK, stream](values, slopes, np.float32(0.05))
        loss.copy_to_host(answer, stream)
        stream.synchronize()
        took.append(time.perf_counter() - began)
        losses.append(float(answer[0]))
        steps.say(f"loss {losses[-1].hex()}")
    digest.add("losses", losses)
    for name, one in (("values", values), ("first", first), ("second", second)):
        digest.add(name, one.copy_to_host(stream=stream))
    if ballast is not None:
        digest.add("ballast", ballast[-1024:].copy_to_host(stream=stream))
    if o.steps >= 50 and "DEVPROXY_TEST_NO_KERNELS" not in os.environ:
        check(losses[-1] < 0.9 * losses[0], f"the loss fell from {losses[0]} to {losses[-1]} only")
    # The first steps compile.
    print(f"median step {statistics.median(took) * 1e6:.1f} us", flush=True)
    digest.finish()


if __name__ == "__main__":
    main()
