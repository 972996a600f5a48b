# SPDX-License-Identifier: Apache-2.0
"""Whole jobs of PyTorch through the plugin."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import sys
import time

from gpucheck import running
from gpucheck.campaign import time_left_s
from gpucheck.checkpoints import checkpoint_of, criu_trouble, rate, servers_say
from gpucheck.ends import Failed, Refused
from gpucheck.gpt2 import at_step, gpt2_digest, gpt2_job, gpt2_line, gpt2_steps, open_gate, steps_in
from gpucheck.report import Report
from gpucheck.running import digest_of, run, wait_for
from gpucheck.setup import Setup
from gpucheck.stage import stage
from gpucheck.torch_sides import need_plugin, torch_ways


@stage(90, 65)
def t_migrate(setup: Setup, report: Report) -> None:
    """Device memory and torch's state out and in, without CRIU: the GPT-2 job's server is replaced on the same GPU (devproxy migrate), twice; the digest is the native one."""
    need_plugin(setup)
    steps = gpt2_steps(setup)
    want = gpt2_digest(setup, report, steps)
    log, name = setup.work / "gpt2-migrate.log", "gpucheck-migrate"
    ctl = [sys.executable, "-m", "devproxy.cli.ctl"]
    open_gate(setup, name, str(steps // 3 + 10))
    with gpt2_job(setup, name, steps, log) as (job, env):
        for turn, step in ((1, steps // 6), (2, steps // 3)):
            begun = functools.partial(at_step, log, step, job)
            wait_for(begun, 60, f"step {step}")
            if job.poll() is not None:
                raise Failed(f"the job ended with {job.returncode}: {log.read_text()[-800:]}")
            begin = time.perf_counter()
            moved = run([*ctl, "migrate", name, "--to", "0", "--anew", "--json"], env, 40)
            facts = json.loads(moved.out) if moved.code == 0 else moved.brief()
            report.put(f"migrate {turn}", {"code": moved.code, "s": round(time.perf_counter() - begin, 2), "at_step": steps_in(log), "facts": facts})  # fmt: skip
            if moved.code:
                raise Failed(f"devproxy migrate: {(moved.out + moved.err)[-1200:]}")
            for what, way in (("dumped", "out"), ("loaded", "in")):
                if told := servers_say(setup, what):
                    report.put(f"{what} {turn}", rate(setup, *told, way))
        open_gate(setup, name, "end")
        wait_for(lambda: digest_of(log.read_text()) or job.poll() is not None, 60, "the digest")
        wait_for(lambda: digest_of(log.read_text()), 2, f"the digest: {log.read_text()[-600:]}")
    got = digest_of(log.read_text())
    report.put("digests", {"native": want, "after": got})
    if got != want:
        raise Failed("after two changes of the server the numbers are others")


@stage(120, 40)
def t_checkpoint(setup: Setup, report: Report) -> None:
    """The GPT-2 job: checkpoint, kill -9 of everything, restore, the native digest. Where CRIU works; else t_migrate is what there is."""
    need_plugin(setup)
    if trouble := criu_trouble(setup):
        raise Refused(f"{trouble}: t_migrate tests dump and restore of the device's side")
    checkpoint_of(setup, report, "gpt2")


@stage(70, 35)
def t_two(setup: Setup, report: Report) -> None:
    """Two GPT-2 jobs at once on one GPU: both have the native digest."""
    need_plugin(setup)
    steps = gpt2_steps(setup)
    want = gpt2_digest(setup, report, steps)
    _, way = torch_ways(setup)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: way.run(gpt2_line(setup, steps), time_left_s() / running.patience - 3), range(2)))  # fmt: skip
    for number, done in enumerate(both):
        report.put(f"job {number}", {"code": done.code, "seconds": done.seconds, "digest": digest_of(done.out), "said": done.brief() if done.code else ""})  # fmt: skip
    report.put("native digest", want)
    if any(digest_of(done.out) != want for done in both):
        raise Failed("not the native digest in both")
