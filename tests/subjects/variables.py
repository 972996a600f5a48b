# SPDX-License-Identifier: Apache-2.0
"""Variables of a module: one that only kernels read and write, one that the host fills by its address. Only with a driver.

--ask 1: the host asks for the address of `table`, keeps it, and writes there in each step.
"""

import ctypes
from pathlib import Path

from common import Digest, Steps, check, options


def main() -> None:
    o = options(__doc__, ask=0)
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        result = getattr(cuda, name)(*arguments)
        check(result == 0, f"{name}: CUresult {result}")

    device, context, module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    bump, peek = ctypes.c_void_p(), ctypes.c_void_p()
    memory, table, size = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    image = Path(__file__).with_suffix(".ptx").read_bytes()
    call("cuModuleLoadData", ctypes.byref(module), image)
    call("cuModuleGetFunction", ctypes.byref(bump), module, b"bump")
    call("cuModuleGetFunction", ctypes.byref(peek), module, b"peek")
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(4096))
    if o.ask:
        call("cuModuleGetGlobal_v2", ctypes.byref(table), ctypes.byref(size), module, b"table")
        check(size.value == 4096, f"table has {size.value} bytes")
    one = (ctypes.c_uint(1),) * 6
    parameters = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(memory), ctypes.c_void_p))
    nothing = ctypes.c_void_p()
    zero = ctypes.c_uint(0)
    digest = Digest()
    for step in (steps := Steps(o)):
        call("cuLaunchKernel", bump, *one, zero, nothing, nothing, nothing)
        call("cuLaunchKernel", peek, *one, zero, nothing, parameters, nothing)
        back = ctypes.c_uint32()
        call("cuMemcpyDtoH_v2", ctypes.byref(back), memory, ctypes.c_size_t(4))
        check(back.value == 5 + step, f"counter is {back.value} after {step} steps")
        if o.ask:
            word = ctypes.c_uint64(table.value + step % 1024 * 4)
            call("cuMemsetD32_v2", word, ctypes.c_uint32(step), ctypes.c_size_t(1))
            words = (ctypes.c_uint32 * 1024)()
            call("cuMemcpyDtoH_v2", words, table, ctypes.c_size_t(4096))
            check(all(words[n % 1024] == n for n in range(1, step + 1)), "table lost a word")
        digest.add("counter", back.value)
        steps.say(f"counter {back.value}")
    digest.finish()


if __name__ == "__main__":
    main()
