# SPDX-License-Identifier: Apache-2.0
"""Several of a job's GPUs on one real GPU: their collectives by our own kernels in the server, without NCCL."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import sys
import tempfile
import time
from typing import Any

from gpucheck.checkpoints import Life, criu_trouble, live, store_of
from gpucheck.ends import Failed, Refused
from gpucheck.report import Report
from gpucheck.running import Done, digest_of, run
from gpucheck.setup import Setup
from gpucheck.stage import stage
from gpucheck.torch_sides import need_plugin, torch_python, torch_ways

RANKS = 4  # of the collectives
# Each part of so many has every kind of collective in every type with every operation.
PARTS = 7
SWEEP_S = 25.0
PROGRAM_S = 40.0  # of one program, before it is ended


@stage(150, 75, call=2)
def t_share(setup: Setup, report: Report) -> None:
    """Several ranks on one GPU (--gpu 0,0): all collectives by our kernels against a numpy model, groups and graphs of them, what ties them to the work around them, a DDP training against both ranks in one native process, the same with replica splicing, that job killed and restored: bit for bit."""
    facts = need_plugin(setup)
    wrong: list[str] = []
    missing: list[str] = []
    if facts["numpy"]:
        wrong += collectives(setup, report) + scenarios(setup, report)
    else:
        missing.append("the programs of tests/comm need numpy, which that Python has not")
    wrong += links(setup, report)
    want, found = training(setup, report)
    wrong += found or spliced(setup, report, want)
    if want and not found:
        missing += life(setup, report, want, wrong)
    elif found:
        report.say("the life was left out: the undisturbed job is wrong already")
    if wrong:
        raise Failed("; ".join(wrong))
    if missing:
        raise Refused("; ".join(missing))


# -- collectives ------------------------------------------------------------------------------------------------------


def comm_program(setup: Setup, ranks: int, name: str, *arguments: str) -> Done:
    """One of tests/comm, its ranks on one GPU."""
    _, way = torch_ways(setup, on=",".join("0" * ranks))
    program, folder = setup.bundle / "programs" / "comm" / name, tempfile.mkdtemp(dir=setup.work)
    done = way.run([torch_python(setup), str(program), folder, str(ranks), *arguments], PROGRAM_S)
    (setup.work / f"{name}-{'-'.join(arguments)}.log").write_text(done.out + done.err)
    return done


def passed(done: Done) -> bool:
    return done.code == 0 and done.out.splitlines()[-1:] == ["PASS"]


def collectives(setup: Setup, report: Report) -> list[str]:
    """As many parts as there is time for, at least one. Returns what is wrong."""
    begin, longest, cases = time.monotonic(), 0.0, 0
    parts: list[str] = []
    # A rehearsal does a small part.
    plan = [(3, 37)] if setup.small else [((3 + n) % PARTS, PARTS) for n in range(PARTS)]
    wrong: list[str] = []
    for part, of in plan:
        if parts and time.monotonic() - begin + longest > SWEEP_S:
            break
        done = comm_program(setup, RANKS, "collectives.py", str(part), str(of))
        if not passed(done):
            wrong.append(f"collectives, part {part} of {of}: {what_failed(done)}")
            break
        longest = max(longest, done.seconds)
        cases += int(done.out.split()[0])
        parts.append(f"{part} of {of}")
    report.put("collectives", {"ranks": RANKS, "parts": parts, "cases": cases, "comparisons": cases * RANKS, "s": round(time.monotonic() - begin, 2), "longest_part_s": longest})  # fmt: skip
    return wrong


def scenarios(setup: Setup, report: Report) -> list[str]:
    done = comm_program(setup, 3, "scenarios.py")
    took = {name: float(s) for s, name in re.findall(r"^([\d.]+) s (\w+)$", done.out, re.M)}
    report.put("scenarios", {"ranks": 3, "passed": passed(done), "s": done.seconds, "each_s": took})
    return [] if passed(done) else [f"scenarios: {what_failed(done)}"]


def what_failed(done: Done) -> str:
    """The first results that are wrong, and how a rank ended; the launcher's own error comes last."""
    every = done.err.splitlines()
    wrong = [line for line in every if line.startswith("wrong: ")]
    ends = [line for line in every if re.match(r"\w*(Error|Exception)\b|rank \d+ of", line)]
    return (" | ".join(dict.fromkeys([*wrong[:2], *ends[:3]])) or done.brief())[:900]


def links(setup: Setup, report: Report) -> list[str]:
    """What ties collectives to the work around them. Returns what is wrong."""
    _, way = torch_ways(setup, on="0,0")
    program = str(setup.bundle / "programs" / "torch_links.py")
    done = way.run([torch_python(setup), program, "2", *(["small"] if setup.small else [])], PROGRAM_S)  # fmt: skip
    said = [line.removeprefix("wrong: ") for line in done.out.splitlines() if line.startswith("wrong: ")]  # fmt: skip
    report.put("links", {"ranks": 2, "passed": passed(done), "s": done.seconds, "wrong": said[:40]})
    return [] if passed(done) else [f"links: {'; '.join(said[:3]) or done.brief()}"]


# -- DDP --------------------------------------------------------------------------------------------------------------


def job_line(setup: Setup, mode: str) -> list[str]:
    """--job or --reference, of two ranks."""
    program, steps = setup.bundle / "programs" / "torch_ranks.py", "40" if setup.small else "60"
    return [torch_python(setup), str(program), mode, "2", "--steps", steps, "--small", str(int(setup.small))]  # fmt: skip


def facts_of(done: Done) -> dict[str, Any]:
    median = re.search(r"median step ([\d.]+) us", done.out)
    return {
        "code": done.code,
        "s": done.seconds,
        "step_us": float(median[1]) if median else None,
        "digest": digest_of(done.out),
        "ranks": dict(re.findall(r"^(rank \d+): (.+)$", done.out, re.M)),
        "said": done.brief() if done.code else "",
    }


def training(setup: Setup, report: Report) -> tuple[str, list[str]]:
    """The digest that is right, and what is wrong."""
    native, _ = torch_ways(setup)
    _, shared = torch_ways(setup, on="0,0")
    want = native.run(job_line(setup, "--reference"), PROGRAM_S)
    ours = facts_of(want)
    report.put("reference", ours)
    if want.code or not ours["digest"]:
        raise Failed(f"the reference does not run natively: {want.brief()}")
    got = shared.run(job_line(setup, "--job"), PROGRAM_S)
    theirs = facts_of(got)
    report.put("ddp", theirs)
    # The reference computes both ranks one behind the other, and no collective.
    if ours["step_us"] and theirs["step_us"]:
        report.put("step_of_two_sharing_to_two_natively", round(theirs["step_us"] / ours["step_us"], 2))  # fmt: skip
    report.put("ddp_equal", ours["digest"] == theirs["digest"])
    if ours["digest"] == theirs["digest"]:
        return ours["digest"], []
    if got.code or not theirs["digest"]:
        return ours["digest"], [f"the DDP job ended with {got.code}: {got.brief()}"]
    report.put("first_other_loss_at_step", first_other(want.out, got.out))
    return ours["digest"], ["two ranks on one GPU do not train as the reference"]


def spliced(setup: Setup, report: Report, want: str) -> list[str]:
    """The DDP job once more, with replica splicing. Returns what is wrong."""
    name = "gpucheck-spliced"
    _, way = torch_ways(setup, "--plain", "--name", name, on="0,0")
    ask = [sys.executable, "-m", "devproxy.cli.ctl", "status", name, "--json"]
    counts: dict[str, Any] = {}
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        job = thread.submit(way.run, job_line(setup, "--job"), PROGRAM_S, DEVPROXY_SPLICING="eager")
        while not job.done():
            with contextlib.suppress(ValueError, KeyError, IndexError):
                servers = json.loads(run(ask, way.env, 10).out)["servers"]
                counts = servers[0]["splicing"] or counts
            time.sleep(0.1)
    got = facts_of(job.result())
    equal = got["digest"] == want
    report.put("spliced", got | {"equal": equal, "counts": counts})
    if not equal:
        return [f"spliced ranks do not train as the reference: {job.result().brief()}"]
    return [] if counts.get("squashed") else ["nothing was spliced"]


def first_other(a: str, b: str) -> int | None:
    """Of rank 0's losses."""
    pairs = zip(*(re.findall(r" step (\d+) loss (\S+)", text) for text in (a, b)), strict=False)
    return next((int(one[0]) for one, other in pairs if one != other), None)


def life(setup: Setup, report: Report, want: str, wrong: list[str]) -> list[str]:
    """The DDP job is killed with -9 and restored on one GPU. Returns what is not here for it; adds to wrong."""
    if trouble := criu_trouble(setup):
        return [trouble]
    name = "gpucheck-share"
    _, way = torch_ways(setup, "--name", name, "--store", str(store_of(setup, name)), on="0,0")
    begin = time.monotonic()
    try:
        job = Life(name, job_line(setup, "--job"), way, 15, 25, PROGRAM_S, gated=True, restore_options=("--gpu", "0,0"))  # fmt: skip
        if live(setup, report, job) != want:
            wrong.append("the restored DDP job does not end as the reference")
    except Failed as failure:
        wrong.append(f"the life of the DDP job: {failure}")
    report.put("life_s", round(time.monotonic() - begin, 2))
    return []
