# SPDX-License-Identifier: Apache-2.0
"""A few MB of device memory with known contents, changed and checked in each step, and a file. No torch: it starts in 50 ms.

Only with a driver. It appends each step's number to cheap.txt in its folder, and ends early where that has a file end-now.
"""

import ctypes
import os

from common import Digest, Steps, check, options


def main() -> None:
    o = options(__doc__, mib=2)
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        result = getattr(cuda, name)(*arguments)
        check(result == 0, f"{name}: CUresult {result}")

    device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuStreamCreate", ctypes.byref(stream), 1)
    words = o.mib << 18
    parts = 16
    part = words // parts
    memory = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(words * 4))
    call("cuMemsetD32Async", memory, ctypes.c_uint32(0), ctypes.c_size_t(words), stream)
    held = [0] * parts  # what each part of the memory must hold
    back = (ctypes.c_uint32 * words)()
    state = 12345
    digest = Digest()
    steps = Steps(o)
    for step in steps:
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        which = state % parts
        held[which] = state
        begin = ctypes.c_uint64(memory.value + which * part * 4)
        call("cuMemsetD32Async", begin, ctypes.c_uint32(state), ctypes.c_size_t(part), stream)
        call("cuMemcpyDtoHAsync_v2", back, memory, ctypes.c_size_t(words * 4), stream)
        call("cuStreamSynchronize", stream)
        for number, value in enumerate(held):
            at = number * part
            check(
                back[at] == value
                and back[at + part - 1] == value
                and back[at + part // 2] == value,
                f"part {number} holds {back[at]}, not {value}",
            )
        digest.add("state", state)
        with open("cheap.txt", "a") as file:
            file.write(f"{step}\n")
        steps.say(f"state {state}")
        if os.path.exists("end-now"):
            break
    digest.add("memory", bytes(back))
    call("cuMemFree_v2", memory)
    digest.finish()


if __name__ == "__main__":
    main()
