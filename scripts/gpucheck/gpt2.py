# SPDX-License-Identifier: Apache-2.0
"""The GPT-2 job: a training job that waits at a gate for what is done with it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from gpucheck.ends import Failed
from gpucheck.report import Report
from gpucheck.running import digest_of
from gpucheck.setup import Setup
from gpucheck.torch_sides import torch_python, torch_ways


def gpt2_line(setup: Setup, steps: int) -> list[str]:
    line = [torch_python(setup), str(setup.bundle / "programs" / "torch_train.py"), "--steps", str(steps)]  # fmt: skip
    if setup.small:
        return [*line, "--small", "1", "--ballast-mib", "16"]
    return [*line, "--ballast-mib", "1024"]


def gate_of(setup: Setup, name: str) -> Path:
    """How far the job may go (tests/subjects/gate.py): it waits for what is done with it, however long that takes."""
    return setup.work / f"{name}.gate"


def open_gate(setup: Setup, name: str, to: str) -> None:
    gate = gate_of(setup, name)
    fresh = gate.with_suffix(".fresh")
    fresh.symlink_to(to)
    fresh.rename(gate)


@contextlib.contextmanager
def gpt2_job(setup: Setup, name: str, steps: int, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str]]]:  # fmt: skip
    """A job in training, slowly, begun; yields it and the environment for devproxy's verbs."""
    _, way = torch_ways(setup, "--name", name, "--store", str(setup.work / f"{name}.store"))
    env = way.env | {"DEVPROXY_LOG": "warn,server=info", "TEST_GATE": str(gate_of(setup, name))}
    line = [*way.prefix, *gpt2_line(setup, steps), "--seconds-per-step", "0.08"]
    with open(log, "wb") as out:
        job = subprocess.Popen(line, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)  # fmt: skip
    try:
        yield job, env
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


def gpt2_digest(setup: Setup, report: Report, steps: int) -> str | None:
    """Of the native run, kept for the stages behind; a run of other steps is another one."""
    kept = setup.work / f"gpt2-{steps}.digest"
    if not kept.exists():
        native, _ = torch_ways(setup)
        done = native.run(gpt2_line(setup, steps), 60)
        report.put("native", {"code": done.code, "seconds": done.seconds, "median step": re.findall(r"median step ([\d.]+) us", done.out)})  # fmt: skip
        if done.code or not digest_of(done.out):
            raise Failed(f"the training program does not run natively: {done.brief()}")
        kept.write_text(digest_of(done.out) or "")
    return kept.read_text()


def gpt2_steps(setup: Setup) -> int:
    return 120 if setup.small else 200


def at_step(log: Path, step: int, job: subprocess.Popen[bytes]) -> bool:
    """Or has it ended?"""
    return steps_in(log) >= step or job.poll() is not None


def steps_in(path: Path) -> int:
    text = path.read_text(errors="replace") if path.exists() else ""
    return max(map(int, re.findall(r" step (\d+) ", text)), default=0)
