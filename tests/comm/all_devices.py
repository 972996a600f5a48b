# SPDX-License-Identifier: Apache-2.0
"""One process with all GPUs: ncclCommInitAll, and operations of all ranks in groups.

devproxy-run --gpus N -- python tests/comm/all_devices.py
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import model  # type: ignore[import-not-found]  # noqa: E402
import nccl  # type: ignore[import-not-found]  # noqa: E402

F32 = model.TYPES[7]


def main() -> None:
    ranks, n = int(os.environ["DEVPROXY_GPUS"]), 30_000
    handles = (ctypes.c_void_p * ranks)()
    nccl.open_device(0)
    nccl.nccl("ncclCommInitAll", handles, ranks, None)
    comms, data, inputs = [], [], [model.data(F32, n, r, False) for r in range(ranks)]
    for rank in range(ranks):
        nccl.open_device(rank)
        comms.append(nccl.Comm(nccl.P(handles[rank]), rank, ranks))
        data.append(nccl.Buffer(n * 4).write(inputs[rank]))
    want = model.reduce(F32, model.SUM, inputs)
    for _ in range(3):
        for rank in range(ranks):
            nccl.open_device(rank)
            data[rank].write(inputs[rank])
        with nccl.Group():
            for comm, buffer in zip(comms, data, strict=True):
                comm.call(
                    "ncclAllReduce", buffer.ptr, buffer.ptr, nccl.SIZE(n), nccl.FLOAT32, nccl.SUM
                )
        for rank, comm in enumerate(comms):
            nccl.open_device(rank)
            comm.wait()
            assert model.same(F32, data[rank].read(np.float32, n), want), rank
    # Split in a group: each call alone would wait for the others.
    halves = (ctypes.c_void_p * ranks)()
    at = [ctypes.cast(ctypes.byref(halves, r * 8), nccl.P) for r in range(ranks)]
    with nccl.Group():
        for rank, comm in enumerate(comms):
            nccl.nccl("ncclCommSplit", comm.handle, 0, -rank, at[rank], None)
    for rank in range(ranks):
        number = ctypes.c_int()
        nccl.nccl("ncclCommUserRank", nccl.P(halves[rank]), ctypes.byref(number))
        assert number.value == ranks - 1 - rank
    # Each rank's init in one group, as a program of one thread for many GPUs does.
    uid, grouped = nccl.UniqueId(), (ctypes.c_void_p * ranks)()
    nccl.nccl("ncclGetUniqueId", ctypes.byref(uid))
    with nccl.Group():
        for rank in range(ranks):
            nccl.open_device(rank)
            nccl.nccl(
                "ncclCommInitRank",
                ctypes.cast(ctypes.byref(grouped, rank * 8), nccl.P),
                ranks,
                uid,
                rank,
            )
    for rank in range(ranks):
        nccl.open_device(rank)
        data[rank].write(inputs[rank])
    with nccl.Group():
        for rank, buffer in enumerate(data):
            nccl.nccl("ncclAllReduce", buffer.ptr, buffer.ptr, nccl.SIZE(n), nccl.FLOAT32, nccl.SUM,
                      nccl.P(grouped[rank]), comms[rank].stream)  # fmt: skip
    for rank, comm in enumerate(comms):
        nccl.open_device(rank)
        comm.wait()
        assert model.same(F32, data[rank].read(np.float32, n), want), rank
        nccl.nccl("ncclCommDestroy", nccl.P(grouped[rank]))
    # A stream of another device is refused.
    wrong = nccl.lib.ncclAllReduce(
        data[0].ptr,
        data[0].ptr,
        nccl.SIZE(n),
        nccl.FLOAT32,
        nccl.SUM,
        comms[0].handle,
        comms[1].stream,
    )
    assert wrong == nccl.INVALID_ARGUMENT, wrong
    assert "device 1" in nccl.last_error(), nccl.last_error()
    for rank, comm in enumerate(comms):
        nccl.open_device(rank)
        nccl.nccl("ncclCommDestroy", nccl.P(halves[rank]))
        comm.destroy()
    print("PASS")


main()
