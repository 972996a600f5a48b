# SPDX-License-Identifier: Apache-2.0
"""A whole job through checkpoint, kill -9 and restore; and rates of device memory moved."""

from __future__ import annotations

import concurrent.futures
import contextlib
import glob
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devproxy import proctree
from gpucheck.ends import Failed, Refused
from gpucheck.gpt2 import gate_of, gpt2_digest, gpt2_steps, open_gate, steps_in
from gpucheck.report import Report
from gpucheck.running import Way, digest_of, run, wait_for
from gpucheck.setup import Setup, earlier
from gpucheck.subjects import WITHOUT_PLUGIN, ballast_mib, missing_of, subjects
from gpucheck.torch_sides import torch_ways

PCIE_TARGET = 0.8  # of what e_dump measured


def rate(setup: Setup, size: int, seconds: float, way: str) -> dict[str, Any]:
    """Of bytes moved between device and host memory, against the PCIe rate of this campaign. way: out or in."""
    speed = size / seconds / 1e9 if seconds > 0 else 0.0
    facts: dict[str, Any] = {"bytes": size, "s": round(seconds, 4), "GBps": round(speed, 2)}
    if pcie := earlier(setup, "e_dump").get("pcie_GBps", {}).get(way):
        facts |= {"of_pcie": round(speed / pcie, 3), "target_met": speed >= PCIE_TARGET * pcie}
    return facts


def criu_trouble(setup: Setup) -> str:
    """Why CRIU does not work here, or nothing."""
    criu = setup.bundle / "criu" / "sbin" / "criu"
    if not criu.exists():
        return "CRIU does not work here (the bundle was made without CRIU)"
    if setup.rehearse:
        return ""
    checked = run([str(criu), "check"], dict(os.environ), 15)
    return f"CRIU does not work here ({checked.brief()})" if checked.code else ""


@dataclass(frozen=True)
class Life:
    """A job of tests/subjects that is killed and restored. first, second: the steps at which it is checkpointed, and killed.
    gated: it stops behind the second until it has been restored."""

    name: str
    line: list[str]
    way: Way  # has the name and the store
    first: int
    second: int
    start_s: float
    gated: bool = False
    restore_options: tuple[str, ...] = ()


def checkpoint_of(setup: Setup, report: Report, subject: str) -> None:
    line = subjects(setup)[subject]
    if missing := missing_of(subject, line, setup):
        raise Refused(missing)
    if subject != "gpt2":
        steps = "300" if setup.small else "400"
        line += ["--steps", steps, "--ballast-mib", str(ballast_mib(setup, subject))]
    name = f"gpucheck-{subject}"
    job_options = ("--name", name, "--store", str(store_of(setup, name)))
    if subject == "gpt2":
        _, job_way = torch_ways(setup, *job_options)
        want = gpt2_digest(setup, report, gpt2_steps(setup))
        job = Life(name, line, job_way, 15, 25, 80.0, gated=True)
    else:
        job_way = setup.proxied(*job_options)
        if subject == "torch":
            job_way = Way(job_way.prefix, job_way.env | WITHOUT_PLUGIN)
        native = setup.native().run(line, 40)
        want = digest_of(native.out)
        report.put("native", {"code": native.code, "digest": want, "seconds": native.seconds})
        if native.code:
            raise Failed(f"the training program does not run natively: {native.brief()}")
        job = Life(name, line, job_way, 30, 60, 40.0)
    if live(setup, report, job) == want:
        return
    # Is it the checkpoint's fault?
    plain = Way(setup.proxied("--plain").prefix, job_way.env).run(line, 40)
    report.put("proxied", {"code": plain.code, "digest": digest_of(plain.out)})
    raise Failed("the restored run is not the native one")


def store_of(setup: Setup, name: str) -> Path:
    return setup.work / f"{name}.store"


def live(setup: Setup, report: Report, life: Life) -> str | None:
    """Checkpoint, kill -9 of everything, restore, the end. Returns the digest; raises Failed."""
    name, line, job_way, first, second = life.name, life.line, life.way, life.first, life.second
    log = setup.work / f"{name}.log"
    if life.gated:
        open_gate(setup, name, str(second))
        job_way = Way(job_way.prefix, job_way.env | {"TEST_GATE": str(gate_of(setup, name))})
    # The servers say in their logs how long device memory took; these are in the runtime folder while the job lives.
    env = job_way.env | {"DEVPROXY_LOG": "warn,server=info"}
    ctl = [sys.executable, "-m", "devproxy.cli.ctl"]
    with open(log, "wb") as out:
        whole = [*job_way.prefix, *line, "--seconds-per-step", "0.03"]
        job = subprocess.Popen(whole, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)  # fmt: skip
    wait_for(
        lambda: steps_in(log) >= first or job.poll() is not None, life.start_s, f"step {first}"
    )
    if job.poll() is not None:
        raise Failed(f"the job ended with {job.returncode}: {log.read_text()[-800:]}")
    begin = time.perf_counter()
    image = run([*ctl, "checkpoint", name, "--json"], env, 60)
    facts = json.loads(image.out) if image.code == 0 else image.brief()
    report.put("checkpoint", {"code": image.code, "s": round(time.perf_counter() - begin, 2), "facts": facts})  # fmt: skip
    if image.code:
        raise Failed(f"devproxy checkpoint: {(image.out + image.err)[-1500:]}")
    if told := servers_say(setup, "dumped"):
        report.put("dump", rate(setup, *told, "out"))
        report.say(f"dump {report.figures['dump']}")
    # A machine may give fresh memory slowly, a virtual one above all: once more, in pages that it has given already.
    if run([*ctl, "checkpoint", name, "--json"], env, 60).code == 0 and (told := servers_say(setup, "dumped")):  # fmt: skip
        report.put("dump_again", rate(setup, *told, "out"))
        report.say(f"again {report.figures['dump_again']}")
    wait_for(lambda: steps_in(log) >= second, 30, f"step {second}")
    report.put("killed", kill_marked(f"DEVPROXY_SHM_DIR={setup.shm()}\0".encode()))
    at = steps_in(log)
    if life.gated:
        open_gate(setup, name, "end")
    begin = time.perf_counter()
    line_of_restore = [*ctl, "restore", name, "--store", str(store_of(setup, name)), "--output", str(log), *life.restore_options, "--json"]  # fmt: skip
    told = None
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        restoring = pool.submit(run, line_of_restore, env, 60)
        while not restoring.done():  # afterwards the job may end, and the log with it
            told = servers_say(setup, "loaded") or told
            time.sleep(0.02)
        restore = restoring.result()
    facts = json.loads(restore.out) if restore.code == 0 else restore.brief()
    report.put("restore", {"code": restore.code, "s": round(time.perf_counter() - begin, 2), "killed_at_step": at, "facts": facts})  # fmt: skip
    if restore.code:
        raise Failed(f"devproxy restore: {(restore.out + restore.err)[-1500:]}")
    if told := servers_say(setup, "loaded") or told:
        report.put("load", rate(setup, *told, "in"))
        report.say(f"load {report.figures['load']}")
    wait_for(lambda: digest_of(log.read_text()), 40, "the digest")
    got, nonces = (
        digest_of(log.read_text()),
        set(re.findall(r"^(\w+) step \d+ ", log.read_text(), re.M)),
    )
    report.put("digest_after_restore", got)
    report.put("one_process_throughout", len(nonces) == 1)
    if len(nonces) != 1:
        raise Failed("the restored job is another process")
    return got


def servers_say(setup: Setup, what: str) -> tuple[int, float] | None:
    """Bytes and seconds of the last line about device memory `dumped` or `loaded` in the logs of the living servers."""
    found = []
    # Not by pathlib: a folder that goes in the middle of the walk, as that of staging does, would be an error.
    for name in glob.glob("**/*.log", root_dir=setup.shm(), recursive=True):
        path = setup.shm() / name
        with contextlib.suppress(OSError):  # a job that ends takes its folder away
            found += re.findall(
                rf"\b{what}: bytes=(\d+) us=(\d+)", path.read_text(errors="replace")
            )
    return (int(found[-1][0]), int(found[-1][1]) / 1e6) if found else None


def kill_marked(mark: bytes) -> int:
    """kill -9 of every process of this campaign's runtime folder but ourselves. Returns how many."""
    killed: set[int] = set()
    for _ in range(100):
        found = proctree.with_environment(mark)
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)
    return len(killed)
