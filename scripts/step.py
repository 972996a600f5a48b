#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs one step of the set-up, and says so: step.py WHAT COMMAND...

A line when it begins, one every ten seconds with the last line of its output, one when it ends, with the seconds and the CPU
seconds that it took. All its output goes to build/steps/. A step that ends at once and well says nothing. A step that fails
shows the end of its output. The exit code is the command's. Needs the standard library alone: it runs before .venv is there.
"""

import re
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUIET_S = 2.0
EVERY_S = 10.0
NOISE = re.compile(r"^(WARNING: |Looking in |Requirement already |\s*$)")
WIDTH = 100


def last_line(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 8192))
        lines = re.split(r"[\r\n]+", file.read().decode(errors="replace"))
    told = [line.strip() for line in lines if not NOISE.match(line)]
    return told[-1][:WIDTH] if told else ""


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main(what: str, command: list) -> int:
    log = ROOT / "build" / "steps" / (re.sub(r"\W+", "-", what).strip("-") + ".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with open(log, "wb") as out:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=ROOT
        )
    told = 0.0
    while True:
        try:
            code = child.wait(min(QUIET_S, EVERY_S))
            break
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if not told:
            told = now
            say(f"{what} ...")
        elif now - told >= EVERY_S - QUIET_S:
            told = now
            say(f"{what}, {now - begin:.0f} s: {last_line(log)}")
    if code:
        sys.stderr.write(log.read_text(errors="replace")[-4000:])
        say(f"{what} failed with {code}; all of its output: {log}")
    elif told:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        say(
            f"{what}: done in {time.monotonic() - begin:.0f} s"
            f" ({used.ru_utime + used.ru_stime:.0f} s of CPU)"
        )
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
