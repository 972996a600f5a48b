# SPDX-License-Identifier: Apache-2.0
"""What the scheduler knows of each thread and CRIU does not keep: its CPUs and its timer slack."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from devproxy import procfs, proctree
from devproxy.log import say

Facts = dict[str, Any]


def _threads(root: int) -> Iterator[tuple[int, str]]:
    """(thread, its number in the job's namespace) of each thread of the tree."""
    for pid in [root, *proctree.descendants(root)]:
        try:
            tids = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
        except OSError:
            continue  # it has ended
        for tid in tids:
            if status := procfs.status(pid, tid):
                yield tid, str(status.inner_pid)


def _slack(tid: int) -> int | None:
    try:
        with open(f"/proc/{tid}/timerslack_ns", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def collect(root: int) -> dict[str, Facts]:
    """For the manifest: the threads that are not as our own, by their numbers in the job."""
    usual_cpus, usual_slack = os.sched_getaffinity(0), _slack(os.getpid())
    found: dict[str, Facts] = {}
    for tid, inner in _threads(root):
        facts: Facts = {}
        try:
            if (cpus := os.sched_getaffinity(tid)) != usual_cpus:
                facts["cpus"] = sorted(cpus)
        except OSError:
            continue
        if (slack := _slack(tid)) is not None and slack != usual_slack:
            facts["slack_ns"] = slack
        if facts:
            found[inner] = facts
    return found


def restore(root: int, wanted: dict[str, Facts]) -> None:
    """What this machine cannot do is said."""
    if not wanted:
        return
    for tid, inner in _threads(root):
        facts = wanted.get(inner, {})
        if cpus := facts.get("cpus"):
            try:
                os.sched_setaffinity(tid, cpus)
            except OSError as error:
                names = ",".join(map(str, cpus))
                say(
                    f"thread {inner} of the job ran on CPUs {names} alone, and may use all here: {error.strerror}"
                )
        if slack := facts.get("slack_ns"):
            try:
                with open(f"/proc/{tid}/timerslack_ns", "w", encoding="ascii") as file:
                    file.write(str(slack))
            except OSError as error:
                say(
                    f"thread {inner} of the job has lost its timer slack of {slack} ns: {error.strerror}"
                )
