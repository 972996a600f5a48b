# SPDX-License-Identifier: Apache-2.0
"""NCCL and the little of the CUDA driver that a test's rank needs, by ctypes. Nothing of devproxy is imported."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

cuda = ctypes.CDLL("libcuda.so.1")


class Library(ctypes.CDLL):
    """Notes in TEST_CALLED which functions a program uses."""

    def __getattr__(self, name: str) -> Any:
        if (to := os.environ.get("TEST_CALLED")) and name.startswith("nccl"):
            with Path(to).open("a") as notes:
                notes.write(f"{name}\n")
        return super().__getattr__(name)  # which the instance keeps: each function comes here once


lib = Library("libnccl.so.2")
lib.ncclGetErrorString.restype = ctypes.c_char_p
lib.ncclGetLastError.restype = ctypes.c_char_p

# nccl.h
SUCCESS, CUDA_ERROR, SYSTEM, INTERNAL, INVALID_ARGUMENT, INVALID_USAGE, REMOTE, IN_PROGRESS = range(
    8
)
(
    INT8,
    UINT8,
    INT32,
    UINT32,
    INT64,
    UINT64,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    BFLOAT16,
    FLOAT8E4M3,
    FLOAT8E5M2,
) = range(12)
SUM, PROD, MAX, MIN, AVG = range(5)

P, SIZE = ctypes.c_void_p, ctypes.c_size_t


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = [("internal", ctypes.c_char * 128)]

    def raw(self) -> bytes:
        return bytes(memoryview(self).cast("B"))


class Config(ctypes.Structure):
    """ncclConfig_t as 2.27 has it."""

    _fields_ = [("size", SIZE), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("blocking", ctypes.c_int),
                ("rest", ctypes.c_int * 24)]  # fmt: skip

    @classmethod
    def make(cls, blocking: bool) -> Config:
        config = cls(ctypes.sizeof(cls), 0xCAFEBEEF, 22703, int(blocking))
        for i in range(24):
            config.rest[i] = -(2**31)
        return config


class NcclError(Exception):
    def __init__(self, code: int, what: str) -> None:
        self.code = code
        super().__init__(
            f"{what}: {code} ({lib.ncclGetErrorString(code).decode()}): {last_error()}"
        )


def last_error() -> str:
    text: bytes = lib.ncclGetLastError(None)
    return text.decode()


def driver(name: str, *args: object) -> None:
    code = getattr(cuda, name)(*args)
    assert code == 0, f"{name}: CUresult {code}"


def nccl(name: str, *args: object) -> None:
    code = getattr(lib, name)(*args)
    if code != SUCCESS:
        raise NcclError(code, name)


class Buffer:
    """Device memory, at `skip` bytes behind an allocation's begin."""

    def __init__(self, nbytes: int, skip: int = 0) -> None:
        self.base = ctypes.c_uint64()
        driver("cuMemAlloc_v2", ctypes.byref(self.base), SIZE(max(nbytes + skip, 1)))
        self.addr, self.nbytes = self.base.value + skip, nbytes

    @property
    def ptr(self) -> P:
        return P(self.addr)

    def write(self, data: np.ndarray[Any, Any]) -> Buffer:
        raw = np.ascontiguousarray(data)
        assert raw.nbytes <= self.nbytes
        if raw.nbytes:
            driver(
                "cuMemcpyHtoD_v2",
                ctypes.c_uint64(self.addr),
                raw.ctypes.data_as(P),
                SIZE(raw.nbytes),
            )
        return self

    def read(self, dtype: Any, count: int) -> np.ndarray[Any, Any]:
        out = np.empty(count, dtype)
        if out.nbytes:
            driver(
                "cuMemcpyDtoH_v2",
                out.ctypes.data_as(P),
                ctypes.c_uint64(self.addr),
                SIZE(out.nbytes),
            )
        return out

    def free(self) -> None:
        driver("cuMemFree_v2", self.base)


def open_device(ordinal: int) -> None:
    """The primary context of the device becomes the thread's."""
    driver("cuInit", 0)
    context = P()
    driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
    driver("cuCtxSetCurrent", context)


def new_stream() -> P:
    stream = P()
    driver("cuStreamCreate", ctypes.byref(stream), 1)
    return stream


def synchronize(stream: P) -> None:
    driver("cuStreamSynchronize", stream)


class Group:
    """with Group(): ncclGroupStart, ncclGroupEnd."""

    def __enter__(self) -> None:
        nccl("ncclGroupStart")

    def __exit__(self, kind: object, *_: object) -> None:
        code = lib.ncclGroupEnd()
        if kind is None and code not in (SUCCESS, IN_PROGRESS):
            raise NcclError(code, "ncclGroupEnd")


class Comm:
    """An ncclComm_t and a stream of its own."""

    def __init__(self, handle: P, rank: int, ranks: int) -> None:
        self.handle, self.rank, self.ranks = handle, rank, ranks
        self.stream = new_stream()

    @classmethod
    def init(cls, uid: UniqueId, rank: int, ranks: int) -> Comm:
        handle = P()
        nccl("ncclCommInitRank", ctypes.byref(handle), ranks, uid, rank)
        return cls(handle, rank, ranks)

    def call(self, name: str, *args: object) -> None:
        nccl(name, *args, self.handle, self.stream)

    def wait(self) -> None:
        synchronize(self.stream)

    def split(self, color: int, key: int) -> Comm | None:
        handle = P()
        nccl("ncclCommSplit", self.handle, color, key, ctypes.byref(handle), None)
        if not handle:
            return None
        rank, ranks = ctypes.c_int(), ctypes.c_int()
        nccl("ncclCommUserRank", handle, ctypes.byref(rank))
        nccl("ncclCommCount", handle, ctypes.byref(ranks))
        return Comm(handle, rank.value, ranks.value)

    def error(self) -> int:
        code = ctypes.c_int(-1)
        nccl("ncclCommGetAsyncError", self.handle, ctypes.byref(code))
        return code.value

    def destroy(self) -> None:
        nccl("ncclCommDestroy", self.handle)


# -- ranks: a launcher that knows no torchrun ---------------------------------------------------------------------------


def unique_id(folder: Path, rank: int, name: str = "id") -> UniqueId:
    """Rank 0's id, through a file, as a launcher of one's own would pass it on."""
    uid, path = UniqueId(), folder / name
    if rank == 0:
        nccl("ncclGetUniqueId", ctypes.byref(uid))
        part = path.with_suffix(".part")
        part.write_bytes(uid.raw())
        part.rename(path)
        return uid
    while not path.exists():
        time.sleep(0.005)
    ctypes.memmove(ctypes.byref(uid), path.read_bytes(), 128)
    return uid


def places() -> list[tuple[str, int, int, int]]:
    """In a job of several trees (trees.py): each rank's job folder, number of GPUs there, GPU and tree."""
    return [tuple(one) for one in json.loads(os.environ.get("TEST_TREES", "[]"))]


def device_of(rank: int) -> int:
    """The GPU on which a rank's process starts it, by its number there."""
    return places()[rank][2] if places() else rank % int(os.environ["DEVPROXY_GPUS"])


def start(
    rank_main: Callable[[int, int, Path], None],
    rank: int,
    ranks: int,
    folder: Path,
    device: int | None = None,
) -> int:
    """A process that is that rank: its pid. Forked before CUDA is initialised, so that Python starts once."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if found := places():
            os.environ["DEVPROXY_JOB_DIR"], os.environ["DEVPROXY_GPUS"] = found[rank][0], str(found[rank][1])  # fmt: skip
        open_device(device_of(rank) if device is None else device)
        rank_main(rank, ranks, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_codes(pids: list[int]) -> list[int]:
    """As subprocess has them: -N for signal N."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def main(rank_main: Callable[[int, int, Path], None]) -> None:
    """`program FOLDER RANKS ...`: starts the ranks and waits for them."""
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    codes = exit_codes([start(rank_main, rank, ranks, folder) for rank in range(ranks)])
    assert codes == [0] * ranks, f"exit codes of the ranks: {codes}"
    print("PASS")
