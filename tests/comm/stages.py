# SPDX-License-Identifier: Apache-2.0
"""Ranks that communicate when the test says so, which meanwhile moves their servers (test_trees.py).

    python tests/comm/stages.py FOLDER RANKS STAGES

Each rank makes FOLDER/done<stage>-<rank> after a stage, and begins the next when FOLDER/go<stage> exists; rank 0 begins
each at once.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import nccl  # type: ignore[import-not-found]  # noqa: E402
from nccl import FLOAT32, SIZE, SUM, Buffer, Comm, Group  # type: ignore[import-not-found]  # noqa: E402

COUNT = 300_000


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.002)


def finish(comm: Comm) -> None:
    """What is on its stream; the error, where another rank is lost."""
    while nccl.cuda.cuStreamQuery(comm.stream) == 600:
        assert comm.error() == nccl.SUCCESS, nccl.last_error()
        time.sleep(0.0005)


def rank_main(rank: int, ranks: int, folder: Path) -> None:
    comm = Comm.init(nccl.unique_id(folder, rank), rank, ranks)
    data, around = Buffer(COUNT * 4), Buffer(COUNT * 4)
    for stage in range(int(sys.argv[3])):
        if rank:
            wait_for(folder / f"go{stage}")
        data.write(np.full(COUNT, 10**rank + stage, np.float32))
        comm.call("ncclAllReduce", data.ptr, data.ptr, SIZE(COUNT), FLOAT32, SUM)
        finish(comm)
        want = sum(10**r + stage for r in range(ranks))
        assert (data.read(np.float32, COUNT) == want).all(), (rank, stage)
        data.write(np.full(COUNT, 100 * stage + rank, np.float32))
        with Group():
            nccl.nccl("ncclSend", data.ptr, SIZE(COUNT), FLOAT32, (rank + 1) % ranks, comm.handle, comm.stream)  # fmt: skip
            nccl.nccl("ncclRecv", around.ptr, SIZE(COUNT), FLOAT32, (rank - 1) % ranks, comm.handle, comm.stream)  # fmt: skip
        finish(comm)
        before = (rank - 1) % ranks
        assert (around.read(np.float32, COUNT) == 100 * stage + before).all(), (rank, stage)
        (folder / f"done{stage}-{rank}").touch()
        part = comm.split(rank % 2, rank)
        assert part is not None
        part.destroy()
    comm.destroy()


if __name__ == "__main__":
    nccl.main(rank_main)
