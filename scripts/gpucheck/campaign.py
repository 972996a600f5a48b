# SPDX-License-Identifier: Apache-2.0
"""The campaign: each stage in a process of its own, with its limit; the results are whole after each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from devproxy import proctree
from gpucheck.ends import EXIT_OF, FAILED, GO_ON, NOT_REACHED, NOT_RUN, OK, REFUSED, Failed, Refused
from gpucheck.report import Report, write_whole
from gpucheck.setup import Setup, report_of
from gpucheck.stage import Stage

TOTAL_LIMIT_S = 525.0  # some machines end a command after 600 s; the start of Python and the end take some of them


def hold_devices() -> list[int]:
    """Opens the device nodes, and leaves them open: without the driver's persistence mode, and with no other client, each
    of the hundreds of processes to come would wait for the GPU to be set up anew. Nothing about the GPU is changed."""
    held: list[int] = []

    def hold() -> None:
        for path in sorted(Path("/dev").glob("nvidia[0-9]*")):
            with contextlib.suppress(OSError):
                held.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    # In a thread: a GPU that is not well may not answer, and that is to be found out by a stage.
    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    thread.join(10)
    return held


ENDING_S = 6.0  # what ending a stage that hangs may take


def end_descendants(patience_s: float = ENDING_S - 1) -> list[int]:
    """Ends everything that a stage left behind. Returns what is still there: a process inside the driver may stay."""
    deadline = time.monotonic() + patience_s
    while left := proctree.descendants(os.getpid()):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > deadline:
            return left
        time.sleep(0.05)
    return []


# For a stage that fits its work into its time: when it is ended, by the monotonic clock.
ENDS = "GPU_CHECK_ENDS"


def time_left_s() -> float:
    return float(os.environ.get(ENDS) or time.monotonic() + 60) - time.monotonic()


def run_stage(
    stage: Stage,
    command: Sequence[str],
    report: Path,
    log: Path,
    limit_s: float,
    env: dict[str, str] | None = None,
) -> dict[str, Any]:
    """One stage in a process of its own. Whatever happens to that, there is a result."""
    begin, hung = time.monotonic(), False
    with open(log, "ab") as out:
        out.write(f"== {stage.name} (at most {limit_s:.0f} s)\n".encode())
        out.flush()
        # In the campaign's folder: `python -m` looks into its own first, and a checkout of devproxy lies where the command
        # is given, with neither what is generated nor what is compiled.
        process = subprocess.Popen(
            command,
            env=(os.environ if env is None else env) | {ENDS: str(begin + limit_s)},
            cwd=report.parent,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            hung, code = True, -signal.SIGKILL
    left = end_descendants()
    process.poll()  # a process that the driver does not let go stays behind
    try:
        facts = json.loads(report.read_text())
    except (OSError, ValueError):
        facts = {"status": "", "figures": {}, "text": ""}
    texts = [facts["text"]] if facts["text"] else []
    status = facts["status"]
    if hung:
        status = FAILED
        cut = limit_s < stage.limit_s
        rest = f" (of its {stage.limit_s:.0f}: later stages need the rest)" if cut else ""
        texts.append(f"no end after {limit_s:.0f} s{rest}; killed")
    elif code < 0:
        status = FAILED
        texts.append(f"ended by signal {-code} ({signal.Signals(-code).name})")
    elif not status or code != EXIT_OF[status]:
        status = FAILED
        texts.append(f"ended with exit code {code} and no result")
    if left:
        texts.append(f"processes that could not be ended: {left}")
    return {
        "name": stage.name,
        "status": status,
        "seconds": round(time.monotonic() - begin, 2),
        "cut_short": hung and limit_s < stage.limit_s,
        "figures": facts["figures"],
        "text": "\n".join(texts),
    }


def campaign(
    stages: Sequence[Stage],
    command_of: Callable[[Stage, Path], Sequence[str]],
    out: Path,
    work: Path,
    about: dict[str, Any],
    limit_s: float = TOTAL_LIMIT_S,
    only: frozenset[str] = frozenset(),
    env_of: Callable[[Stage], dict[str, str] | None] = lambda stage: None,
) -> list[dict[str, Any]]:
    """Runs the stages in their order; the JSON is whole after each."""
    deadline = time.monotonic() + limit_s
    log, results, again, options = out / "gpu-check.log", [], [], ""
    for number, stage in enumerate(stages):
        left_s = deadline - time.monotonic()
        report = report_of(work, stage.name)
        if only and stage.name not in only:
            result = not_run(stage, "not asked for")
        elif left_s < stage.least_s:
            result = not_run(
                stage, f"{max(0, left_s):.0f} s are left, and it needs {stage.least_s:.0f}"
            )
            again.append(stage.name)
        else:
            limit = limit_of(stage, stages[number + 1 :], left_s, only)
            command = command_of(stage, report)
            result = run_stage(stage, command, report, log, limit, env_of(stage))
            figures = result["figures"]
            if result.pop("cut_short") or figures.get(GO_ON) or figures.get(NOT_REACHED):
                again.append(stage.name)
            if start := result["figures"].get(GO_ON):
                options = f" --ops-start {start}"
        results.append(result)
        about["next"] = f"python3 {sys.argv[0]} --only {','.join(again)}{options}" if again else ""
        line = (
            f"{result['status']:8} {stage.name:18} {result['seconds']:7.2f} s  "
            + (result["text"].replace("\n", " | ")[:300])
        )
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"-- {line}\n")
        print(line.rstrip(), flush=True)
        write_whole(
            out / "gpu-check.json", json.dumps(about | {"stages": results}, indent=1) + "\n"
        )
    return results


def limit_of(stage: Stage, later: Sequence[Stage], left_s: float, only: frozenset[str]) -> float:
    """The stage's own limit, or less, so that each later one has its least time. Where that cannot be, its own least."""
    kept = sum(s.least_s for s in later if s.name in only or (not only and not s.spare))
    return min(stage.limit_s, max(stage.least_s, left_s - kept - ENDING_S))


def not_run(stage: Stage, why: str) -> dict[str, Any]:
    return {"name": stage.name, "status": NOT_RUN, "seconds": 0.0, "figures": {}, "text": why}


def run_here(stage: Stage, setup: Setup, report: Report) -> int:
    """The inside of a stage's process."""
    assert stage.run
    try:
        stage.run(setup, report)
        report.end(OK)
    except Refused as refusal:
        report.end(REFUSED, str(refusal))
    except Failed as failure:
        report.end(FAILED, str(failure))
    except BaseException as error:
        traceback.print_exc()
        report.end(FAILED, f"{type(error).__name__}: {error}")
    sys.stdout.flush()
    # Not by way of the interpreter's end: a driver's own clean-up may hang, and the result is on disk.
    os._exit(EXIT_OF[report.status])
