# SPDX-License-Identifier: Apache-2.0
"""A client that nobody here wrote: NVIDIA's cuda-bindings from PyPI, unmodified, over the shim. Prints PASS."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from cuda.bindings import driver


def ok(result: tuple[Any, ...]) -> Any:
    """Returns what the call gave besides its CUresult, after checking that."""
    code, *rest = result
    assert code == driver.CUresult.CUDA_SUCCESS, driver.cuGetErrorName(code)
    return rest[0] if len(rest) == 1 else tuple(rest)


def main() -> None:
    """Init, memory, streams, events, modules and a launch."""
    ok(driver.cuInit(0))
    assert ok(driver.cuDriverGetVersion()) >= 12000
    count = ok(driver.cuDeviceGetCount())
    assert count >= 1
    device = ok(driver.cuDeviceGet(0))
    name = ok(driver.cuDeviceGetName(128, device)).split(b"\0")[0].decode()
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    assert ok(driver.cuDeviceGetAttribute(attribute, device)) >= 1
    context = ok(driver.cuDevicePrimaryCtxRetain(device))
    ok(driver.cuCtxSetCurrent(context))
    free, total = ok(driver.cuMemGetInfo())
    assert 0 < free <= total

    n = 1 << 16
    stream = ok(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    start = ok(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DEFAULT))
    end = ok(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DEFAULT))
    x = ok(driver.cuMemAlloc(n * 4))
    y = ok(driver.cuMemAlloc(n * 4))
    host_x = np.arange(n, dtype=np.float32)
    host_y = np.full(n, 2.0, dtype=np.float32)
    ok(driver.cuEventRecord(start, stream))
    ok(driver.cuMemcpyHtoDAsync(x, host_x.ctypes.data, n * 4, stream))
    ok(driver.cuMemcpyHtoDAsync(y, host_y.ctypes.data, n * 4, stream))

    # kernelParams the way cuda-bindings packs them: an array of addresses
    module = ok(driver.cuModuleLoad(os.environ["TEST_KERNELS"].encode()))
    saxpy = ok(driver.cuModuleGetFunction(module, b"saxpy"))
    values = [
        np.array([0.5], np.float32), np.array([int(x)], np.uint64),
        np.array([int(y)], np.uint64), np.array([n], np.uint64),
    ]  # fmt: skip
    params = np.array([v.ctypes.data for v in values], np.uint64)
    ok(driver.cuLaunchKernel(saxpy, n // 256, 1, 1, 256, 1, 1, 0, stream, params.ctypes.data, 0))
    out = np.zeros(n, np.float32)
    ok(driver.cuMemcpyDtoHAsync(out.ctypes.data, y, n * 4, stream))
    ok(driver.cuEventRecord(end, stream))
    ok(driver.cuEventSynchronize(end))
    ok(driver.cuEventQuery(end))
    assert ok(driver.cuEventElapsedTime(start, end)) >= 0
    np.testing.assert_array_equal(out, 0.5 * host_x + 2.0)

    # streams wait for each other; memset; stream-ordered allocation
    other = ok(driver.cuStreamCreate(0))
    ok(driver.cuMemsetD32Async(x, 7, n, stream))
    ok(driver.cuEventRecord(start, stream))
    ok(driver.cuStreamWaitEvent(other, start, 0))
    z = ok(driver.cuMemAllocAsync(n * 4, other))
    ok(driver.cuMemcpyDtoDAsync(z, x, n * 4, other))
    words = np.zeros(n, np.uint32)
    ok(driver.cuMemcpyDtoHAsync(words.ctypes.data, z, n * 4, other))
    ok(driver.cuMemFreeAsync(z, other))
    ok(driver.cuStreamSynchronize(other))
    assert (words == 7).all()

    # pinned memory and errors
    pinned = ok(driver.cuMemAllocHost(4096))
    ok(driver.cuMemcpyDtoH(pinned, x, 4096))
    ok(driver.cuMemFreeHost(pinned))
    (code,) = driver.cuMemFree(driver.CUdeviceptr(0x1234))
    assert code == driver.CUresult.CUDA_ERROR_INVALID_VALUE
    for p in (x, y):
        ok(driver.cuMemFree(p))
    for e in (start, end):
        ok(driver.cuEventDestroy(e))
    for s in (stream, other):
        ok(driver.cuStreamDestroy(s))
    ok(driver.cuModuleUnload(module))
    ok(driver.cuDevicePrimaryCtxRelease(device))
    print(f"PASS third_party_cuda_bindings on {name}")


main()
