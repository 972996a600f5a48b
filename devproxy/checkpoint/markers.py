# SPDX-License-Identifier: Apache-2.0
"""Markers of running uploads and of a running gc. gc.py says how they keep the two apart.

uploads/<id>.json   who writes, since when, last heartbeat     written before the list of packs is read
uploads/<id>.pins   the packs that the upload may rely on      written once, after the list was read
gc/<id>.json        the packs that a gc is about to remove
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from devproxy import procfs
from devproxy.checkpoint.backend import Backend
from devproxy.checkpoint.errors import StoreError

UPLOADS = "uploads"
TOMBSTONES = "gc"
HEARTBEAT_S = 10.0
# Far more than a heartbeat, a slow request and the difference of two hosts' clocks together.
ABANDONED_S = 600.0


def new_id() -> str:
    return os.urandom(8).hex()


def identity() -> dict[str, Any]:
    """This process, as another one of the same boot and pid namespace can look it up."""
    facts: dict[str, Any] = {"host": os.uname().nodename, "pid": os.getpid()}
    if boot := procfs.boot_id():
        facts["boot"] = boot
    with contextlib.suppress(OSError):
        facts["pid_namespace"] = os.stat("/proc/self/ns/pid").st_ino
        facts["started_ticks"] = procfs.started_ticks(os.getpid())
        facts["time_namespace"] = os.stat("/proc/self/ns/time").st_ino
    return facts


_ONE_PROC = ("boot", "pid_namespace")
_ONE_CLOCK = ("boot", "time_namespace")


def is_alive(marker: dict[str, Any], now: float, abandoned_s: float) -> bool:
    """Whether its writer may still work: a process that can be looked up is not dead, and the last heartbeat is young.

    now: by the wall clock, which counts only where the writer's own clock, which nobody sets, is another than ours.
    """
    mine = identity()

    def both_have(keys: tuple[str, ...]) -> bool:
        return all(key in marker and marker[key] == mine.get(key) for key in keys)

    if both_have(_ONE_PROC):
        try:
            if procfs.started_ticks(int(marker["pid"])) != marker.get("started_ticks"):
                return False
        except (FileNotFoundError, ProcessLookupError):
            return False
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            pass
    try:
        if both_have(_ONE_CLOCK) and "heartbeat_boot_s" in marker:
            heartbeat, now = float(marker["heartbeat_boot_s"]), _clock()
        else:
            heartbeat = float(marker["heartbeat"])
        return math.isfinite(heartbeat) and now - heartbeat < abandoned_s
    except (KeyError, TypeError, ValueError, OverflowError):
        return False


@dataclass(frozen=True)
class Seen:
    """A marker as gc reads it. pins None: the upload has not chosen its packs yet."""

    id: str
    alive: bool
    pins: frozenset[str] | None


def read_all(backend: Backend, folder: str, abandoned_s: float) -> list[Seen]:
    names = {entry.name for entry in backend.list(folder)}
    now = time.time()
    seen: list[Seen] = []
    for name in sorted(names):
        if not name.endswith(".json"):
            continue
        uid = name.removesuffix(".json")
        try:
            marker = json.loads(backend.read(f"{folder}/{name}"))
        except FileNotFoundError:
            continue  # ended since
        except (ValueError, RecursionError):
            marker = {}
        alive = isinstance(marker, dict) and is_alive(marker, now, abandoned_s)
        pins: frozenset[str] | None = None
        try:
            pins = frozenset(json.loads(backend.read(f"{folder}/{uid}.pins")))
        except (FileNotFoundError, ValueError, TypeError, RecursionError):
            pass
        seen.append(Seen(uid, alive, pins))
    return seen


def remove(backend: Backend, folder: str, uid: str) -> None:
    # The pins last: without the marker they mean nothing, without them the marker blocks every gc.
    backend.remove(f"{folder}/{uid}.json")
    backend.remove(f"{folder}/{uid}.pins")


def remove_pins_of_none(backend: Backend, folder: str) -> None:
    """Pins whose marker is gone. A marker is there before its pins, so nobody is about to write it."""
    names = {entry.name for entry in backend.list(folder)}
    for name in sorted(names):
        if name.endswith(".pins") and f"{name.removesuffix('.pins')}.json" not in names:
            backend.remove(f"{folder}/{name}")


class Marker:
    """Says that this process is at work, until end(). A thread renews the heartbeat."""

    def __init__(self, backend: Backend, folder: str, what: dict[str, Any]) -> None:
        self.id = new_id()
        self._backend, self._folder = backend, folder
        self._facts = {**identity(), **what, "started": time.time()}
        self._end = threading.Event()
        self._mu = threading.Lock()
        self._beat_began = 0.0
        self._beat(_clock())
        self._thread = threading.Thread(target=self._run, name="devproxy-heartbeat", daemon=True)
        self._thread.start()

    def update(self, **facts: Any) -> None:
        with self._mu:
            self._facts.update(facts)
        self._beat(_clock())

    def pin(self, packs: list[str]) -> None:
        """Once: from here on no gc removes these packs while the marker lives."""
        data = json.dumps(sorted(packs)).encode()
        self._backend.write(f"{self._folder}/{self.id}.pins", data, stage="mark the upload")

    def exists(self) -> bool:
        """Whether no gc can have taken this upload for dead."""
        return _clock() - self._beat_began < ABANDONED_S / 2 and self._on_disk()

    def _on_disk(self) -> bool:
        try:
            self._backend.read(f"{self._folder}/{self.id}.json")
            return True
        except FileNotFoundError:
            return False

    def end(self) -> None:
        """Removes the marker. Errors are left to gc: a marker of the dead is removed there."""
        self._stop()
        with contextlib.suppress(StoreError):
            remove(self._backend, self._folder, self.id)

    def _stop(self) -> None:
        self._end.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _beat(self, began: float) -> None:
        with self._mu:
            beat = {"heartbeat": time.time(), "heartbeat_boot_s": began}
            data = json.dumps({**self._facts, **beat}).encode()
            self._backend.write(f"{self._folder}/{self.id}.json", data, stage="mark the upload")
            self._beat_began = began

    def _run(self) -> None:
        while not self._end.wait(HEARTBEAT_S):
            _quietly(self._renew)

    def _renew(self) -> None:
        # A marker that a gc removed must stay removed. If this thread sleeps between the look and the write for so long
        # that a gc comes in between, the marker comes back; then the beat began too long ago, and exists() says no.
        began = _clock()
        if self._on_disk():
            self._beat(began)


def _clock() -> float:
    """Seconds that also count while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _quietly(action: Callable[[], None]) -> None:
    try:
        action()
    except StoreError:
        pass  # the store is gone for now: the upload itself will say so, with the object
