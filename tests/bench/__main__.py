# SPDX-License-Identifier: Apache-2.0
"""make bench: the table of costs. Each figure stands beside its limit, measured in the same run.

    python -m tests.bench [--quick] [--docs] [--only micro|ops|steps|start|comms|sharing|files|checkpoints] [--cuda-wheel PYTHON]

Writes build/bench.json: figures, limits, ratios, targets, machine, commit. A target of the step table, or of the tiny
ops, counts as missed when the whole 95 % interval lies above it. The ratio of a tiny op is its time itself, in
microseconds, since its target is one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests import own_state
from tests.bench import chart
from tests.bench.checkpoints import checkpoints
from tests.bench.comms import comms
from tests.bench.sharing import sharing
from tests.bench.small_files import small_files
from tests.bench.table import Row, interval, put_into, text

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
OUT = BUILD / "tests"
RESULT = BUILD / "bench.json"
DOCS = ROOT / "docs"
RUN = [sys.executable, "-m", "devproxy.cli.run", "--device", "soft", "--gpu-memory", "1GiB"]
CXX = ["g++", "-std=c++20", "-O2", "-Wall", "-Wextra", f"-I{ROOT}", f"-I{BUILD}/gen/wire"]
PAIRS = 30
STEP_TARGETS = {"resnet": 1.05, "gpt": 1.05, "lstm": 1.2, "mlp": 2.0}
STEPS_PER_TURN = {"resnet": 2, "gpt": 4, "lstm": 6, "mlp": 100}
OPS = ("add_", "add", "relu", "mm")  # of tests/bench/ops.py
OPS_PER_TURN = 20_000
START_TARGET = 7.0  # starts of a bare Python: devproxy-run is one, and starts a janitor, servers and devproxy-init
CUDA_WHEEL = "CUDA wheel"
POST_TARGET, PIPELINE_TARGET = 2.0, 3.0  # microseconds per op


def environment(shm: str) -> dict[str, str]:
    """One compute thread, and a tmpfs folder of our own."""
    from tests.integration.test_programs import build_kernels

    kernels = build_kernels(OUT / "programs" / "kernels.so")
    return os.environ | {
        "DEVPROXY_SHM_DIR": shm, "TEST_KERNELS": str(kernels), "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    }  # fmt: skip


def build() -> tuple[Path, Path, Path]:
    """Compiles the micro benches: the second against the shim and the client's own connection code, the third against our
    libcudart."""
    from tests.integration.test_programs import cuda_include

    OUT.mkdir(parents=True, exist_ok=True)
    post, driver, cudart = OUT / "bench_post", OUT / "bench_driver", OUT / "bench_cudart"
    client = [*map(str, sorted((ROOT / "devproxy/csrc/client").glob("*.cc")))]
    source = ROOT / "tests" / "bench"
    subprocess.run([*CXX, str(source / "bench_post.cc"), "-o", str(post), "-pthread"], check=True)
    subprocess.run(
        [
            *CXX, "-isystem", str(cuda_include()), str(source / "bench_driver.cc"), *client, "-o", str(driver),
            "-L", str(BUILD / "lib"), "-l:libcuda.so.1", "-pthread", "-Wl,--allow-shlib-undefined",
        ],
        check=True,
    )  # fmt: skip
    headers = BUILD / "headers"
    subprocess.run(
        [
            *CXX, "-isystem", str(headers / "cuda-13"), "-isystem", str(headers / "crt"),
            str(source / "bench_cudart.cc"), str(BUILD / "lib/libcudart.so.13"), str(BUILD / "lib/libcuda.so.1"),
            "-o", str(cudart),
        ],
        check=True,
    )  # fmt: skip
    return post, driver, cudart


def output(command: list[str], env: dict[str, str]) -> dict[str, float]:
    """Runs a bench program and reads its line of JSON."""
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(f"bench: {' '.join(command)} failed:\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def micro(env: dict[str, str], rounds: int, raw: dict[str, Any]) -> list[Row]:
    """Posts, round trips, copies: limits and figures in turn, the median of all rounds of each."""
    post, driver, cudart = build()
    limits, figures, runtime = [], [], []
    for _ in range(rounds):
        limits.append(output([str(post)], env))
        figures.append(output([*RUN, "--", str(driver)], env))
        runtime.append(output([*RUN, "--", str(cudart)], env))

    def middle(runs: list[dict[str, float]]) -> dict[str, float]:
        return {key: statistics.median(run[key] for run in runs) for key in runs[0]}

    a, b = middle(limits), middle(figures) | middle(runtime)
    a["cudart_driver_launch_ns_median"] = b["driver_launch_ns_median"]
    rows = []

    def row(
        what: str,
        key: str,
        limit: str,
        limit_is: str,
        target: float,
        note: str = "",
        unit: str = "ns",
    ) -> None:
        ratio = b[key] / a[limit]
        at_least = unit == "GB/s"
        rows.append(Row(what, b[key], unit, a[limit], limit_is, ratio, target, at_least, note=note))

    note = f"p99 {b['launch_ns_p99']:.0f} ns, {100 * b['launch_wake_share']:.2f} % woke the server"
    row(
        "asynchronous launch, 64 B",
        "launch_ns_median",
        "bare_post_ns_median",
        "bare 64-byte post",
        3.0,
        note,
    )
    note = f"as nvcc compiles it {b['cudart_compiled_launch_ns_median']:.0f} ns"
    row(
        "cudaLaunchKernel, 64 B",
        "cudart_launch_ns_median",
        "cudart_driver_launch_ns_median",
        "cuLaunchKernel, same run",
        1.5,
        note,
    )
    note = f"p99 {b['empty_call_awake_ns_p99']:.0f} ns; cuEventElapsedTime {b['elapsed_time_awake_ns_median']:.0f} ns"
    row(
        "empty synchronous call, awake",
        "empty_call_awake_ns_median",
        "ping_pong_ns_median",
        "cache-line ping-pong",
        1.5,
        note,
    )
    note = f"p99 {b['empty_call_asleep_ns_p99']:.0f} ns; a launch that wakes the server {b['launch_alone_ns_median']:.0f} ns"
    row(
        "the same, server asleep",
        "empty_call_asleep_ns_median",
        "futex_answer_ns_median",
        "futex wake and answer",
        1.3,
        note,
    )
    for way, name in (("h2d", "H2D"), ("d2h", "D2H")):
        for kind, target in (("pageable", 0.6), ("pinned", 0.9)):
            row(
                f"{name} 64 MB, {kind}",
                f"{way}_{kind}_gb_per_s",
                "memcpy_gb_per_s",
                "memcpy",
                target,
                unit="GB/s",
            )
    raw |= a | b
    return rows


class Worker:
    """One side of a comparison, told when to go."""

    def __init__(
        self, program: str, arguments: list[str], env: dict[str, str], python: str = sys.executable
    ) -> None:
        """program: of tests/bench; its last argument is the device."""
        script = [python, str(ROOT / "tests/bench" / program), *arguments]
        device = arguments[-1]
        command = [*RUN, "--", *script] if device == "cuda" else script
        self.process = subprocess.Popen(
            command, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdin
        assert self.process.stdout
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        if self.stdout.readline().strip() != "ready":
            self.close()
            raise RuntimeError(f"{' '.join([program, *arguments])} does not run")

    def ask(self, what: str) -> list[float]:
        """The figures that it answers with."""
        self.stdin.write(f"{what}\n")
        self.stdin.flush()
        return [float(figure) for figure in self.stdout.readline().split()]

    def close(self) -> None:
        """Ends the process by the end of its input."""
        self.stdin.close()
        self.process.wait(timeout=60)


def steps(env: dict[str, str], model: str, pairs: int) -> Row:
    """Interleaved turns of both processes; who begins alternates."""
    target = STEP_TARGETS[model]
    plain, proxied = (Worker("steps.py", [model, device], env) for device in ("cpu", "cuda"))
    try:
        n = STEPS_PER_TURN[model]
        cpu: list[float] = []
        cuda: list[float] = []
        for i in range(pairs):
            for worker in (plain, proxied) if i % 2 else (proxied, plain):
                (cpu if worker is plain else cuda).append(worker.ask(str(n))[0])
    finally:
        plain.close()
        proxied.close()
    ratios = [b / a for a, b in zip(cpu, cuda, strict=True)]
    low, high = interval(ratios)
    value, limit = statistics.median(cuda) * 1e3, statistics.median(cpu) * 1e3
    ratio = statistics.median(ratios)
    return Row(
        f"step of {model}",
        value,
        "ms",
        limit,
        "device='cpu'",
        ratio,
        target,
        low=low,
        high=high,
        note=f"{pairs} pairs",
    )


def tiny_ops(env: dict[str, str], rounds: int, cuda_wheel: str | None) -> list[Row]:
    """Ops on 16 elements: the client's share, and all of it. The targets are times; beside each stands plain eager on the
    CPU, in turns of the same run. cuda_wheel: a Python with PyTorch's CUDA wheel, whose client is measured beside."""
    workers = {side: Worker("ops.py", [side], env) for side in ("cpu", "cuda")}
    if cuda_wheel is not None:
        workers[CUDA_WHEEL] = Worker("ops.py", ["cuda"], env, cuda_wheel)
    figures: dict[tuple[str, str], list[list[float]]] = {}
    try:
        for i in range(rounds):
            for op in OPS:
                for side in list(workers) if i % 2 else reversed(workers):
                    turn = workers[side].ask(f"{op} {OPS_PER_TURN}")
                    figures.setdefault((op, side), []).append(turn)
    finally:
        for worker in workers.values():
            worker.close()
    rows = []
    for side in list(workers)[1:]:
        for which, target in enumerate((POST_TARGET, PIPELINE_TARGET)):
            for op in OPS:
                limits, values = ([turn[which] for turn in figures[op, s]] for s in ("cpu", side))
                value, limit = statistics.median(values), statistics.median(limits)
                low, high = interval(values)
                eager = statistics.median(b / a for a, b in zip(limits, values, strict=True))
                note = f"{eager:.2f} of eager on the CPU; {rounds} turns"
                if side == CUDA_WHEEL:
                    pairs = zip(figures[op, "cuda"], figures[op, side], strict=True)
                    ratio = statistics.median(b[which] / a[which] for a, b in pairs)
                    note += f"; {ratio:.2f} of the CPU wheel's client"
                rows.append(
                    Row(
                        f"{op} of 16 elements, {'' if side == 'cuda' else side + ', '}{('post', 'pipeline')[which]}",
                        value,
                        "us",
                        limit,
                        "device='cpu'",
                        value,
                        target,
                        low=low,
                        high=high,
                        note=note,
                    )
                )
    return rows


def start_up(env: dict[str, str], rounds: int) -> list[Row]:
    """What devproxy-run adds to `import torch`, and to a command that does nothing."""

    def wall(command: list[str]) -> float:
        begin = time.perf_counter()
        subprocess.run(command, env=env, cwd=ROOT, check=True, capture_output=True)
        return time.perf_counter() - begin

    python = [sys.executable, "-c", "import torch"]
    wall(python)
    plain, proxied, nothing, bare = [], [], [], []
    for _ in range(rounds):
        bare.append(wall([sys.executable, "-c", "pass"]))
        plain.append(wall(python))
        proxied.append(wall([*RUN, "--", *python]))
        nothing.append(wall([*RUN, "--", "true"]))
    base = statistics.median(plain)
    added = statistics.median(p - q for p, q in zip(proxied, plain, strict=True))
    ready, start = statistics.median(nothing), statistics.median(bare)
    return [
        Row("added to import torch", added, "s", base, "plain import torch", added, 0.3),
        Row(
            "server ready",
            ready,
            "s",
            start,
            "`python -c pass`",
            ready / start,
            START_TARGET,
            note="all of `devproxy-run -- true`: servers up, the command, everything gone",
        ),
    ]


def commit() -> str:
    """The commit that is measured, with a mark when files differ from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in open("/proc/cpuinfo")
            if line.startswith("model name")
        ),
        "",
    )
    return {
        "cpu": cpu, "cores": os.cpu_count(), "kernel": platform.release(), "load": os.getloadavg()[0],
        "utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "commit": commit(),
        "command": "python -m tests.bench " + " ".join(sys.argv[1:]),
    }  # fmt: skip


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds; not for figures that are quoted"
    )
    parser.add_argument(
        "--only",
        choices=["micro", "ops", "steps", "start", "comms", "sharing", "files", "checkpoints"],
    )
    parser.add_argument(
        "--cuda-wheel",
        metavar="PYTHON",
        help="its tiny ops too; built before by devproxy build-torch --python PYTHON",
    )
    parser.add_argument(
        "--docs",
        action="store_true",
        help="into docs/bench.json and the table in docs/bench.md too",
    )
    options = parser.parse_args()
    own_state.take_own()
    facts = machine()
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    failed = False
    with tempfile.TemporaryDirectory(prefix="devproxy-bench-", dir="/dev/shm") as shm:
        for rows_of in sections(options, environment(shm), raw):
            try:
                for row in rows_of():
                    rows.append(row)
                    print(f"{row.what}: {row.ratio:.3f}", file=sys.stderr, flush=True)
            except (OSError, RuntimeError, ValueError, AssertionError, subprocess.SubprocessError):
                failed = True  # what else was measured is not lost
                traceback.print_exc()
    print(text(rows), end="")
    if facts["load"] > 0.5:
        print(
            f"note: the machine was not idle when this began (load {facts['load']:.1f}); figures suffer from that"
        )
    result = {
        "machine": facts,
        "rows": [asdict(r) | {"verdict": r.verdict} for r in rows],
        "raw": raw,
    }
    write(RESULT, result)
    if options.docs:
        into_docs(result)
    if failed:
        sys.exit("some rows were not measured")


def sections(
    options: argparse.Namespace, env: dict[str, str], raw: dict[str, Any]
) -> Iterator[Callable[[], Iterable[Row]]]:
    """What measures the rows that were asked for; the figures behind them go into raw."""
    quick: bool = options.quick
    all_: dict[str, list[Callable[[], Iterable[Row]]]] = {
        "micro": [lambda: micro(env, 1 if quick else 5, raw)],
        "ops": [lambda: tiny_ops(env, 4 if quick else 20, options.cuda_wheel)],
        "steps": [
            lambda model=model: [steps(env, model, 6 if quick else PAIRS)] for model in STEP_TARGETS
        ],
        "start": [lambda: start_up(env, 3 if quick else 9)],
        "comms": [lambda: comms(1 if quick else 3)],
        "sharing": [lambda: sharing(quick)],
        "files": [lambda: small_files(quick)],
        "checkpoints": checkpoints(quick, raw),
    }
    for name, measure in all_.items():
        if options.only in (None, name):
            yield from measure


def write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {path.relative_to(ROOT)}")


def into_docs(result: dict[str, Any]) -> None:
    """The run into docs/: all of it, or, of one section (--only), beside the others, which keep their own facts."""
    path, page = DOCS / "bench.json", DOCS / "bench.md"
    before = json.loads(path.read_text())
    names = {row["what"] for row in result["rows"]}
    kept = [row for row in before["rows"] if row["what"] not in names]
    rows = [row | {"machine": row.get("machine", before["machine"])} for row in kept]
    write(path, result | {"rows": rows + result["rows"], "raw": before["raw"] | result["raw"]})
    fields = Row.__dataclass_fields__
    table = [Row(**{k: v for k, v in row.items() if k in fields}) for row in rows + result["rows"]]
    page.write_text(put_into(page.read_text(), table))
    chart.main()


if __name__ == "__main__":
    main()
