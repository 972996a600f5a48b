# SPDX-License-Identifier: Apache-2.0
"""Which job a verb is for. Nothing is done to a job that was not named: another one may live by now than the user thinks."""

from __future__ import annotations

import argparse
import sys

from devproxy import runtime
from devproxy.control import client
from devproxy.errors import Refused


def named_job(arguments: argparse.Namespace) -> tuple[str, str]:
    """(name, folder) of the living job on the command line, or of the one that is named on the terminal. Raises Refused."""
    name = arguments.job or _asked(arguments.verb, arguments.json)
    return client.find_job(name)


def _asked(verb: str, for_programs: bool) -> str:
    living = [(name, path) for name, path, alive in runtime.list_jobs() if alive]
    if not living:
        raise client.no_job_lives()
    if for_programs or not (sys.stdin.isatty() and sys.stderr.isatty()):
        names = ", ".join(name for name, _ in living)
        raise Refused(f"{verb} needs the name of a job", f"devproxy {verb} JOB, of: {names}")
    for name, path in living:
        command = " ".join(client.job_file(path).get("command", []))
        sys.stderr.write(f"  {name}  {command[:80]}\n")
    sys.stderr.write(f"{verb} which job? ")
    sys.stderr.flush()
    answer = sys.stdin.readline().strip()
    if not answer:
        raise Refused("no job was named", "nothing was done")
    return answer
