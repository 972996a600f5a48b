"""Ranks that share a GPU (docs/design.md, Fewer GPUs than ranks): the section `sharing` of the table.

Without splicing N ranks on one GPU have N times one rank's work to do: the paper's Figure 4 is below that by the optimizer
steps that it leaves out. What the turns cost shows as a ratio above 1, and what they gain where hosts are slow, below.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.comms import ROOT, Trainers, behind_proxy
from tests.bench.table import Row, interval

RANKS = 4
LOADER_S = 0.02


def on(*gpus: int) -> list[str]:
    command = [sys.executable, "-m", "devproxy.cli.run", "--device", "soft"]
    return [*command, "--gpu", ",".join(map(str, gpus)), "--gpu-memory", "2GiB", "--", sys.executable]  # fmt: skip


def time_sliced(model: str, pairs: int, target: float, wait_s: float = 0.0) -> Row:
    """A step of all ranks on one GPU, over as many steps of one rank alone."""
    more = f"wait={wait_s}" if wait_s else ""
    with tempfile.TemporaryDirectory(prefix="devproxy-bench-", dir="/dev/shm") as folder:
        shared = Trainers(on(*[0] * RANKS), model, RANKS, Path(folder) / "shared", more)
        alone = Trainers(on(1), model, 1, Path(folder) / "alone", more)
        for job in (shared, alone):
            job.seconds_per_step(3)
        took = []
        for pair in range(pairs):
            order = (shared, alone) if pair % 2 else (alone, shared)
            seconds = {job: job.seconds_per_step(6) for job in order}
            took.append((seconds[shared], RANKS * seconds[alone]))
        for job in (shared, alone):
            job.end()
    ratios = [a / b for a, b in took]
    low, high = interval(ratios)
    what = f"DDP step of {model}, {RANKS} ranks on one GPU"
    if wait_s:
        what += f", loaders of {wait_s * 1e3:.0f} ms, loss read"
    middle = statistics.median
    return Row(
        what, middle(a for a, _ in took) * 1e3, "ms", middle(b for _, b in took) * 1e3,
        f"{RANKS} x one rank alone", middle(ratios), target, low=low, high=high,
    )  # fmt: skip


def memcpy_bytes_per_s() -> float:
    source, target = bytearray(64 << 20), bytearray(64 << 20)
    took = []
    for _ in range(7):
        begin = time.perf_counter()
        target[:] = source
        took.append(time.perf_counter() - begin)
    return len(source) / statistics.median(took)


def resized(model: str, times: int) -> list[Row]:
    """How long a job of RANKS stands still when it shrinks to one GPU, and when it grows again."""
    stood: dict[str, list[float]] = {"to one GPU": [], f"to {RANKS} GPUs": []}
    with tempfile.TemporaryDirectory(prefix="devproxy-bench-", dir="/dev/shm") as folder:
        env = os.environ | {"DEVPROXY_SHM_DIR": folder, "PYTHONPATH": str(ROOT)}
        job = Trainers(behind_proxy(RANKS, "--name", "resized"), model, RANKS, Path(folder) / "job")
        job.seconds_per_step(3)

        def ctl(*words: str) -> dict[str, object]:
            command = [sys.executable, "-m", "devproxy.cli.ctl", *words, "--json"]
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            answer: dict[str, object] = json.loads(done.stdout)
            return answer

        shown = ctl("status", "resized")["servers"]
        assert isinstance(shown, list)
        moved = sum(server["memory"]["used"] for server in shown)
        for _ in range(times):
            for where, gpus in zip(stood, ("0,0,0,0", "0,1,2,3"), strict=True):
                answer = ctl("resize", "resized", "--gpus", gpus)
                stood[where].append(float(str(answer["still_s"])))
                job.seconds_per_step(2)
        job.end()
    limit_s = 1.3 * moved / memcpy_bytes_per_s() + 0.3
    return [
        Row(
            f"resize {where}, {RANKS} ranks of {model}", statistics.median(took), "s", limit_s,
            "1.3 x the bytes of all ranks by memcpy, and 0.3 s", statistics.median(took) / limit_s, 1.0,
            note=f"{moved >> 20} MiB moved",
        )
        for where, took in stood.items()
    ]  # fmt: skip


def sharing(quick: bool) -> list[Row]:
    pairs = 3 if quick else 12
    return [
        time_sliced("gpt", pairs, 1.03),
        time_sliced("resnet", pairs, 1.03),
        time_sliced("gpt", pairs, 0.9, LOADER_S),
        *resized("gpt", 2 if quick else 6),
    ]
