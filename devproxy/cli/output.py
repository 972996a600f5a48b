# SPDX-License-Identifier: Apache-2.0
"""What a program reads of `devproxy ... --json`: one object, on stdout; of an error one line, on stderr."""

from __future__ import annotations

import json
import sys
from typing import Any

from devproxy.errors import DevproxyError

# Raised when a field changes its meaning or goes; new fields may come at any time.
SCHEMA = 1


def as_json(facts: dict[str, Any], indent: int | None = None) -> str:
    return json.dumps({"schema": SCHEMA} | facts, indent=indent)


def show_json(facts: dict[str, Any], indent: int | None = None) -> None:
    print(as_json(facts, indent), flush=True)


def error_json(error: DevproxyError) -> None:
    facts: dict[str, Any] = {
        "error": error.what,
        "remedy": error.remedy,
        "exit_code": error.exit_code,
    }
    facts |= {n: v for n in ("stage", "object", "state") if (v := getattr(error, n, ""))}
    sys.stderr.write(as_json(facts) + "\n")
