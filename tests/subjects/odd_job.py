# SPDX-License-Identifier: Apache-2.0
"""A job that is put together from traits (odd/): --traits a,b,c --seed N.

Beside the traits it has some device memory, as cheap.py has.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import tempfile
import traceback

from tests.subjects.odd import TRAITS
from tests.subjects.odd.gpu import cu
from tests.subjects.odd.shared import HELD, HOME, Look, here, same


class Gpu:
    """Memory with known contents, as in cheap.py."""

    def __init__(self) -> None:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.stream, self.memory = ctypes.c_void_p(), ctypes.c_uint64()
        cu("cuInit", 0)
        cu("cuDeviceGet", ctypes.byref(device), 0)
        cu("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        cu("cuCtxSetCurrent", context)
        cu("cuStreamCreate", ctypes.byref(self.stream), 1)
        self.held = [0] * 16
        self.part = 1 << 14
        words = self.part * len(self.held)
        cu("cuMemAlloc_v2", ctypes.byref(self.memory), ctypes.c_size_t(words * 4))
        cu("cuMemsetD32Async", self.memory, ctypes.c_uint32(0), ctypes.c_size_t(words), self.stream)
        self.back = (ctypes.c_uint32 * words)()

    def look(self, step: int) -> int:
        which, value = step * 7 % len(self.held), step * 2654435761 % (1 << 32)
        self.held[which] = value
        at = ctypes.c_uint64(self.memory.value + which * self.part * 4)
        cu("cuMemsetD32Async", at, ctypes.c_uint32(value), ctypes.c_size_t(self.part), self.stream)
        cu("cuMemcpyDtoHAsync_v2", self.back, self.memory, ctypes.c_size_t(ctypes.sizeof(self.back)), self.stream)  # fmt: skip
        cu("cuStreamSynchronize", self.stream)
        for number, wanted in enumerate(self.held):
            found = self.back[number * self.part : (number + 1) * self.part : self.part // 2]
            same(f"part {number} of the device's memory", found, [wanted] * 2)
        return value


def main() -> None:
    from common import Digest, Steps, check, options  # type: ignore[import-not-found]

    o = options(__doc__ or "", traits="", seed=1)
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    dice = random.Random(o.seed)
    names = [name for name in o.traits.split(",") if name]
    dice.shuffle(names)
    names.sort(key=lambda name: (TRAITS[name].late, bool(TRAITS[name].must)))
    tempfile.tempdir = os.fsdecode(HOME)
    looks: dict[str, Look] = {}
    name, digest, steps = "set-up", Digest(), Steps(o)
    try:
        gpu = Gpu() if dice.random() < 0.5 or any(TRAITS[name].gpu for name in names) else None
        for name in names:
            looks[name] = TRAITS[name].make(random.Random(f"{o.seed} {name}"))
            next(looks[name])
        gpu = gpu or Gpu()
        for step in steps:
            if os.path.exists(here("let-go")):
                for name in [name for name in looks if TRAITS[name].must]:
                    looks.pop(name).close()
            for name, look in looks.items():
                if (value := look.send(step)) is not None:
                    digest.add(name, value)
            name = "GPU"
            digest.add(name, gpu.look(step))
            with open(here("cheap.txt"), "a") as file:
                file.write(f"{step}\n")
            steps.say(f"after {len(looks)} looks")
        name = "end"
        for name, look in looks.items():
            look.close()
    except BaseException as error:
        traceback.print_exc()
        check(False, f"{name}: {type(error).__name__}: {error}")
    digest.finish()
    os._exit(0)  # threads of traits wait for ever


if __name__ == "__main__":
    main()
