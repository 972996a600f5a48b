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

from tests.bench.comms import ROOT, Trainers, behind_proxy
from tests.bench.table import Row, interval

RANKS = 4
LOADER_S = 0.02


def named(command: list[str], name: str) -> list[str]:
    return [*command[:3], "--name", name, *command[3:]]


def on(*gpus: int) -> list[str]:
    command = [sys.executable, "-m", "devproxy.cli.run", "--device", "soft"]
    return [*command, "--gpu", ",".join(map(str, gpus)), "--gpu-memory", "4GiB", "--", sys.executable]  # fmt: skip


def resident_bytes(folder: str, job: str) -> int:
    """Pages of the software GPU that the job's first server has, and all that are on its GPU: a page that several ranks show
    counts once."""
    command = [sys.executable, "-m", "devproxy.cli.ctl", "status", job, "--json"]
    env = os.environ | {"DEVPROXY_SHM_DIR": folder, "PYTHONPATH": str(ROOT)}
    shown = json.loads(subprocess.run(command, env=env, capture_output=True, check=True).stdout)
    total = 0
    for fd in Path(f"/proc/{shown['servers'][0]['pid']}/fd").iterdir():
        if os.readlink(fd).startswith(("/memfd:devproxy-device", "/memfd:devproxy-spliced")):
            total += fd.stat().st_blocks * 512
    return total


def time_sliced(model: str, pairs: int, target: float, wait_s: float = 0.0) -> list[Row]:
    """A step of all ranks on one GPU, spliced and not, over as many steps of one rank alone."""
    more = f"wait={wait_s}" if wait_s else ""
    with tempfile.TemporaryDirectory(prefix="devproxy-bench-", dir="/dev/shm") as folder:
        spliced = Trainers(
            named(on(*[0] * RANKS), "spliced"), model, RANKS, Path(folder) / "spliced", more
        )
        plain = Trainers(
            named(on(*[2] * RANKS), "plain"),
            model,
            RANKS,
            Path(folder) / "plain",
            more,
            env={"DEVPROXY_SPLICING": "off"},
        )
        alone = Trainers(on(1), model, 1, Path(folder) / "alone", more)
        jobs = [spliced, plain, alone]
        for job in jobs:
            job.seconds_per_step(12)
        took: list[dict[Trainers, float]] = []
        for pair in range(pairs):
            order = jobs[pair % 3 :] + jobs[: pair % 3]
            took.append({job: job.seconds_per_step(6) for job in order})
        resident = {
            job: resident_bytes(folder, name)
            for job, name in ((spliced, "spliced"), (plain, "plain"))
        }
        for job in jobs:
            job.end()
    what = f"DDP step of {model}, {RANKS} ranks on one GPU"
    if wait_s:
        what += f", loaders of {wait_s * 1e3:.0f} ms, loss read"
    middle = statistics.median
    rows = []
    for job, name, goal in ((spliced, "spliced", target), (plain, "splicing off", 1.03)):
        ratios = [one[job] / (RANKS * one[alone]) for one in took]
        low, high = interval(ratios)
        note = f"{resident[job] >> 20} MiB of device memory"
        rows.append(Row(
            f"{what}, {name}", middle(one[job] for one in took) * 1e3, "ms",
            middle(RANKS * one[alone] for one in took) * 1e3, f"{RANKS} x one rank alone",
            middle(ratios), goal, low=low, high=high, note=note,
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
        *time_sliced("gpt-17m", pairs, 0.80),
        *time_sliced("resnet", pairs, 1.02),
        *time_sliced("gpt", pairs, 0.9, LOADER_S),
        *resized("gpt", 2 if quick else 6),
    ]
