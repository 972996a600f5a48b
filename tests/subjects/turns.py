# SPDX-License-Identifier: Apache-2.0
"""A process for each GPU, which launches kernels of turns.c, some in a row, and waits for them, many times over.

turns.py MODULE FOLDER GPUS    FOLDER/rounds: how many times that may have begun, -1: end; FOLDER/K: how many times process K
has ended it; FOLDER/lock: what the kernels lock.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

ROUNDS, KERNELS, MICROSECONDS = 40, 4, 1000
cuda = ctypes.CDLL("libcuda.so.1")


class Alone(ctypes.Structure):
    _fields_ = [("path", ctypes.c_char * 120), ("us", ctypes.c_uint64)]


def call(name: str, *args: object) -> None:
    code = getattr(cuda, name)(*args)
    assert code == 0, f"{name}: CUresult {code}"


def rank(number: int, image: bytes, folder: Path) -> None:
    context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
    call("cuCtxSetCurrent", context)
    call("cuModuleLoadData", ctypes.byref(module), image)
    call("cuModuleGetFunction", ctypes.byref(function), module, b"alone")
    given = Alone(os.fsencode(folder / "lock"), MICROSECONDS)
    params = (ctypes.c_void_p * 1)(ctypes.addressof(given))
    done = 0
    while True:
        allowed = int((folder / "rounds").read_text())
        if allowed < 0:
            return
        if done >= allowed:
            time.sleep(0.005)
            continue
        for _ in range(ROUNDS):
            for _ in range(KERNELS):
                call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, None, params, None)
            call("cuCtxSynchronize")
        done += 1
        note = folder / f"{number}.part"
        note.write_text(str(done))
        note.rename(folder / str(number))


def main() -> None:
    image, folder, gpus = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2]), int(sys.argv[3])
    pids = []
    for number in range(gpus):
        pids.append(os.fork())
        if pids[-1] == 0:
            rank(number, image, folder)
            os._exit(0)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * gpus


if __name__ == "__main__":
    main()
