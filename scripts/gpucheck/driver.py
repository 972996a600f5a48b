# SPDX-License-Identifier: Apache-2.0
"""The genuine driver by ctypes, and how long its calls take."""

from __future__ import annotations

import ctypes
import mmap
import statistics
import time
from collections.abc import Callable
from typing import Any

from gpucheck.ends import Failed, Refused

U32 = ctypes.c_uint32
U64 = ctypes.c_uint64
INT = ctypes.c_int
SIZE = ctypes.c_size_t
PTR = ctypes.c_void_p


class Driver:
    """The genuine driver by ctypes: no numbers without a width, every result looked at."""

    def __init__(self, path: str) -> None:
        if not path:
            raise Refused(
                "no libcuda.so.1 here: the NVIDIA driver's library is in none of its places"
            )
        try:
            self.library = ctypes.CDLL(path)
        except OSError as error:
            raise Refused(f"the driver {path} cannot be opened: {error}") from None

    def has(self, name: str) -> bool:
        return hasattr(self.library, name)

    def result(self, name: str, *arguments: Any) -> int:
        try:
            function = getattr(self.library, name)
        except AttributeError:
            raise Refused(f"the driver has no {name}") from None
        return int(function(*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        if code := self.result(name, *arguments):
            kind = Refused if code == 801 else Failed  # CUDA_ERROR_NOT_SUPPORTED
            raise kind(f"{name}: {self.text(code)}")

    def text(self, code: int) -> str:
        name = ctypes.c_char_p()
        self.library.cuGetErrorName(INT(code), ctypes.byref(name))
        return f"{code} {name.value.decode() if name.value else '(no name)'}"


class Location(ctypes.Structure):
    _fields_ = [("type", INT), ("id", INT)]


class AllocationFlags(ctypes.Structure):
    _fields_ = [("compression", ctypes.c_ubyte), ("rdma", ctypes.c_ubyte), ("usage", ctypes.c_ushort), ("reserved", ctypes.c_ubyte * 4)]  # fmt: skip


class AllocationProp(ctypes.Structure):
    _fields_ = [("type", INT), ("handle_types", INT), ("location", Location), ("win32", PTR), ("flags", AllocationFlags)]  # fmt: skip


class AccessDesc(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", INT)]


class Gpu(Driver):
    """A context on device 0, made as hal/cuda makes it, and the calls that the stages share."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.call("cuInit", U32(0))
        self.device, self.context = INT(), PTR()
        self.call("cuDeviceGet", ctypes.byref(self.device), INT(0))
        # CU_CTX_SCHED_BLOCKING_SYNC | CU_CTX_MAP_HOST
        self.call("cuCtxCreate_v2", ctypes.byref(self.context), U32(4 | 8), self.device)
        self.prop = AllocationProp(type=1, location=Location(1, self.device.value))

    def granularity(self) -> int:
        found = SIZE()
        self.call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(self.prop), INT(0))  # fmt: skip
        return found.value

    def reserve(self, size: int, at: int = 0) -> tuple[int, int]:
        """Result and address."""
        got = U64()
        code = self.result("cuMemAddressReserve", ctypes.byref(got), SIZE(size), SIZE(0), U64(at), U64(0))  # fmt: skip
        return code, got.value

    def unreserve(self, at: int, size: int) -> None:
        self.call("cuMemAddressFree", U64(at), SIZE(size))

    def create(self, size: int) -> int:
        handle = U64()
        self.call("cuMemCreate", ctypes.byref(handle), SIZE(size), ctypes.byref(self.prop), U64(0))
        return handle.value

    def map(self, at: int, size: int, handle: int) -> None:
        self.call("cuMemMap", U64(at), SIZE(size), SIZE(0), U64(handle), U64(0))

    def allow(self, at: int, size: int) -> None:
        access = AccessDesc(Location(1, self.device.value), 3)
        self.call("cuMemSetAccess", U64(at), SIZE(size), ctypes.byref(access), SIZE(1))

    def unmap(self, at: int, size: int) -> None:
        self.call("cuMemUnmap", U64(at), SIZE(size))

    def release(self, handle: int) -> None:
        self.call("cuMemRelease", U64(handle))

    def memory(self, size: int, at: int = 0) -> int:
        """Mapped memory of its own reservation; stays until the process ends."""
        code, base = self.reserve(size, at)
        if code:
            raise Failed(f"cuMemAddressReserve of {size >> 20} MiB: {self.text(code)}")
        self.map(base, size, self.create(size))
        self.allow(base, size)
        return base

    def stream(self) -> PTR:
        made = PTR()
        self.call("cuStreamCreateWithPriority", ctypes.byref(made), U32(1), INT(0))
        return made

    def wait(self, stream: PTR) -> None:
        self.call("cuStreamSynchronize", stream)

    def pinned(self, size: int, flags: int = 0) -> int:
        at = PTR()
        self.call("cuMemHostAlloc", ctypes.byref(at), SIZE(size), U32(flags))
        return at.value or 0

    def load(self, image: bytes) -> PTR:
        module = PTR()
        # PTX ends in a NUL; behind a cubin it does no harm
        code = self.result("cuModuleLoadDataEx", ctypes.byref(module), image + b"\0", U32(0), None, None)  # fmt: skip
        if code:
            raise Failed(f"cuModuleLoadDataEx of {len(image)} bytes: {self.text(code)}")
        return module

    def function(self, module: PTR, name: str) -> PTR:
        found = PTR()
        self.call("cuModuleGetFunction", ctypes.byref(found), module, name.encode())
        return found

    def global_of(self, module: PTR, name: str) -> tuple[int, int]:
        """Address and size."""
        at, size = U64(), SIZE()
        self.call("cuModuleGetGlobal_v2", ctypes.byref(at), ctypes.byref(size), module, name.encode())  # fmt: skip
        return at.value, size.value

    def launch(self, function: PTR, stream: PTR | None, *values: Any, grid: int = 1, block: int = 1) -> None:  # fmt: skip
        pointers = (PTR * max(1, len(values)))(*[ctypes.addressof(v) for v in values])
        self.call(
            "cuLaunchKernel", function, U32(grid), U32(1), U32(1), U32(block), U32(1), U32(1), U32(0),
            stream, pointers, None,
        )  # fmt: skip

    def to_host(self, to: int, at: int, size: int, stream: PTR) -> None:
        self.call("cuMemcpyDtoHAsync_v2", PTR(to), U64(at), SIZE(size), stream)

    def to_device(self, at: int, source: int, size: int, stream: PTR) -> None:
        self.call("cuMemcpyHtoDAsync_v2", U64(at), PTR(source), SIZE(size), stream)

    def words(self, at: int, count: int) -> list[int]:
        """What device memory holds, by way of page-locked memory."""
        stream, host = self.stream(), self.pinned(count * 4)
        self.to_host(host, at, count * 4, stream)
        self.wait(stream)
        return list((U32 * count).from_address(host))


def in_us(work: Callable[[], Any], times: int = 20) -> dict[str, float]:
    took = []
    for _ in range(times):
        begin = time.perf_counter_ns()
        work()
        took.append((time.perf_counter_ns() - begin) / 1e3)
    return spread(took)


def spread(took: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(took), 2),
        "least": round(min(took), 2),
        "most": round(max(took), 2),
    }


class Laps:
    """Times of things that are done one behind the other, several times over."""

    def __init__(self) -> None:
        self.at = 0
        self.took: dict[str, list[float]] = {}

    def begin(self) -> None:
        self.at = time.perf_counter_ns()

    def end(self, what: str) -> None:
        self.took.setdefault(what, []).append((time.perf_counter_ns() - self.at) / 1e3)
        self.begin()

    def medians_us(self) -> dict[str, float]:
        return {what: round(statistics.median(took), 1) for what, took in self.took.items()}


def map_at(address: int, fd: int, size: int) -> int:
    """A shared mapping at this very address; stays until the process ends. 0 where something else is there."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = U64
    libc.mmap.argtypes = [U64, SIZE, INT, INT, INT, ctypes.c_long]
    got = int(libc.mmap(address, size, 3, 0x100001, fd, 0))  # MAP_SHARED | MAP_FIXED_NOREPLACE
    return got if got == address else 0


def host_map(fd: int, size: int) -> tuple[int, mmap.mmap]:
    """A shared mapping and its address."""
    view = mmap.mmap(fd, size)
    return ctypes.addressof((ctypes.c_char * size).from_buffer(view)), view
