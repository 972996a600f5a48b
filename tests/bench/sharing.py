# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a GPU (docs/design.md, Fewer GPUs than ranks): the section `sharing` of the table.

Without splicing N ranks on one GPU have N times one rank's work to do; with it the optimizer's step is done once (the
paper's Figure 4). What turns and comparisons cost shows as a ratio above that, and what is gained where hosts are slow,
below.
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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch"))
import models
from tests.bench.comms import ROOT, Trainers, behind_proxy
from tests.bench.table import Row, interval

RANKS = 4
LOADER_S = 0.02


def on(name: str, *gpus: int) -> list[str]:
    command = [sys.executable, "-m", "devproxy.cli.run", "--name", name, "--device", "soft"]
    return [*command, "--gpu", ",".join(map(str, gpus)), "--gpu-memory", "4GiB", "--", sys.executable]  # fmt: skip


class SharedGpu:
    """The process of the job's first server, and all that are on its GPU."""

    def __init__(self, folder: str, job: str) -> None:
        self._command = [sys.executable, "-m", "devproxy.cli.ctl", "status", job, "--json"]
        self._env = os.environ | {"DEVPROXY_SHM_DIR": folder, "PYTHONPATH": str(ROOT)}
        self._process = Path(f"/proc/{self._status()['pid']}")

    def _status(self) -> dict[str, Any]:
        done = subprocess.run(self._command, env=self._env, capture_output=True, check=True)
        status: dict[str, Any] = json.loads(done.stdout)["servers"][0]
        return status

    def splicing(self) -> dict[str, int]:
        """Its counts (hal/sharing.h)."""
        counts: dict[str, int] = self._status()["splicing"]
        return counts

    def resident_bytes(self) -> int:
        """Pages of the software GPU: one that several ranks show counts once."""
        total = 0
        for fd in (self._process / "fd").iterdir():
            if os.readlink(fd).startswith(("/memfd:devproxy-device", "/memfd:devproxy-spliced")):
                total += fd.stat().st_blocks * 512
        return total

    def cpu_s(self) -> float:
        """Of all its threads, since it began."""
        fields = (self._process / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


ARMS = {"spliced": [0] * RANKS, "splicing off": [2] * RANKS, "alone": [1]}
STEPS = 6


def time_sliced(
    model: str, pairs: int, target: float, wait_s: float = 0.0, memory: bool = False
) -> list[Row]:
    """A step of all ranks on one GPU, spliced and not, over as many steps of one rank alone. memory: what they hold, too."""
    more = f"wait={wait_s}" if wait_s else ""
    jobs: dict[str, Trainers] = {}
    with tempfile.TemporaryDirectory(prefix="devproxy-bench-", dir="/dev/shm") as folder:
        for arm, gpus in ARMS.items():
            name = arm.replace(" ", "-")
            env = {"DEVPROXY_SPLICING": "off"} if arm == "splicing off" else None
            jobs[arm] = Trainers(
                on(name, *gpus), model, len(gpus), Path(folder) / name, more, env=env
            )
        for job in jobs.values():
            job.seconds_per_step(12)
        gpu = {arm: SharedGpu(folder, arm.replace(" ", "-")) for arm in ARMS}
        before = {arm: gpu[arm].cpu_s() for arm in ARMS}
        counted = gpu["spliced"].splicing()
        took: list[dict[str, float]] = []
        for pair in range(pairs):
            order = [*ARMS][pair % 3 :] + [*ARMS][: pair % 3]
            took.append({arm: jobs[arm].seconds_per_step(STEPS) for arm in order})
        cpu = {arm: (gpu[arm].cpu_s() - before[arm]) / (pairs * STEPS) for arm in ARMS}
        counts = gpu["spliced"].splicing()
        resident = {arm: gpu[arm].resident_bytes() for arm in ARMS}
        for job in jobs.values():
            job.end()
    what = f"DDP step of {model}, {RANKS} ranks on one GPU"
    if wait_s:
        what += f", loaders of {wait_s * 1e3:.0f} ms, loss read"
    middle = statistics.median
    limit_s = middle(RANKS * one["alone"] for one in took)
    rows = []
    for arm, goal in (("spliced", target), ("splicing off", 1.03)):
        ratios = [one[arm] / (RANKS * one["alone"]) for one in took]
        low, high = interval(ratios)
        compared = ""
        if arm == "spliced":
            each = {k: (counts[k] - counted[k]) / (pairs * STEPS) for k in counts}
            compared = f"; {each['squashed']:.1f} launches squashed a step, {each['compared_bytes'] / 1e3:.1f} kB compared"
        note = f"the server's CPU time {cpu[arm] * 1e3:.0f} of {RANKS * cpu['alone'] * 1e3:.0f} ms{compared}"
        rows.append(Row(
            f"{what}, {arm}", middle(one[arm] for one in took) * 1e3, "ms", limit_s * 1e3,
            f"{RANKS} x one rank alone", middle(ratios), goal, low=low, high=high, note=note,
        ))  # fmt: skip
    if memory:
        # One rank's parameters, states and activations, and gradients of each: DDP has them a second time in its buckets.
        gradients = 2 * sum(
            p.numel() * p.element_size() for p in models.MODELS[model]().parameters()
        )
        limit = resident["alone"] + (RANKS - 1) * gradients
        rows.append(Row(
            f"device memory of {model}, {RANKS} ranks on one GPU, spliced", resident["spliced"] / 1e6, "MB", limit / 1e6,
            "one rank alone, and the gradients of the others", resident["spliced"] / limit, 1.1,
            note=f"splicing off {resident['splicing off'] / 1e6:.0f} MB",
        ))  # fmt: skip
    return rows


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
        *time_sliced("gpt", pairs, 0.97),
        *time_sliced("gpt-17m", pairs, 0.80, memory=True),
        *time_sliced("resnet", pairs, 1.02),
        *time_sliced("gpt", pairs, 0.9, LOADER_S),
        *resized("gpt", 2 if quick else 6),
    ]
