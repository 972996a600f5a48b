# SPDX-License-Identifier: Apache-2.0
"""Clients that nobody here wrote."""

from __future__ import annotations

import concurrent.futures
import os
import re
import shutil
import sys

from gpucheck.ends import Failed, Refused
from gpucheck.report import Report
from gpucheck.running import digest_of, refusal_in
from gpucheck.setup import Setup
from gpucheck.stage import stage
from gpucheck.subjects import TORCH_WITH_CUDA, WITHOUT_PLUGIN
from gpucheck.torch_sides import torch_python

THIRD_PARTY = (
    ("third_party_cuda_bindings.py", "cuda.bindings"),
    ("numba_program.py", "numba.cuda"),
)


@stage(90, 25, call=3)
def c_third_party(setup: Setup, report: Report) -> None:
    """Clients that nobody here wrote: cuda-bindings and numba-cuda, natively and through the proxy."""
    differ, missing = [], []
    for name, module in THIRD_PARTY:
        there = setup.native().run([sys.executable, "-c", f"import {module}"], 30)
        if there.code:
            missing.append(module)
            report.put(name, f"{module} cannot be imported: {there.brief()}")
            continue
        line, codes = [sys.executable, str(setup.bundle / "programs" / name)], {}
        for title, way in (
            ("native", setup.native()),
            ("plain", setup.proxied("--plain")),
            ("namespaces", setup.proxied()),
        ):
            done = way.run(line, 30)
            passed = done.code == 0 and "PASS " in done.out
            codes[title] = "pass" if passed else f"{done.code}: {done.brief()}"
            if title != "native" and setup.past_the_proxy(done):
                passed, codes[title] = False, "went past the proxy, to the driver itself"
            if not passed:
                report.say(f"{name} {title}: {done.err.strip()[-800:]}")
        report.put(name, codes)
        if codes["native"] == "pass" and set(codes.values()) != {"pass"}:
            differ.append(name)
    if differ:
        raise Failed("pass natively and not through the proxy: " + ", ".join(differ))
    if len(missing) == len(THIRD_PARTY):
        raise Refused(f"none of these is here: {', '.join(missing)}")
    if not any(isinstance(c, dict) and c["native"] == "pass" for c in report.figures.values()):
        raise Failed("none passes natively: nothing was compared")


@stage(70, 25, call=3)
def c_triton(setup: Setup, report: Report) -> None:
    """Triton kernels by Triton's own launcher, without the plugin, which is compiled there: natively and through the proxy, bit for bit."""
    need = setup.native().run([torch_python(setup), "-c", "import triton, torch"], 40)
    if need.code:
        raise Refused(f"Triton or PyTorch cannot be imported: {need.brief()}")
    if not shutil.which("gcc") and not shutil.which("cc"):
        raise Refused("Triton's launcher needs a C compiler, and none is here")
    line = [torch_python(setup), str(setup.bundle / "programs" / "triton_program.py")]
    digests: dict[str, str | None] = {}
    for title, way in (("native", setup.native()), ("plain", setup.proxied("--plain"))):
        done = way.run(line, 45, TRITON_CACHE_DIR=str(setup.work / f"triton-{title}"), **WITHOUT_PLUGIN)  # fmt: skip
        passed = done.code == 0 and "PASS triton_program" in done.out
        digests[title] = digest_of(done.out) if passed else None
        refused = refusal_in(done.err)
        report.put(title, "pass" if passed else f"refused: {refused}" if refused else f"{done.code}: {done.brief()}")  # fmt: skip
        if not passed:
            report.say(f"{title}: {done.err.strip()[-1500:]}")
            if title == "native":
                raise Failed("it does not run natively: nothing was compared")
        if title != "native" and setup.past_the_proxy(done):
            raise Failed("it went past the proxy, to the driver itself")
    report.put("digests", digests)
    if digests["plain"] != digests["native"]:
        raise Failed("not the native numbers, or none")


MAY_BE_REFUSED = ("matmul",)  # chapters of torch_program.py


@stage(120, 40, call=3)
def c_torch(setup: Setup, report: Report) -> None:
    """PyTorch's unmodified wheel over devproxy's CUDA runtime, without the plugin: each chapter has the native numbers; what needs a math library is refused by name."""
    need = setup.native().run([torch_python(setup), "-c", TORCH_WITH_CUDA], 40)
    if need.code:
        raise Refused(f"no PyTorch with CUDA can be imported: {need.brief()}")
    line = [torch_python(setup), str(setup.bundle / "programs" / "torch_program.py")]
    results: dict[str, dict[str, str]] = {}
    refused: dict[str, str] = {}
    # Twice natively: a chapter whose own numbers are not the same twice cannot be compared.
    for title, way in (
        ("native", setup.native()),
        ("plain", setup.proxied("--plain")),
        ("native_again", setup.native()),
    ):
        done = way.run(line, 60, **WITHOUT_PLUGIN)
        found = re.findall(r"^chapter (\w+) (digest \w+|error .*)$", done.out, re.M)
        results[title] = dict(found)
        whole = done.code == 0 and "\nDONE" in done.out
        report.put(f"run, {title}", {"code": done.code, "seconds": done.seconds, "chapters": len(found), "whole": whole})  # fmt: skip
        if not whole:
            report.say(f"{title}: {done.err.strip()[-1500:]}")
        if title == "plain":
            refused = {c: refusal_in(text) for c, text in re.findall(r"^chapter (\w+) begins$(.*?)(?=^chapter \w+ begins$|\Z)", done.err, re.M | re.S)}  # fmt: skip
            report.put("refusals", [f"{c}: {what}" for c, what in refused.items() if what])
            if setup.past_the_proxy(done):
                raise Failed("it went past the proxy, to the driver itself")
    native, again, plain = (results[title] for title in ("native", "native_again", "plain"))
    if not any(value.startswith("digest") for value in native.values()):
        raise Failed("no chapter runs natively: nothing was compared")
    wrong = []
    for name, want in native.items():
        got = plain.get(name, "not reached")
        if want.startswith("error"):
            verdict = f"does not run natively: {want}"
        elif got == want:
            verdict = "equal"
        elif name in MAY_BE_REFUSED and got.startswith("error") and refused.get(name):
            verdict = f"refused: {refused[name]}"
        elif want != again.get(name):
            verdict = "not the same twice natively: not compared"
        else:
            verdict = f"differs: {got}"
            wrong.append(name)
        report.put(name, verdict)
    if wrong:
        raise Failed("not the native numbers: " + ", ".join(wrong))


NUMBA_TESTS = "numba.cuda.tests.cudadrv"
# Managed memory beyond the card's can hang a GPU that others share; the others look at the machine and not at the driver.
NUMBA_LEFT_OUT = ("test_managed_alloc", "test_detect", "test_is_fp16")


@stage(120, 40, call=3)
def c_numba_tests(setup: Setup, report: Report) -> None:
    """numba-cuda's own tests of its driver layer, by name: what passes natively passes through the proxy, or is refused."""
    program = str(setup.bundle / "programs" / "numba_tests.py")
    names = setup.native().run([sys.executable, program, "--list", NUMBA_TESTS], 40)
    if names.code or not names.out.split():
        raise Refused(f"numba-cuda's tests are not here: {names.brief()}")
    modules = [m for m in names.out.split() if m.rsplit(".", 1)[1] not in NUMBA_LEFT_OUT]
    report.put("left_out", NUMBA_LEFT_OUT)
    results: dict[str, dict[str, str]] = {"native": {}, "plain": {}}
    broken: dict[str, str] = {}
    ways = {"native": setup.native(), "plain": setup.proxied("--plain")}

    def one(job: tuple[str, str]) -> None:
        module, title = job
        done = ways[title].run([sys.executable, program, module], 35)
        with report.lock:
            results[title].update(re.findall(r"^test (\S+) (.*)$", done.out, re.M))
            if "\nDONE" not in f"\n{done.out}":
                broken[f"{module} {title}"] = f"{done.code}: {done.brief()}"

    with concurrent.futures.ThreadPoolExecutor(max(1, min(6, (os.cpu_count() or 2) // 2))) as pool:
        list(pool.map(one, [(m, w) for m in modules for w in ways]))
    native, plain = results["native"], results["plain"]
    passed = {name for name, how in native.items() if how == "ok"}
    differ = {n: plain.get(n, "not reached") for n in sorted(passed) if plain.get(n) != "ok"}
    refused = {n: how for n, how in differ.items() if "NOT_SUPPORTED" in how}
    others = {n: how for n, how in differ.items() if n not in refused}
    report.put("counted", {"modules": len(modules), "native_ok": len(passed), "also_ok": len(passed) - len(differ), "refused": len(refused), "otherwise": len(others)})  # fmt: skip
    report.put("broken_modules", broken)
    report.put("refused", refused)
    report.put("otherwise", others)
    if others:
        raise Failed(f"{len(others)} tests pass natively, and neither pass nor are refused: " + ", ".join(list(others)[:20]))  # fmt: skip
    if not passed:
        raise Failed("no test passes natively: nothing was compared")
