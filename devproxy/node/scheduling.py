# SPDX-License-Identifier: Apache-2.0
"""What the kernel knows of each thread and CRIU does not keep: its CPUs, its timer slack, its I/O priority, and which of
its mappings a core dump has."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from typing import Any

from devproxy import procfs, proctree
from devproxy.log import say

Facts = dict[str, Any]
_IOPRIO = {"x86_64": (251, 252), "aarch64": (30, 31)}  # ioprio_set(2), ioprio_get(2)
_IOPRIO_WHO_PROCESS = 1
_FILTER = "coredump_filter"  # core(5)


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


def _io_priority(tid: int, value: int | None = None) -> int | None:
    """Sets it, where there is a value. None: this machine does not say. Raises OSError where it does not do it."""
    calls = _IOPRIO.get(platform.machine())
    if calls is None:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    if value is None:
        found = libc.syscall(calls[1], _IOPRIO_WHO_PROCESS, tid)
        return found if found >= 0 else None
    if libc.syscall(calls[0], _IOPRIO_WHO_PROCESS, tid, value) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return value


def _dumped(tid: int) -> str | None:
    try:
        with open(f"/proc/{tid}/{_FILTER}", encoding="ascii") as file:
            return "0x" + file.read().strip()
    except OSError:
        return None


def collect(root: int) -> dict[str, Facts]:
    """For the manifest: the threads that are not as our own, by their numbers in the job."""
    own = os.getpid()
    usual_cpus, usual_slack = os.sched_getaffinity(0), _slack(own)
    usual_io, usual_filter = _io_priority(own), _dumped(own)
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
        if (priority := _io_priority(tid)) is not None and priority != usual_io:
            facts["io_priority"] = priority
        if (dumped := _dumped(tid)) is not None and dumped != usual_filter:
            facts[_FILTER] = dumped
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
        if (priority := facts.get("io_priority")) is not None:
            try:
                _io_priority(tid, priority)
            except OSError as error:
                say(f"thread {inner} of the job has lost its I/O priority: {error.strerror}")
        if dumped := facts.get(_FILTER):
            try:
                with open(f"/proc/{tid}/{_FILTER}", "w", encoding="ascii") as file:
                    file.write(dumped)
            except OSError as error:
                say(f"thread {inner} of the job has lost its {_FILTER}: {error.strerror}")
