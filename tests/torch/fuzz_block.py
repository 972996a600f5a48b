# SPDX-License-Identifier: Apache-2.0
"""Feeds the executor module damaged parameter blocks, over the stand-in libcuda: nothing may crash or touch other memory.

    LD_PRELOAD=<stand-in libcuda.so.1> STAND_IN_NO_STICKY=1 python fuzz_block.py EXECUTOR.so COUNT SEED

Intact blocks must give their results first. The last line printed is 'nothing broke'.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys

MAGIC = 0x31425044
TENSOR, SAME, HOST, INT, INT_LIST, TENSOR_LIST, BOOL = 2, 3, 4, 5, 10, 13, 7
NONE, SPARSE = 0, 19
FLOAT, LONG = 6, 4
WRITABLE = 8
GUARD = 0xA5


def tensor(
    address: int, sizes: list[int], strides: list[int], flags: int = 0, dtype: int = FLOAT
) -> bytes:
    head = struct.pack("<BQbBB5x", TENSOR, address, dtype, flags, len(sizes))
    return head + struct.pack(f"<{2 * len(sizes)}q", *sizes, *strides)


def block(arguments: list[bytes], outputs: list[bytes]) -> bytes:
    header = struct.pack("<IBBHIIQQII", MAGIC, 0, 0, len(arguments), len(outputs), 1, 0, 0, 0, 0)
    return header + b"".join(arguments) + b"".join(outputs)


def main() -> None:
    path, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        result = getattr(cuda, name)(*arguments)
        assert result == 0, (name, result)

    context, module = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)
    name = "/".join(path.split("/")[-2:])
    description = f"devproxy executor 1\nbuild -\nhost {name}\n"
    call("cuModuleLoadData", ctypes.byref(module), description.encode())

    def function(name: str) -> ctypes.c_void_p:
        f = ctypes.c_void_p()
        call("cuModuleGetFunction", ctypes.byref(f), module, name.encode())
        return f

    def allocate(size: int) -> int:
        p = ctypes.c_uint64()
        call("cuMemAllocAsync", ctypes.byref(p), ctypes.c_size_t(size), None)
        return int(p.value)

    before, memory, behind = allocate(512), allocate(4096), allocate(512)
    for guard in (before, behind):
        call("cuMemsetD8Async", ctypes.c_uint64(guard), GUARD, ctypes.c_size_t(512), None)

    # Freed, so no longer this process's to write, though the stand-in keeps it mapped.
    for guard in (before, behind):
        call("cuMemFreeAsync", ctypes.c_uint64(guard), None)

    a, b, c, indices = memory, memory + 1024, memory + 2048, memory + 3072
    square, strides = [4, 4], [4, 1]
    one = struct.pack("<Bq", INT, 1)
    dims = struct.pack("<BIq", INT_LIST, 1, 1)
    false = struct.pack("<BB", BOOL, 0)
    pair = (
        struct.pack("<BI", TENSOR_LIST, 2) + tensor(a, square, strides) + tensor(b, square, strides)
    )
    programs = [
        (
            function("aten::add.out"),
            block(
                [
                    tensor(a, square, strides),
                    tensor(b, square, strides),
                    one,
                    tensor(c, square, strides, WRITABLE),
                ],
                [],
            ),
        ),
        (
            function("aten::mm.out"),
            block(
                [
                    tensor(a, square, strides),
                    tensor(b, square, strides),
                    tensor(c, square, strides, WRITABLE),
                ],
                [],
            ),
        ),
        (
            function("aten::amax.out"),
            block([tensor(a, square, strides), dims, false, tensor(c, [4], [1], WRITABLE)], []),
        ),
        (
            function("aten::_to_dense"),
            block(
                [
                    struct.pack("<BbBBBB3xqq", SPARSE, 1, 0, 2, 0, 2, 4, 4)
                    + tensor(indices, [2, 4], [4, 1], dtype=LONG)
                    + tensor(a, [4], [1]),
                    struct.pack("<B", NONE),
                    struct.pack("<B", NONE),
                ],
                [tensor(c, square, strides)],
            ),
        ),
        (
            function("aten::cat"),
            block([pair, struct.pack("<Bq", INT, 0)], [tensor(c, [8, 4], strides)]),
        ),
    ]

    def launch(f: ctypes.c_void_p, data: bytes) -> None:
        buffer = ctypes.create_string_buffer(data, len(data))
        size = ctypes.c_size_t(len(data))
        extra = (ctypes.c_void_p * 5)(
            1,
            ctypes.cast(buffer, ctypes.c_void_p),
            2,
            ctypes.cast(ctypes.byref(size), ctypes.c_void_p),
            0,
        )
        call("cuLaunchKernel", f, 1, 1, 1, 1, 1, 1, 0, None, None, extra)

    ones = struct.pack("<16f", *[1.0] * 16)
    for place in (a, b):
        call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(place), ones, ctypes.c_size_t(64), None)
    places = struct.pack("<8q", 0, 1, 2, 3, 0, 1, 2, 3)
    call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(indices), places, ctypes.c_size_t(64), None)
    for (f, data), expected in zip(programs, (2.0, 4.0, 1.0, 1.0, 1.0), strict=True):
        launch(f, data)
        first = ctypes.c_float()
        call(
            "cuMemcpyDtoHAsync_v2",
            ctypes.byref(first),
            ctypes.c_uint64(c),
            ctypes.c_size_t(4),
            None,
        )
        assert first.value == expected, "an intact block was refused"
    rng = random.Random(seed)
    interesting = [0, 1, 2, 7, 8, 0x7F, 0x80, 0xFF]
    for _ in range(count):
        f, data = rng.choice(programs)
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(damaged))
            kind = rng.random()
            if kind < 0.5:
                damaged[place] = rng.choice(interesting)
            elif kind < 0.8:
                damaged[place] = rng.randrange(256)
            elif kind < 0.9:
                del damaged[place:]
                if not damaged:
                    damaged = bytearray(b"\0")
            else:
                damaged[place:place] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 9)))
        launch(f, bytes(damaged))
    for guard in (before, behind):
        held = ctypes.string_at(guard, 512)
        assert held == bytes([GUARD]) * 512, "memory outside live allocations was written"
    print("nothing broke", flush=True)


if __name__ == "__main__":
    main()
