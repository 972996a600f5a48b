# SPDX-License-Identifier: Apache-2.0
"""What the commands say on stderr: one line per message, led by the program's name."""

from __future__ import annotations

import sys


def say(text: str, program: str = "devproxy-run") -> None:
    """One line on stderr. A closed stderr is not an error: the job's exit code matters more."""
    try:
        sys.stderr.write(f"{program}: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass
