# SPDX-License-Identifier: Apache-2.0
"""Fault points: named places at which a test makes this process fail.

    DEVPROXY_FAULT="name[:nth][:kill|error|enospc]"     the nth pass (1) through point `name` (error)

kill is SIGKILL of this process (abort means the same), error is OSError(EIO), enospc is OSError(ENOSPC): the errors that
a real disk or peer gives, so that the same code handles both. Without the variable a point costs one comparison.

    DEVPROXY_FAULT="@FILE"                              what to do is in the file

All processes that inherit the variable share the file: it is read at each point, so a test can arm a process that runs,
and it is removed by the process that fails, so a fault happens once. With a file there is one more action: pause makes
FILE.paused and stands still until somebody removes that, so that a test can do at a point what it likes, at its leisure.
Only points of Python pause.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time

VARIABLE = "DEVPROXY_FAULT"
ACTIONS = ("kill", "abort", "error", "enospc", "pause")
LOOK_S = 0.005

# Every point there is, with where it lies; tests/fault goes through this table.
FAULTS: dict[str, str] = {
    "store_open": "before a store is opened",
    "store_pack_write": "before a chunk is appended to a pack",
    "store_index_write": "a pack is whole, its index is not written",
    "store_manifest_write": "all packs are whole, the manifest is not written",
    "store_after_manifest": "the manifest is written, the marker of the upload is not removed",
    "store_read_chunk": "before a chunk is read",
    "store_prune": "before an old manifest is removed",
}


class _Armed:
    def __init__(self, name: str, nth: int, action: str) -> None:
        self.name = name
        self.left = nth
        self.action = action
        self.spec = ""


_mu = threading.Lock()
_armed: _Armed | None = None
_file = ""
_read = False


def register(name: str, where: str) -> None:
    """A point of another module; called at its import."""
    FAULTS[name] = where


def arm(spec: str) -> None:
    """Arms the point that `spec` names; "" disarms. Raises ValueError on a spec that is not understood."""
    global _armed, _file, _read
    file = spec[1:] if spec.startswith("@") else ""
    armed = None if file else _parse(spec)
    with _mu:
        _armed, _file, _read = armed, file, True


def _parse(spec: str) -> _Armed | None:
    if not spec:
        return None
    name, *rest = spec.split(":")
    if "pause" in rest and not _file:
        raise ValueError(f"{VARIABLE}={spec}: a pause needs a file ({VARIABLE}=@FILE)")
    nth, action = 1, "error"
    for word in rest:
        if word.isdigit() and int(word) > 0:
            nth = int(word)
        elif word in ACTIONS:
            action = word
        else:
            raise ValueError(f"{VARIABLE}={spec}: {word} is neither a count nor one of {ACTIONS}")
    return _Armed(name, nth, action)


def _look_into_file() -> None:
    """What the file says, unless it said so before: a countdown must go on."""
    global _armed
    try:
        with open(_file, encoding="ascii") as file:
            spec = file.read().strip()
    except OSError:
        spec = ""
    if _armed is None or _armed.spec != spec:
        _armed = _parse(spec)
        if _armed:
            _armed.spec = spec


def point(name: str) -> None:
    """Fails here when the test says so. Raises OSError, or does not return at all (kill), or late (pause)."""
    global _armed
    if not _read:
        arm(os.environ.get(VARIABLE, ""))
    if _armed is None and not _file:
        return
    with _mu:
        if _file:
            _look_into_file()
        if _armed is None or _armed.name != name:
            return
        _armed.left -= 1
        if _armed.left != 0:  # a fault happens once: what comes after it must work
            return
        action = _armed.action
        if _file:
            _take_file()
            _armed = None  # the same words in the file again are another fault
    if action in ("kill", "abort"):
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "pause":
        _pause()
        return
    code = errno.ENOSPC if action == "enospc" else errno.EIO
    raise OSError(code, f"{os.strerror(code)} (injected at {name})")


def _pause() -> None:
    """The file that says so is whole for whoever sees it: it is empty."""
    paused = f"{_file}.paused"
    with open(paused, "x", encoding="ascii"):
        pass
    while os.path.exists(paused):
        time.sleep(LOOK_S)


def _take_file() -> None:
    try:
        os.unlink(_file)
    except OSError:
        pass
