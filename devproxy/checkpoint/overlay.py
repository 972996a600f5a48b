# SPDX-License-Identifier: Apache-2.0
"""Overlays in a mount namespace of their own, for one program: the host never sees them, and they end with it.

    python -m devproxy.checkpoint.overlay '[["/job/out", "LOWER", "UPPER", "WORK", "AT"], ...]' PROGRAM ARGUMENT...

AT shows LOWER with what UPPER holds in the place of what is there. Exit code 70: one cannot be mounted; stderr says why.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

CANNOT = 70
_CLONE_NEWNS = 0x20000
_MS_REC, _MS_SLAVE = 0x4000, 0x80000
_TRY_S = 60.0


class Overlay(NamedTuple):
    """Absolute paths. folder: of the job; lower: that, or an empty one; at: an empty folder."""

    folder: str
    lower: str
    upper: str
    work: str
    at: str


def command(overlays: Sequence[Overlay], program: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "devproxy.checkpoint.overlay", json.dumps(overlays), *program]


def why_not(overlays: Sequence[Overlay]) -> str:
    """Why they cannot be mounted, in words; "" when they can."""
    try:
        done = subprocess.run(
            command(overlays, ["/bin/true"]),
            capture_output=True,
            text=True,
            timeout=_TRY_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else ""


def _escaped(path: str) -> str:
    for letter in "\\,:":
        path = path.replace(letter, "\\" + letter)
    return path


def _mount(source: str, at: str, kind: str | None, flags: int, options: str | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    words = [None if one is None else os.fsencode(one) for one in (source, at, kind, options)]
    if libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), at)


def _main(argv: list[str]) -> None:
    overlays = [Overlay(*row) for row in json.loads(argv[0])]
    try:
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "no mount namespace can be made")
        _mount("none", "/", None, _MS_REC | _MS_SLAVE, None)
        for one in overlays:
            options = (
                f"lowerdir={_escaped(one.lower)},upperdir={_escaped(one.upper)},"
                f"workdir={_escaped(one.work)},index=off"
            )
            _mount("overlay", one.at, "overlay", 0, options)
    except OSError as error:
        print(error.strerror or error, file=sys.stderr)
        sys.exit(CANNOT)
    for number in (
        signal.SIGPIPE,
        signal.SIGXFSZ,
    ):  # Python ignores them, and a program would go on with that
        signal.signal(number, signal.SIG_DFL)
    os.execv(argv[1], argv[1:])


if __name__ == "__main__":
    _main(sys.argv[1:])
