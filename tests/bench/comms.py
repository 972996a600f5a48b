"""Collectives between processes: NCCL over software GPUs beside gloo on the CPU, in turn: the section `comms` of the table."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tests.bench.table import Row  # noqa: E402  a rank is a script that knows no package

RANKS = 4
SIZES = {"1 KB": (1 << 10, 300), "64 MB": (64 << 20, 6)}  # of a turn: bytes, times
COMMAND = [
    sys.executable,
    "-m",
    "devproxy.cli.run",
    "--device",
    "soft",
    "--gpus",
    str(RANKS),
    "--gpu-memory",
    "512MiB",
]


def gloo_rank(rank: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    for name, (nbytes, times) in SIZES.items():
        data = torch.zeros(nbytes // 4)
        took = []
        for _ in range(times + 2):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(data)
            took.append(time.perf_counter() - begin)
        if rank == 0:
            print(json.dumps({name: statistics.median(took[2:])}), flush=True)
    dist.destroy_process_group()


def nccl_rank(rank: int, ranks: int, folder: Path) -> None:
    import nccl  # type: ignore[import-not-found]
    import numpy as np

    comm = nccl.Comm.init(nccl.unique_id(folder, rank), rank, ranks)
    flag = nccl.Buffer(4)
    for name, (nbytes, times) in SIZES.items():
        data = nccl.Buffer(nbytes).write(np.zeros(nbytes // 4, np.float32))
        took = []
        for _ in range(times + 2):
            comm.call("ncclAllReduce", flag.ptr, flag.ptr, nccl.SIZE(1), nccl.FLOAT32, nccl.SUM)
            comm.wait()
            begin = time.perf_counter()
            comm.call(
                "ncclAllReduce", data.ptr, data.ptr, nccl.SIZE(nbytes // 4), nccl.FLOAT32, nccl.SUM
            )
            comm.wait()
            took.append(time.perf_counter() - begin)
        if rank == 0:
            print(json.dumps({name: statistics.median(took[2:])}), flush=True)
    comm.destroy()


def seconds(command: list[str]) -> dict[str, float]:
    """Of each size: a rank's median."""
    with tempfile.TemporaryDirectory(prefix="devproxy-bench-", dir="/dev/shm") as folder:
        done = subprocess.run(
            [*command, folder, str(RANKS)], capture_output=True, text=True, timeout=300,
            env=os.environ | {"DEVPROXY_SHM_DIR": folder, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    if done.returncode:
        sys.exit(f"bench: {' '.join(command)} failed:\n{done.stderr}")
    result: dict[str, float] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            result |= json.loads(line)
    return result


def all_reduces(turns: int) -> dict[str, tuple[float, float]]:
    """Of each size: seconds of NCCL over software GPUs, and of gloo. In turn, the median of all turns."""
    own = [sys.executable, __file__]
    runs = [
        (seconds([*COMMAND, "--", *own, "nccl"]), seconds([*own, "gloo"])) for _ in range(turns)
    ]
    middle = statistics.median
    return {
        name: (middle(a[name] for a, _ in runs), middle(b[name] for _, b in runs)) for name in SIZES
    }


def comms(turns: int) -> list[Row]:
    rows = []
    for name, (ours, gloo) in all_reduces(turns).items():
        # At least 1.2 times as fast where the data counts; else not later.
        target = 1 / 1.2 if SIZES[name][0] > 1 << 20 else 1.0
        what, limit = (
            f"all_reduce of {name}, {RANKS} ranks",
            "gloo between the same processes on the CPU",
        )
        rows.append(Row(what, ours * 1e3, "ms", gloo * 1e3, limit, ours / gloo, target))
    return rows


def ranks(backend: str) -> None:
    """`comms.py nccl|gloo FOLDER RANKS`: the ranks, as children."""
    del sys.argv[1]
    if backend == "nccl":
        sys.path.insert(0, str(ROOT / "tests" / "comm"))
        import nccl

        return nccl.main(nccl_rank)
    folder = Path(sys.argv[1])
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            gloo_rank(rank, folder)
            os._exit(0)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * RANKS
    return None


if __name__ == "__main__":
    ranks(sys.argv[1])
