# SPDX-License-Identifier: Apache-2.0
"""The Python that has torch, and runs of one of torch's programs on two sides."""

from __future__ import annotations

import glob
import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from devproxy.machine import CUDA_DRIVER_PLACES
from gpucheck import running, torch_compare
from gpucheck.campaign import time_left_s
from gpucheck.ends import Failed, Refused
from gpucheck.report import Report
from gpucheck.running import Way, run
from gpucheck.setup import Setup, earlier
from gpucheck.torch_compare import Side, Table, run_both

FIND_TORCH = """
import importlib.util, json, os, platform, runpy
spec = importlib.util.find_spec("torch")
facts = dict(python=platform.python_version(), torch=None)
if spec and spec.origin:
    folder = os.path.dirname(spec.origin)
    version = runpy.run_path(os.path.join(folder, "version.py"))
    facts.update(torch=version["__version__"], cuda=version["cuda"], folder=folder)
    facts["numpy"] = importlib.util.find_spec("numpy") is not None
    facts["wheel"] = os.path.exists(os.path.join(folder, "lib", "libtorch_cuda.so"))
print(json.dumps(facts))
"""
# Pythons that may have torch, besides the one that runs this.
TORCH_PLACES = ("/opt/*/.venv/bin/python", "/opt/*/bin/python")


def find_torch(setup: Setup) -> dict[str, Any]:
    """Of the Python that has torch with CUDA; in a rehearsal any torch will do. Empty where there is none."""
    named = [sys.executable, shutil.which("python3") or "", shutil.which("python") or ""]
    for python in dict.fromkeys([*named, *(p for place in TORCH_PLACES for p in sorted(glob.glob(place)))]):  # fmt: skip
        done = run([python, "-c", FIND_TORCH], setup.native_env(), 30) if python else None
        if done is None or done.code:
            continue
        facts: dict[str, Any] = json.loads(done.out.splitlines()[-1]) | {"executable": python}
        if facts["torch"] and (facts["cuda"] or setup.rehearse == "soft"):
            return facts
    return {}


def torch_facts(setup: Setup) -> dict[str, Any]:
    """What prepare found."""
    facts: dict[str, Any] = earlier(setup, "prepare").get("torch") or {}
    return facts


def torch_python(setup: Setup) -> str:
    return str(torch_facts(setup).get("executable") or sys.executable)


def need_plugin(setup: Setup) -> dict[str, Any]:
    """Refused where torch is not here, or the bundle has no plugin for it, or its first words were no good: then what stands
    on them would only take the time of stages that can still find something out."""
    if setup.rehearse == "record":
        raise Refused("the recording device runs no operators")
    facts = torch_facts(setup)
    if not facts:
        raise Refused("no Python with PyTorch and CUDA is here")
    minor = ".".join(facts["torch"].split(".")[:2])
    folder = f"torch-{minor}" + ("-cuda" if facts["wheel"] else "")
    if not (setup.bundle / "lib" / folder / "libdevproxy_torch.so").exists():
        has = [str(p["folder"]) for p in setup.manifest.get("torch_plugins", [])]
        raise Refused(f"the bundle has no plugin for torch {facts['torch']} ({folder}; it has {', '.join(has) or 'none'})")  # fmt: skip
    first = earlier(setup, "t_first").get("first", {})
    if first.get("verdict") in (torch_compare.PROXY_ERROR, torch_compare.NOT_REACHED, torch_compare.NO_NATIVE):  # fmt: skip
        raise Refused(f"t_first did not get through: {first.get('why') or first['verdict']}")
    return facts


def torch_ways(setup: Setup, *options: str, gpus: int = 1, on: str = "") -> tuple[Way, Way]:
    """Natively and through the proxy. Both see torch's own libraries alone, as a user's job does: compilers that lie
    elsewhere on the machine could make other code. on: the machine's GPU for each of the job's."""
    ways = []
    where = ("--gpu", on) if on else ("--gpus", str(gpus))
    proxied = setup.proxied(*(options or ("--plain",)), *where)
    for way in (setup.native(gpus), proxied):
        env = dict(way.env)
        ours = (str(setup.work / "native"), str(setup.work / "compilers"))
        kept = [p for p in env["LD_LIBRARY_PATH"].split(":") if p and p not in ours]
        if not setup.rehearse and way.prefix == [] and setup.driver not in CUDA_DRIVER_PLACES:
            kept.insert(0, str(setup.work / "driver_alone"))
        env["LD_LIBRARY_PATH"] = ":".join(kept)
        env.pop("TRITON_LIBCUDA_PATH", None)
        env["PYTHONHASHSEED"] = "0"
        ways.append(Way(way.prefix, env))
    return ways[0], ways[1]


def torch_line(setup: Setup, program: str, *arguments: str) -> list[str]:
    small = ["--small"] if setup.small else []
    return [torch_python(setup), str(setup.bundle / "programs" / program), *small, *arguments]


def torch_sides(setup: Setup, program: str, *arguments: str, twice: bool = False, kept: Path | None = None, gpus: int = 1) -> tuple[Side, Side]:  # fmt: skip
    """twice: the native side runs each case twice, so that it is known what can be compared. gpus: of the job."""
    sides = []
    ways = torch_ways(setup, gpus=gpus)
    for title, way in zip(("native", "proxied"), ways, strict=True):
        line = [*way.prefix, *torch_line(setup, program, *arguments)]
        if title == "native" and twice:
            line += ["--times", "2"]
        if title == "proxied" and setup.spoil:
            line += ["--spoil", setup.spoil] if program != "torch_models.py" else ["--seed", "1"]
        env = way.env | {"TORCHINDUCTOR_CACHE_DIR": str(setup.work / f"inductor-{title}"), "TRITON_CACHE_DIR": str(setup.work / f"triton-t-{title}")}  # fmt: skip
        stem = f"{Path(program).stem}-{hashlib.sha256(' '.join(arguments).encode()).hexdigest()[:6]}-{title}"
        lines = kept.with_name(f"{kept.name}-{title}.jsonl") if kept else setup.work / f"{stem}.jsonl"  # fmt: skip
        sides.append(Side(title, line, env, lines, setup.work / f"{stem}.log"))
    return sides[0], sides[1]


def say_trouble(report: Report, *sides: Side) -> None:
    for side in sides:
        if side.trouble:
            report.put(f"trouble, {side.title}", side.trouble[:20])
            report.say(f"{side.title}: {side.said()}")


def compare_cases(
    setup: Setup,
    report: Report,
    program: str,
    names: Sequence[str],
    key: str,
    *,
    twice: bool = False,
    at_once: bool = True,
    alarm_s: int = 40,
    gpus: int = 1,
    more: Sequence[str] = (),
    native_tunes: bool = False,
) -> Table:
    """Runs the cases on both sides, within the stage's time, and puts what became of them into the report. native_tunes: the
    proxied side, which comes second, takes what Inductor has found to be fastest natively."""
    only = ["--only", ",".join(names)] if names else []
    alarm = ["--alarm", str(round(alarm_s * running.patience))]
    native, proxied = torch_sides(setup, program, *alarm, *only, *more, twice=twice, gpus=gpus)
    for side in (native, proxied):
        side.wanted, side.silent_s = tuple(names), alarm_s + 20.0
    if native_tunes:
        proxied.before = lambda: take_tuning(native.env, proxied.env)
    run_both((native, proxied), time_left_s() - 4, at_once, running.patience)
    say_trouble(report, native, proxied)
    ours, theirs = native.read(), proxied.read()
    found = torch_compare.table(
        names or native.plan(), ours, theirs, lambda a, b: torch_compare.compare_result(a, b, key)
    )
    report.put("counts", found.counts())
    for name, (kind, why) in found.verdicts.items():
        facts: dict[str, Any] = {"verdict": kind} | ({"why": why} if why else {})
        for title, lines in (("native", ours), ("proxied", theirs)):
            one = lines.get(name, {})
            if "shown" in one:
                facts[title] = one["shown"]
            facts[f"{title}_s"] = one.get("s")
        report.put(name, facts)
    return found


def take_tuning(of: dict[str, str], into: dict[str, str]) -> None:
    """Inductor times several forms of a reduction and takes the fastest, each adds in another order: two native runs differ,
    with TORCHINDUCTOR_DETERMINISTIC too (torch 2.11). What it found lies beside the kernels."""
    source, target = (Path(env["TORCHINDUCTOR_CACHE_DIR"]) for env in (of, into))
    for found in source.glob("**/*.best_config"):
        copy = target / found.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(found, copy)


def judge(found: Table, what: str) -> None:
    """Raises Failed unless all are as natively."""
    if wrong := found.names(*torch_compare.WRONG, torch_compare.NOT_REACHED):
        first = "; ".join(f"{name}: {why or 'not reached'}" for name, why in list(wrong.items())[:6])  # fmt: skip
        raise Failed(f"{len(wrong)} of {len(found.verdicts)} {what} are not as natively: {first}")
    if not found.names(torch_compare.BITWISE):
        raise Failed(f"no {what} run natively: nothing was compared")
