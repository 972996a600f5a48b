# SPDX-License-Identifier: Apache-2.0
"""The driver API from Python through ctypes and cuGetProcAddress, as numba-cuda and Triton reach it.

Nothing of devproxy is imported: `ctypes.CDLL("libcuda.so.1")` finds whatever driver the process has. Prints PASS.
"""

from __future__ import annotations

import array
import ctypes
import os
import threading

cuda = ctypes.CDLL("libcuda.so.1")
SUCCESS, INVALID_VALUE, NOT_READY, NOT_FOUND = 0, 1, 600, 500


def check(result: int, expected: int = SUCCESS) -> None:
    """Compares a CUresult; says its name."""
    if result != expected:
        name = ctypes.c_char_p()
        cuda.cuGetErrorName(result, ctypes.byref(name))
        raise AssertionError(f"CUresult {result} ({name.value!r}), expected {expected}")


def entry(name: str, version: int = 12000, flags: int = 0) -> ctypes._CFuncPtr:
    """Resolves a symbol by the driver's own look-up."""
    address, status = ctypes.c_void_p(), ctypes.c_int(-1)
    args = (ctypes.byref(address), version, ctypes.c_uint64(flags), ctypes.byref(status))
    check(cuda.cuGetProcAddress_v2(name.encode(), *args))
    assert address.value
    assert status.value == 0
    return ctypes.CFUNCTYPE(ctypes.c_int)(address.value)


def unknown_symbols_are_not_found() -> None:
    """An unknown name gives CUDA_ERROR_NOT_FOUND, a null address and its status."""
    address, status = ctypes.c_void_p(1), ctypes.c_int(-1)
    args = (ctypes.byref(address), 12000, ctypes.c_uint64(0), ctypes.byref(status))
    check(cuda.cuGetProcAddress_v2(b"cuNoSuchFunction", *args), NOT_FOUND)
    assert address.value is None
    assert status.value == 1


def launch(function: ctypes.c_void_p, stream: ctypes.c_void_p, *params: ctypes._SimpleCData) -> int:
    """Launches one thread with kernelParams."""
    pointers = (ctypes.c_void_p * len(params))(*[ctypes.addressof(p) for p in params])
    return int(cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, pointers, None))


def main() -> None:
    """Alloc, copy, launch, callback, per-thread stream, threads."""
    for name in (
        "cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuMemAlloc", "cuMemcpyHtoDAsync",
        "cuLaunchKernel", "cuStreamSynchronize", "cuEventRecord", "cuModuleLoadData",
    ):  # fmt: skip
        entry(name)
    per_thread_synchronize = entry(
        "cuStreamSynchronize", 12000, 2
    )  # CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM
    unknown_symbols_are_not_found()

    check(entry("cuInit")(0))
    device, context, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
    check(cuda.cuDeviceGetCount(ctypes.byref(count)))
    assert count.value >= 1
    check(cuda.cuDeviceGet(ctypes.byref(device), 0))
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    check(cuda.cuCtxSetCurrent(context))

    with open(os.environ["TEST_KERNELS"], "rb") as f:
        image = f.read()
    module, fill, affine = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    check(cuda.cuModuleLoadData(ctypes.byref(module), image))
    check(cuda.cuModuleGetFunction(ctypes.byref(fill), module, b"fill"))
    check(cuda.cuModuleGetFunction(ctypes.byref(affine), module, b"affine"))
    check(cuda.cuModuleGetFunction(ctypes.byref(ctypes.c_void_p()), module, b"none"), NOT_FOUND)

    n = 10_000
    memory, stream = ctypes.c_uint64(), ctypes.c_void_p()
    check(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(n * 4)))
    check(cuda.cuStreamCreate(ctypes.byref(stream), 1))
    host = array.array("I", range(n))
    address, _ = host.buffer_info()
    check(
        cuda.cuMemcpyHtoDAsync_v2(memory, ctypes.c_void_p(address), ctypes.c_size_t(n * 4), stream)
    )
    check(
        launch(affine, stream, memory, ctypes.c_uint32(3), ctypes.c_uint32(1), ctypes.c_uint64(n))
    )
    check(
        cuda.cuMemcpyDtoHAsync_v2(ctypes.c_void_p(address), memory, ctypes.c_size_t(n * 4), stream)
    )
    check(cuda.cuStreamSynchronize(stream))
    assert list(host) == [3 * i + 1 for i in range(n)]

    # a Python function as host function: runs on a thread of the driver, with the GIL taken by ctypes
    calls: list[int] = []
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda arg: calls.append(arg or 0))
    for i in range(1, 6):
        check(cuda.cuLaunchHostFunc(stream, callback, ctypes.c_void_p(i)))
    check(cuda.cuStreamSynchronize(stream))
    assert calls == [1, 2, 3, 4, 5], calls

    # the per-thread default stream, and threads
    failures: list[BaseException] = []

    def thread(number: int) -> None:
        try:
            check(cuda.cuCtxSetCurrent(context))
            mine = ctypes.c_uint64()
            check(cuda.cuMemAlloc_v2(ctypes.byref(mine), ctypes.c_size_t(64)))
            values = (ctypes.c_uint32 * 16)()
            per_thread = ctypes.c_void_p(2)
            for i in range(50):
                check(
                    launch(fill, per_thread, mine, ctypes.c_uint32(number + i), ctypes.c_uint64(16))
                )
            check(cuda.cuMemcpyDtoHAsync_v2(values, mine, ctypes.c_size_t(64), per_thread))
            check(per_thread_synchronize(None))
            assert list(values) == [number + 49] * 16
            check(cuda.cuMemFree_v2(mine))
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=thread, args=(i * 1000,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures
    check(cuda.cuMemFree_v2(memory))
    check(cuda.cuMemFree_v2(memory), INVALID_VALUE)
    print("PASS ctypes_driver")


main()
