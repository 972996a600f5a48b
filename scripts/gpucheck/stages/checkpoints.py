# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: CRIU here, the driver's own, whole jobs."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time

from devproxy.machine import MIB
from gpucheck.checkpoints import checkpoint_of, rate
from gpucheck.driver import INT, U32, U64, Driver
from gpucheck.ends import Failed, Refused
from gpucheck.gpt2 import steps_in
from gpucheck.report import Report
from gpucheck.running import digest_of, run, wait_for
from gpucheck.setup import Setup, earlier
from gpucheck.stage import stage
from gpucheck.subjects import ballast_mib, subjects


@stage(40, 8, call=2)
def f_criu(setup: Setup, report: Report) -> None:
    """Is CRIU usable here, by its own check and by `devproxy doctor`?"""
    criu = setup.bundle / "criu" / "sbin" / "criu"
    if not criu.exists():
        raise Refused("the bundle was made without CRIU")
    report.put("version", run([str(criu), "--version"], dict(os.environ), 10).out.strip().splitlines()[:2])  # fmt: skip
    plain = run([str(criu), "check"], dict(os.environ), 15)
    report.put("check", {"code": plain.code, "said": (plain.out + plain.err).strip()[-1500:]})
    every = run([str(criu), "check", "--all"], dict(os.environ), 15)
    report.put("check_all", {"code": every.code, "said": (every.out + every.err).strip()[-1500:]})
    doctor = run([sys.executable, "-m", "devproxy.cli.ctl", "doctor"], setup.proxied_env(), 30)
    report.put("doctor", {"code": doctor.code, "said": (doctor.out + doctor.err).strip()[-3000:]})
    if plain.code:
        raise Failed("criu check: " + plain.brief())


@stage(60, 20, call=2, direct=True, needs=("e_dump",))
def f_cuda_checkpoint(setup: Setup, report: Report) -> None:
    """The driver's own checkpoints (cuCheckpointProcess*) of the training program that f_checkpoint takes, running natively."""
    control = Driver(setup.driver)
    control.call("cuInit", U32(0))
    names = ("Lock", "Checkpoint", "GetState", "Restore", "Unlock")
    there = {n: control.has(f"cuCheckpointProcess{n}") for n in names}
    report.put("api", there)
    report.put("cuda-checkpoint", shutil.which("cuda-checkpoint"))
    if not all(there.values()):
        raise Refused("the driver has no cuCheckpointProcess*")
    log, mib = setup.work / "native-train.log", ballast_mib(setup, "driver")
    line = [*subjects(setup)["driver"], "--steps", "150", "--ballast-mib", str(mib)]
    whole = setup.native().run(line, 30)
    report.put("digest_uninterrupted", digest_of(whole.out))
    if whole.code:
        raise Failed(f"the training program does not run natively: {whole.brief()}")
    with open(log, "wb") as out:
        native = setup.native()
        slow = [*native.prefix, *line, "--seconds-per-step", "0.02"]
        job = subprocess.Popen(slow, env=native.env, stdout=out, stderr=out, start_new_session=True)
    wait_for(lambda: steps_in(log) >= 20 or job.poll() is not None, 20, "the training program's steps")  # fmt: skip
    if job.poll() is not None:
        raise Failed(f"the training program ended natively: {log.read_text()[-600:]}")
    zeros, state = (U64 * 8)(), INT(-1)
    lock = (U32 * 16)(10_000)
    took = {}
    for name, arguments in (("Lock", lock), ("Checkpoint", zeros), ("Restore", zeros), ("Unlock", zeros)):  # fmt: skip
        begin = time.perf_counter()
        code = control.result(f"cuCheckpointProcess{name}", INT(job.pid), arguments)
        took[name] = time.perf_counter() - begin
        report.put(name, {"result": control.text(code), "ms": round(took[name] * 1e3, 1)})
        control.result("cuCheckpointProcessGetState", INT(job.pid), ctypes.byref(state))
        report.put(f"state_after_{name}", state.value)
        if code:
            kind = Refused if code == 801 else Failed
            raise kind(f"cuCheckpointProcess{name}: {control.text(code)}")
    report.put("dump", rate(setup, mib * MIB, took["Checkpoint"], "out"))
    report.put("load", rate(setup, mib * MIB, took["Restore"], "in"))
    if job.wait(20):
        raise Failed(f"the training program ended with {job.returncode}: {log.read_text()[-600:]}")
    report.put("digest", digest_of(log.read_text()))
    if digest_of(log.read_text()) != digest_of(whole.out):
        raise Failed("after the driver's own checkpoint the numbers are others")


@stage(110, 40, call=2, needs=("e_dump",))
def f_checkpoint(setup: Setup, report: Report) -> None:
    """The whole job: checkpoint, kill -9 of everything, restore, equal to native; dump and load against the PCIe rate."""
    report.put("beside: cuCheckpointProcess*", {
        key: earlier(setup, "f_cuda_checkpoint").get(key) for key in ("Lock", "Checkpoint", "Restore", "Unlock", "dump", "load")
    })  # fmt: skip
    checkpoint_of(setup, report, "driver")


@stage(110, 35, call=3, needs=("e_dump",))
def f_checkpoint_cudart(setup: Setup, report: Report) -> None:
    """The same with a training program in CUDA C++, on the runtime."""
    checkpoint_of(setup, report, "cudart")


@stage(110, 45, call=3, needs=("e_dump",))
def f_checkpoint_numba(setup: Setup, report: Report) -> None:
    """The same with a training program on numba-cuda, which compiles its kernels while it runs."""
    checkpoint_of(setup, report, "numba")


@stage(110, 45, call=3, needs=("e_dump",))
def f_checkpoint_torch(setup: Setup, report: Report) -> None:
    """The same with PyTorch's unmodified wheel, without the plugin: a model of element-wise layers under AdamW."""
    checkpoint_of(setup, report, "torch")
