# SPDX-License-Identifier: Apache-2.0
"""Collectives between processes: NCCL over software GPUs beside gloo on the CPU, in turn: the section `comms` of the table."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tests.bench.table import Row, interval  # noqa: E402  a rank is a script that knows no package

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
    plain = [plain_step(3 * turns, name) for name in ("gpt", "resnet")]
    return [*rows, meta_step(10 * turns), *plain]


def meta_step(pairs: int, name: str = "gpt", ranks: int = 2) -> Row:
    """A DDP step with a meta beside each collective, and without."""
    arms = {way: behind_proxy(ranks, "--barrier", way) for way in ("meta", "agree")}
    return ddp_step(
        f"DDP step of {name}, {ranks} ranks, metas", "the same with --barrier agree", arms, pairs,
        name, ranks, 1.01,
    )  # fmt: skip


def plain_step(pairs: int, name: str, ranks: int = 4) -> Row:
    """A DDP step behind the proxy, and the same script on the CPU over gloo without it, on the same cores."""
    arms = {"soft": behind_proxy(ranks), "cpu": [sys.executable]}
    what = f"DDP step of {name}, {ranks} ranks"
    return ddp_step(what, "the same script on CPU and gloo", arms, pairs, name, ranks, 1.05)


def behind_proxy(gpus: int, *more: str) -> list[str]:
    command = [sys.executable, "-m", "devproxy.cli.run", "--device", "soft", "--gpus", str(gpus)]
    return [*command, "--gpu-memory", "1GiB", *more, "--", sys.executable]


def ddp_step(
    what: str, limit: str, arms: dict[str, list[str]], pairs: int, name: str, ranks: int, target: float
) -> Row:  # fmt: skip
    """The first arm over the second, in turn: two jobs, of which one rests."""
    steps = 8
    with tempfile.TemporaryDirectory(prefix="devproxy-bench-", dir="/dev/shm") as folder:
        jobs = {
            arm: Trainers(command, name, ranks, Path(folder) / arm, "cpu" if arm == "cpu" else "")
            for arm, command in arms.items()
        }
        took: dict[str, list[float]] = {arm: [] for arm in jobs}
        for job in jobs.values():
            job.seconds_per_step(3)
        for pair in range(pairs):
            for arm in sorted(jobs, reverse=pair % 2 == 0):
                took[arm].append(jobs[arm].seconds_per_step(steps))
        for job in jobs.values():
            job.end()
    first, second = arms
    ratios = [a / b for a, b in zip(took[first], took[second], strict=True)]
    middle = statistics.median
    low, high = interval(ratios)
    return Row(
        what, middle(took[first]) * 1e3, "ms", middle(took[second]) * 1e3, limit, middle(ratios),
        target, low=low, high=high,
    )  # fmt: skip


class Trainers:
    """Ranks of ddp.py that train when they are told to, and rest meanwhile. command: what runs Python. folder: its own;
    devproxy's runtime folder is the one around it."""

    def __init__(
        self,
        command: list[str],
        model: str,
        ranks: int,
        folder: Path,
        *more: str,
        env: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir()
        words = [str(Path(__file__).with_name("ddp.py")), model, str(ranks), str(folder)]
        self._job = subprocess.Popen(
            [*command, *words, *filter(None, more)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"DEVPROXY_SHM_DIR": str(folder.parent), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            | dict(env or {}),
        )  # fmt: skip

    def seconds_per_step(self, count: int) -> float:
        assert self._job.stdin is not None and self._job.stdout is not None
        self._job.stdin.write(f"{count}\n")
        self._job.stdin.flush()
        return float(self._job.stdout.readline())

    def end(self) -> None:
        self._job.communicate(timeout=60)


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
