# SPDX-License-Identifier: Apache-2.0
"""Programs that stages start: natively or through the proxy, with a limit, and what they said."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpucheck.ends import Failed


@dataclass(frozen=True)
class Way:
    """How a program is started: natively, or through the proxy."""

    prefix: list[str]
    env: dict[str, str]

    def run(self, line: Sequence[str], limit_s: float, **more: str) -> Done:
        return run([*self.prefix, *line], self.env | more, limit_s)


@dataclass
class Done:
    """How a program ended. code: 124 when it was killed because it did not."""

    code: int
    seconds: float
    out: str
    err: str

    def brief(self) -> str:
        lines = [line for line in (self.err or self.out).strip().splitlines() if line.strip()]
        return " | ".join(lines[-3:])[:400]


# What a limit is multiplied by: a rehearsal's machine is slower than one with a GPU, and has other work.
patience = 1.0


def run(
    command: Sequence[str], env: dict[str, str], limit_s: float, cwd: Path | None = None
) -> Done:
    begin, limit_s = time.monotonic(), limit_s * patience
    if not shutil.which(command[0]):
        return Done(127, 0.0, "", f"{command[0]} is not here")
    process = subprocess.Popen(
        command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=limit_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            out, err = process.communicate(timeout=3)
        except subprocess.TimeoutExpired:
            out, err = "", ""
        code, err = 124, f"{err}\nno end after {limit_s:.0f} s"
    return Done(code, round(time.monotonic() - begin, 2), out, err)


# As our libraries say it on stderr, once per call's name.
REFUSAL = re.compile(r"^devproxy: (.*\brefused\b.*?)(?: \(\w+(?:_|Error)\w*|$)", re.M)


def refusal_in(text: str) -> str:
    """The first call that was refused by name and why, or nothing."""
    found = REFUSAL.search(text)
    return found[1][:300] if found else ""


def digest_of(text: str) -> str | None:
    found = re.search(r"digest (\S+)", text)
    return found[1] if found else None


def read(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def wait_for(condition: Callable[[], Any], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s * patience
    while not condition():
        if time.monotonic() > deadline:
            raise Failed(f"waited {limit_s:.0f} s for {what}")
        time.sleep(0.02)
