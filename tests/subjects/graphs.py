# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: captures that stay open over steps, executable graphs that are launched and updated in every step. Only
with a driver; --kernels names the module of tests/subjects/driver/kernels.c, without it host functions do the arithmetic."""

import ctypes
import time

from common import Digest, Steps, check, options

WORDS = 1024
BYTES = ctypes.c_size_t(WORDS * 4)


def main() -> None:
    o = options(__doc__, kernels="")
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        result = getattr(cuda, name)(*arguments)
        check(result == 0, f"{name}: CUresult {result}")

    device, context, stream, module, affine = ctypes.c_int(), *(ctypes.c_void_p() for _ in range(4))
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuStreamCreate", ctypes.byref(stream), 1)
    if o.kernels:
        call("cuModuleLoad", ctypes.byref(module), o.kernels.encode())
        call("cuModuleGetFunction", ctypes.byref(affine), module, b"affine")
    memory = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(memory), BYTES)
    call("cuMemsetD32_v2", memory, ctypes.c_uint32(1), ctypes.c_size_t(WORDS))
    call("cuCtxSynchronize")
    out = (ctypes.c_uint32 * WORDS)()  # pageable
    seen: list[int] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def callback(argument: int | None) -> None:
        time.sleep(0.001)  # gives the GIL away
        seen.append(argument or 0)

    into = (ctypes.c_uint32 * WORDS)(*([1] * WORDS))
    sums: list[tuple[int, int]] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def reckon(number: int | None) -> None:
        factor, add = sums[number or 0]
        into[:] = [(into[0] * factor + add) & 0xFFFFFFFF] * WORDS

    def launch(factor: int, add: int) -> None:
        if not o.kernels:
            sums.append((factor, add))
            call("cuLaunchHostFunc", stream, reckon, ctypes.c_void_p(len(sums) - 1))
            call("cuMemcpyHtoDAsync_v2", memory, into, BYTES, stream)
            return
        values = (
            memory, ctypes.c_uint32(factor), ctypes.c_uint32(add), ctypes.c_uint64(WORDS)
        )  # fmt: skip
        params = (ctypes.c_void_p * 4)(*(ctypes.addressof(v) for v in values))
        call("cuLaunchKernel", affine, 1, 1, 1, 1, 1, 1, 0, stream, params, None)

    other = ctypes.c_void_p()
    call("cuStreamCreate", ctypes.byref(other), 1)
    executables: list[ctypes.c_void_p] = []
    digest = Digest()
    steps = Steps(o)
    for step in steps:
        # A capture goes on over three steps: it is open in two of three checkpoints.
        if step % 3 == 1:
            call("cuStreamBeginCapture_v2", stream, 2)
            launch(3, step)
        elif step % 3 == 2:
            launch(1, 7)
            call("cuLaunchHostFunc", stream, callback, ctypes.c_void_p(step))
        else:
            call("cuMemcpyDtoHAsync_v2", out, memory, BYTES, stream)
            graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
            call("cuStreamEndCapture", stream, ctypes.byref(graph))
            call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_uint64(0))
            call("cuGraphDestroy", graph)
            executables.append(executable)
            if len(executables) > 3:
                call("cuGraphExecDestroy", executables.pop(0))
        for executable in executables:
            call("cuGraphLaunch", executable, other)
        call("cuStreamSynchronize", other)
        digest.add("out", list(out[:4]))
        steps.say(f"graphs {len(executables)} word {out[0]}")
    check(len(set(out)) == 1, "the words differ")
    digest.add("seen", seen)
    digest.finish()


if __name__ == "__main__":
    main()
