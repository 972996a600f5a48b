# SPDX-License-Identifier: Apache-2.0
"""PyTorch through the plugin, case by case: bits against native ones."""

from __future__ import annotations

import glob
import hashlib
import json
import time

from gpucheck import running, torch_compare
from gpucheck.campaign import time_left_s
from gpucheck.ends import GO_ON, NOT_REACHED, Failed, Refused
from gpucheck.report import Report, write_whole
from gpucheck.setup import Setup
from gpucheck.stage import stage
from gpucheck.torch_compare import Side, Table, run_both
from gpucheck.torch_sides import compare_cases, judge, need_plugin, say_trouble, torch_sides


@stage(150, 30)
def t_first(setup: Setup, report: Report) -> None:
    """PyTorch's first words through the plugin: a copy, sums, cuBLAS, cuDNN, cuSOLVER, cuFFT, random numbers; how long loading takes; facts; generators, streams, errors."""
    report.put("torch", need_plugin(setup))
    begin = time.monotonic()
    first = ["first", "facts", "generators", "streams", "checks"]
    # One behind the other: the times of the first calls are looked at.
    found = compare_cases(setup, report, "torch_chapters.py", first, "same", at_once=False)
    report.put("both_s", round(time.monotonic() - begin, 1))
    judge(found, "chapters")


OPS_SAMPLES = 3
CONFIRM_S = 30.0  # of the sweep's time, for looking again at what differs


@stage(130, 70, call=2)
def t_ops(setup: Setup, report: Report) -> None:
    """torch's op_db in every type that the device has, forward and backward: bits against native. What it has no time for, the next call goes on with."""
    facts = need_plugin(setup)
    if not facts["numpy"]:
        raise Refused("op_db needs numpy, which that Python has not")
    # Beside the bundle, and for this very bundle: a second call on the same machine finds it.
    mark = hashlib.sha256((setup.bundle / "manifest.json").read_bytes()).hexdigest()[:12]
    progress = (setup.work if setup.rehearse else setup.bundle.parent / "gpu-check-progress") / f"ops-{mark}"  # fmt: skip
    progress.parent.mkdir(exist_ok=True)
    more = ["--samples", str(1 if setup.small else OPS_SAMPLES)]
    if setup.ops_start:
        more += ["--start", setup.ops_start]
    if setup.ops:
        more += ["--only", setup.ops]
        progress = setup.work / "ops-asked"
    elif setup.small:
        more += ["--types", "float32"]
    native, proxied = torch_sides(setup, "torch_ops.py", *more, twice=True, kept=progress)
    report.put("already_done", len(proxied.read()))
    run_both((native, proxied), max(10.0, time_left_s() - CONFIRM_S - 8), True, running.patience)
    say_trouble(report, native, proxied)
    plan, ours, theirs = native.plan(), native.read(), proxied.read()
    if setup.ops:
        plan = [name for name in plan if name in setup.ops.split(",")]
    if not plan or not ours:
        raise Failed(f"the sweep does not run natively: {native.said()}")
    if set(proxied.plan()) != set(plan):
        report.put("other_plan", sorted(set(plan) ^ set(proxied.plan()))[:40])
    reached = [name for name in plan if name in ours and name in theirs]
    found = torch_compare.table(reached, ours, theirs, torch_compare.compare_op)
    differ = list(found.names(torch_compare.DIFFERENT))[:60]
    if (
        differ and not setup.small
    ):  # several times more, in another process: does it differ from itself?
        again = Side("again", [*native.command, "--times", "6", "--only", ",".join(differ)], native.env, setup.work / "ops-again.jsonl", setup.work / "ops-again.log")  # fmt: skip
        again.run(min(CONFIRM_S, time_left_s() - 5), running.patience)
        for name, facts in again.read().items():
            unsteady = any(sample.get("unsteady") for sample in facts.get("samples", []))
            if unsteady or torch_compare.compare_op(ours[name], facts)[0] == torch_compare.DIFFERENT:  # fmt: skip
                found.verdicts[name] = (torch_compare.UNSTEADY, found.verdicts[name][1])
    report.put("ops", {"planned": len(plan), "reached": len(reached), "counts": found.counts(), "bitwise_fraction": found.fraction()})  # fmt: skip
    by_type: dict[str, dict[str, int]] = {}
    for name, (kind, _) in found.verdicts.items():
        counts = by_type.setdefault(name.split("/")[0], {})
        counts[kind] = counts.get(kind, 0) + 1
    report.put("by_type", by_type)
    wrong = found.names(*torch_compare.WRONG)
    report.put("not_bitwise", dict(list(wrong.items())[:150]))
    others = {name: list(one) for name, one in found.verdicts.items() if one[0] != torch_compare.BITWISE}  # fmt: skip
    write_whole(setup.keep / "torch-ops.json", json.dumps(others, indent=0) + "\n")
    if len(reached) < len(plan) and not setup.small:
        # Passed by with --ops-start, they are another call's.
        behind = plan[plan.index(setup.ops_start) :] if setup.ops_start in plan else plan
        todo = next((name for name in behind if name not in theirs or name not in ours), "")
        if todo:
            report.put(GO_ON, todo)
    if wrong:
        first = "; ".join(f"{name}: {why}" for name, why in list(wrong.items())[:8])
        raise Failed(f"{len(wrong)} of {len(reached)} are not bitwise as natively: {first}")
    report.say(f"{len(reached)} of {len(plan)} cases: {found.counts()}")
    if not found.names(torch_compare.BITWISE):
        raise Failed("nothing could be compared")


@stage(130, 60)
def t_models(setup: Setup, report: Report) -> None:
    """MLP, ResNet, BERT, GPT-2, LSTM, U-Net in plain torch, 20 steps each by many ways (autocast, scaler, channels_last, fused, attention): losses, parameters and moments bit for bit."""
    need_plugin(setup)
    found = compare_cases(setup, report, "torch_models.py", [], "result", twice=True)
    not_reached = found.names(torch_compare.NOT_REACHED)
    if not_reached:
        report.put(NOT_REACHED, list(not_reached))
        report.say(f"not reached: {', '.join(not_reached)}")
    judge(Table({n: v for n, v in found.verdicts.items() if n not in not_reached}), "models")


@stage(80, 25)
def t_memory(setup: Setup, report: Report) -> None:
    """What torch says is allocated and free, OutOfMemoryError at the right call, and a kernel's own fault as an exception: as natively."""
    need_plugin(setup)
    names = ["memory", "oom", "fault"]
    # One behind the other: each fills the whole GPU.
    found = compare_cases(setup, report, "torch_chapters.py", names, "same", at_once=False)
    judge(found, "chapters")


@stage(60, 12)
def t_graphs(setup: Setup, report: Report) -> None:
    """torch.cuda.graph: forward, a whole step, dropout, shared pools, make_graphed_callables: bit for bit. And an error that only the op finds."""
    need_plugin(setup)
    names = ["graph", "graph_training", "graph_callables", "check_types"]
    judge(compare_cases(setup, report, "torch_chapters.py", names, "same"), "chapters")


@stage(100, 50)
def t_compile(setup: Setup, report: Report) -> None:
    """torch.compile: Inductor's Triton kernels beside ATen's ops in one job, bit for bit; also where natively CUDA graphs replay them (reduce-overhead)."""
    need_plugin(setup)
    names = ["compile", "compile_reduce_overhead"]
    found = compare_cases(
        setup, report, "torch_chapters.py", names, "same", alarm_s=90, at_once=False, native_tunes=True
    )  # fmt: skip
    judge(found, "chapters")


@stage(120, 75, call=3)
def c_compile_conv(setup: Setup, report: Report) -> None:
    """torch.compile of the convolution net: cuDNN's kernels and Triton's in one step, bit for bit."""
    need_plugin(setup)
    found = compare_cases(
        setup, report, "torch_chapters.py", ["compile_conv"], "same", alarm_s=90, at_once=False, native_tunes=True
    )  # fmt: skip
    judge(found, "chapters")


@stage(90, 45, call=2)
def t_ranks(setup: Setup, report: Report) -> None:
    """torch.distributed on 'nccl' with one rank, and with one on each GPU where there are several: collectives and a DDP training by the genuine NCCL in the servers, bit for bit."""
    need_plugin(setup)
    seen = len(glob.glob(f"{setup.sysroot}/dev/nvidia[0-9]*"))
    gpus = 2 if setup.rehearse else max(seen, 1)
    report.put("gpus", gpus)
    names = [f"{case}_{ranks}" for ranks in sorted({1, gpus}) for case in ("collectives", "ddp")]
    more = ("--ranks", str(gpus))
    # One behind the other: NCCL's kernels of two jobs on one GPU wait for each other's room.
    found = compare_cases(
        setup, report, "torch_ranks.py", names, "same", at_once=False, gpus=gpus, more=more
    )
    judge(found, "cases")
