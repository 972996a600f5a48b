# SPDX-License-Identifier: Apache-2.0
"""`devproxy top`: what all jobs of this user are doing, again and again."""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import time
from dataclasses import dataclass
from typing import Any

from devproxy.cli import jobs
from devproxy.cli.output import as_json
from devproxy.cli.table import write_table
from devproxy.errors import Refused
from devproxy.machine import show_bytes

HOME_AND_CLEAR = "\x1b[H\x1b[J"
OTHER_SCREEN, FIRST_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
COLUMNS = [
    "JOB",
    "STATE",
    "GPUS",
    "MEMORY",
    "LAUNCHES/S",
    "STEP",
    "STEPS",
    "IMAGE",
    "NEXT",
]  # 80 columns hold them


@dataclass(frozen=True)
class Sample:
    """Launches of one job up to a moment; their count starts anew with each server."""

    at_s: float
    launches: int


def sample(job: dict[str, Any], at_s: float) -> Sample:
    totals = (server.get("totals", {}) for server in jobs.everywhere(job))
    return Sample(at_s, sum(counts.get("launches", 0) for counts in totals))


def row(job: dict[str, Any], before: Sample | None, now: Sample, unix_s: float) -> dict[str, Any]:
    """What one line shows, as numbers; None for what is not known."""
    answered = [server for server in jobs.everywhere(job) if not jobs.silent(server)]
    memory = [server.get("memory", {}) for server in answered]
    launches_per_s = None
    if before and now.at_s > before.at_s and now.launches >= before.launches:
        launches_per_s = round((now.launches - before.launches) / (now.at_s - before.at_s), 1)
    return {
        "job": job["job"],
        "state": jobs.state_of(job),
        "device": job["device"],
        "gpus": job["gpus"],
        "memory_used_bytes": sum(part.get("used", 0) for part in memory),
        "memory_total_bytes": sum(part.get("total", 0) for part in memory),
        "launches_per_s": launches_per_s,
        "step_s": job["step_s"] or None,
        "steps": job["steps"],
        "images": job["images"],
        "last_image": job["last_image"],
        "last_image_age_s": _age(job["last_image"], unix_s),
        "next_image_s": job["next_checkpoint_unix_s"]
        and max(0.0, round(job["next_checkpoint_unix_s"] - unix_s, 1)),
    }


def _age(image: str, unix_s: float) -> float | None:
    """An image's id has its time (checkpoint/image.py: new_id)."""
    import calendar  # for this alone

    try:
        made = calendar.timegm(time.strptime(image.rsplit("-", 2)[1], "%Y%m%dT%H%M%S"))
    except (IndexError, ValueError):
        return None
    return max(0.0, round(unix_s - made, 1))


def cells(facts: dict[str, Any]) -> list[str]:
    def shown(name: str, form: str) -> str:
        return "" if facts[name] is None else form.format(facts[name])

    return [
        facts["job"],
        facts["state"],
        f"{','.join(map(str, facts['gpus']))} {facts['device']}",
        show_bytes(facts["memory_used_bytes"]) if facts["memory_total_bytes"] else "",
        shown("launches_per_s", "{:,.0f}"),
        shown("step_s", "{:.3f} s"),
        f"{facts['steps']:,}",
        shown("last_image_age_s", "{:.0f} s ago"),
        shown("next_image_s", "in {:.0f} s"),
    ]


class Watch:
    """look() again and again: rates are over the time since the last one."""

    def __init__(self) -> None:
        self._before: dict[str, Sample] = {}

    def look(self) -> list[dict[str, Any]]:
        unix_s = time.time()
        rows, seen = [], {}
        for job in jobs.all_jobs():
            name = job["job"]
            seen[name] = sample(job, time.monotonic())
            rows.append(row(job, self._before.get(name), seen[name], unix_s))
        self._before = seen
        return rows


def top(arguments: argparse.Namespace) -> int:
    """Until Ctrl-C; with --once one look. --json: one object a look."""
    interval_s: float = arguments.interval
    if not 0.2 <= interval_s <= 3600:
        raise Refused(f"--interval {interval_s:g} is out of range", "give seconds, 0.2 to 3600")
    live = not (arguments.once or arguments.json)
    if live and not sys.stdout.isatty():
        raise Refused("top shows itself on a terminal", "give --once, or --json, for scripts")
    watch = Watch()
    watch.look()
    if live:
        sys.stdout.write(OTHER_SCREEN)
    try:
        while True:
            time.sleep(interval_s)
            rows = watch.look()
            if arguments.json:
                print(as_json({"unix_s": round(time.time(), 3), "jobs": rows}), flush=True)
            else:
                _show(rows, interval_s, live)
            if arguments.once:
                return 0
    finally:
        if live:
            sys.stdout.write(FIRST_SCREEN)
            sys.stdout.flush()


def _show(rows: list[dict[str, Any]], interval_s: float, live: bool) -> None:
    size = shutil.get_terminal_size()
    text = io.StringIO()
    if live:
        now = time.strftime("%H:%M:%S")
        text.write(f"devproxy top  {now}  every {interval_s:g} s  Ctrl-C ends it\n\n")
    if rows:
        write_table(text, COLUMNS, [cells(facts) for facts in rows], size.columns if live else 200)
    else:
        text.write("no jobs\n")
    shown = text.getvalue()
    if live:  # what is longer than the screen would scroll it
        shown = HOME_AND_CLEAR + "\n".join(shown.splitlines()[: size.lines - 1])
    sys.stdout.write(shown)
    sys.stdout.flush()
