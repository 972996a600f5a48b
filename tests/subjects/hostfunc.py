# SPDX-License-Identifier: Apache-2.0
"""Host functions that need the GIL: cuLaunchHostFunc with a Python function, many outstanding at a time. Only with a driver."""

import ctypes
import time

from common import Digest, Steps, check, options


def main() -> None:
    o = options(__doc__, each=5, callback_ms=2)
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
    memory, words = ctypes.c_uint64(), 1024
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(words * 4))
    host = (ctypes.c_uint32 * words)()
    seen: list[int] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def callback(argument: int | None) -> None:
        time.sleep(
            o.callback_ms / 1e3
        )  # gives the GIL away and takes it back, in the middle of the callback
        seen.append(argument or 0)

    number = 0
    steps = Steps(o)
    for step in steps:
        for _ in range(o.each):
            number += 1
            call(
                "cuMemsetD32Async", memory, ctypes.c_uint32(number), ctypes.c_size_t(words), stream
            )
            call("cuLaunchHostFunc", stream, callback, ctypes.c_void_p(number))
        # The main thread keeps the GIL busy while the callbacks want it.
        busy = time.monotonic() + 0.005
        while time.monotonic() < busy:
            pass
        call("cuMemcpyDtoHAsync_v2", host, memory, ctypes.c_size_t(words * 4), stream)
        call("cuStreamSynchronize", stream)
        check(seen == list(range(1, number + 1)), f"callbacks {seen[-10:]} after {number} launches")
        check(set(host) == {number}, f"memory holds {host[0]}, not {number}")
        steps.say(f"callbacks {len(seen)}")
    call("cuMemFree_v2", memory)
    digest = Digest()
    digest.add("seen", seen)
    digest.finish()


if __name__ == "__main__":
    main()
