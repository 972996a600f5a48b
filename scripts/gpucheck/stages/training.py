# SPDX-License-Identifier: Apache-2.0
"""Training programs: their numbers and their steps' times."""

from __future__ import annotations

import concurrent.futures
import re

from gpucheck.ends import Failed, Refused
from gpucheck.report import Report
from gpucheck.running import digest_of, refusal_in
from gpucheck.setup import Setup
from gpucheck.stage import stage
from gpucheck.subjects import missing_of, subjects

# Options of a step that is bound by launches, and of one of the usual size.
SIZES = {
    "driver": {
        "launch_bound": ["--rows", "1", "--steps", "2000"],
        "usual": ["--rows", "4096", "--steps", "100"],
    },
    "cudart": {
        "launch_bound": ["--rows", "1", "--width", "64", "--adam", "1", "--steps", "4000"],
        "usual": ["--rows", "2048", "--width", "1024", "--adam", "1", "--steps", "150"],
    },
    "numba": {
        "launch_bound": ["--rows", "1", "--adam", "1", "--steps", "1000"],
        "usual": ["--rows", "512", "--width", "256", "--adam", "1", "--steps", "150"],
    },
}
STEP_TARGETS = {"launch_bound": 1.05, "usual": 1.01}  # of the native time
TURNS = {"driver": 2, "cudart": 2, "numba": 1}


@stage(120, 40, call=2)
def c_training(setup: Setup, report: Report) -> None:
    """Training programs (driver API; CUDA C++): bit for bit the same, their steps' times, and two at once on one GPU."""
    train_all(setup, report, "driver", "cudart")


@stage(150, 45, call=3)
def c_training_numba(setup: Setup, report: Report) -> None:
    """The same with the training program on numba-cuda, which compiles its kernels in each run."""
    train_all(setup, report, "numba")


def train_all(setup: Setup, report: Report, *which: str) -> None:
    wrong, compared = [], 0
    for subject in which:
        line = subjects(setup)[subject]
        if missing := missing_of(subject, line, setup):
            report.put(subject, missing)
            continue
        try:
            wrong += compare_training(setup, report, subject, line)
            compared += 1
        except Failed as failure:
            wrong.append(str(failure))
    if wrong:
        raise Failed("; ".join(wrong))
    if not compared:
        raise Refused("none of the training programs is here")


def compare_training(setup: Setup, report: Report, subject: str, line: list[str]) -> list[str]:
    """What was not as it is natively. Raises Failed when a run of it ends badly."""
    wrong = []
    # namespaces: the job that can be checkpointed, which is what devproxy is for.
    ways = {
        "native": setup.native(),
        "plain": setup.proxied("--plain"),
        "namespaces": setup.proxied(),
    }
    for size, options in SIZES[subject].items():
        steps: dict[str, list[float]] = {title: [] for title in ways}
        digests: dict[str, set[str | None]] = {title: set() for title in ways}
        for _ in range(TURNS[subject]):
            for title, way in ways.items():
                done = way.run([*line, *options], 30)
                found = re.search(r"median step ([\d.]+) us", done.out)
                if done.code or not found:
                    said = refusal_in(done.err) or done.brief()
                    raise Failed(f"{subject}, {size}, {title}: {done.code}: {said}")
                steps[title].append(float(found[1]))
                digests[title].add(digest_of(done.out))
        least = {title: min(took) for title, took in steps.items()}
        ratios = {t: round(least[t] / least["native"], 3) for t in ways if t != "native"}
        report.put(f"{subject} {size}", {
            "step_us": steps, "ratio": ratios,
            "target_met": {title: ratio <= STEP_TARGETS[size] for title, ratio in ratios.items()},
            "digests": {title: sorted(map(str, some)) for title, some in digests.items()},
        })  # fmt: skip
        if len(set[str | None]().union(*digests.values())) != 1:
            wrong.append(f"{subject} {size} has other numbers")
    more = ["--steps", "300"]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: ways["plain"].run([*line, *more], 40), range(2)))
    alone = ways["native"].run([*line, *more], 30)
    together = {"native": digest_of(alone.out), **{f"of_two_{n}": digest_of(one.out) for n, one in enumerate(both)}}  # fmt: skip
    report.put(f"{subject} two_at_once", together)
    if len(set(together.values())) != 1 or None in together.values():
        wrong.append(f"two of {subject} at once: " + "; ".join(one.brief() for one in both if one.code))  # fmt: skip
    return wrong
