# SPDX-License-Identifier: Apache-2.0
"""News of a long operation on stderr: bars on a terminal, else a line per stage, or JSON lines. And the summary after."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import Any

from devproxy.control.coordinator_api import ImageFacts
from devproxy.log import say
from devproxy.machine import show_bytes
from devproxy.node.stages import Progress

MODES = ("auto", "bar", "lines", "json", "none")


class Show:
    """with Show("auto", "checkpoint") as show: ...(report=show)"""

    def __init__(self, mode: str, verb: str) -> None:
        if mode == "auto":
            mode = "bar" if _is_terminal() else "lines"
        self._mode = mode
        self._verb = verb
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}
        self._stage = ""
        self.reached = ""  # the last stage that there was news of
        self._began = time.monotonic()

    def __enter__(self) -> Show:
        if self._mode == "bar":
            # An import of 0.1 s: not where the output is no terminal.
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bars

            self._bars = Bars(
                TextColumn("{task.fields[stage]:<12}"),
                BarColumn(),
                TextColumn("{task.fields[bytes]}"),
                TimeElapsedColumn(),
                TextColumn("{task.description}", markup=False),
                console=Console(stderr=True),
                transient=True,
            )
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        self.reached = progress.stage
        if self._mode == "json":
            seconds = round(time.monotonic() - self._began, 3)
            line = {"verb": self._verb, "seconds": seconds, **asdict(progress)}
            sys.stderr.write(json.dumps(line) + "\n")
            sys.stderr.flush()
        elif self._mode == "bar":
            self._bar(progress)
        elif self._mode == "lines" and progress.stage not in self._tasks:
            self._tasks[progress.stage] = True
            say(f"{self._verb}: {progress.stage}: {progress.text}", "devproxy")

    def _bar(self, progress: Progress) -> None:
        total = progress.total_bytes or None
        task = self._tasks.get(progress.stage)
        if task is None:
            if self._stage:
                self._finish(self._stage)
            task = self._bars.add_task(progress.text, total=total, stage=progress.stage, bytes="")
            self._tasks[progress.stage] = task
        self._stage = progress.stage
        done = progress.done_bytes
        shown = f"{show_bytes(done)} of {show_bytes(total)}" if total else ""
        self._bars.update(task, description=progress.text, total=total, completed=done, bytes=shown)

    def _finish(self, stage: str) -> None:
        """A stage of unknown size is over when the next one begins: its bar must not go on moving."""
        task = self._bars.tasks[self._tasks[stage]]
        if task.total is None:
            self._bars.update(
                task.id, total=max(1, task.completed), completed=max(1, task.completed)
            )


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


def image_rows(facts: ImageFacts) -> list[list[str]]:
    """The summary table after a checkpoint or suspend: stage times, sizes, how long the job stood still."""
    rows = [
        ["image", facts.id],
        ["store", facts.store],
        *([f"stage {name}", f"{seconds:.3f} s"] for name, seconds in facts.stages.items()),
        ["device", show_bytes(facts.device_bytes)],
        ["host", show_bytes(facts.host_bytes)],
        ["segments", show_bytes(facts.shared_bytes)],
        ["files", show_bytes(facts.files_bytes)],
        ["new", f"{show_bytes(facts.new_bytes)} ({show_bytes(facts.stored_bytes)} stored)"],
        ["deduplicated", show_bytes(facts.deduplicated_bytes)],
        ["in all", f"{facts.total_s:.3f} s"],
        ["the job stood still", f"{facts.still_s:.3f} s ({facts.freeze_s:.3f} s frozen by CRIU)"],
    ]
    return [row for row in rows if row[1]]


def fact_rows(facts: dict[str, Any]) -> list[list[str]]:
    """Named times (..._s) and sizes (..._bytes) as a table shows them."""
    rows = []
    for key, value in facts.items():
        name = key
        shown = str(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            if key.endswith("_bytes"):
                name, shown = key.removesuffix("_bytes"), show_bytes(int(value))
            elif key.endswith("_s"):
                name, shown = key.removesuffix("_s"), f"{value:.3f} s"
        rows.append([name.replace("_", " "), shown])
    return rows
