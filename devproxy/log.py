# SPDX-License-Identifier: Apache-2.0
"""What the commands say on stderr: one line per message, led by the program's name."""

from __future__ import annotations

import json
import os
import sys
import time

FORMAT = "DEVPROXY_LOG_FORMAT"
FORMATS = ("text", "json")


def in_json() -> bool:
    return os.environ.get(FORMAT) == "json"


def as_json(text: str, program: str) -> str:
    """One object: time (UTC, RFC 3339), program, pid, message."""
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03}Z"
    facts = {"time": stamp, "program": program, "pid": os.getpid(), "message": text}
    return json.dumps(facts)


def say(text: str, program: str = "devproxy-run") -> None:
    """One line on stderr. A closed stderr is not an error: the job's exit code matters more."""
    line = as_json(text, program) if in_json() else f"{program}: {text}"
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass
