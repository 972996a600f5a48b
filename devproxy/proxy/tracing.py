# SPDX-License-Identifier: Apache-2.0
"""What a job's streams did over some seconds, asked of its servers again and again."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from devproxy.errors import ServerStopped, ServerUnreachable
from devproxy.proxy import stats

# csrc/server/trace.h: Event and Kind.
_EVENT = struct.Struct("<QQQQIHBx")
KINDS = (
    "nop",
    "copy",
    "memset",
    "launch",
    "host function",
    "record",
    "wait",
    "communicate",
    "call",
    "cut",
    "step",
    "room",
)
CALL, CUT, STEP, ROOM = (KINDS.index(kind) for kind in ("call", "cut", "step", "room"))


@dataclass(frozen=True)
class Event:
    """Times in ns of CLOCK_MONOTONIC. lane: the stream's number; of a call or a wait for room which thread
    of the process waited (its reply slot)."""

    submitted_ns: int
    begin_ns: int
    end_ns: int
    bytes: int
    name: str
    lane: int
    kind: int


@dataclass
class OfClient:
    """One process of the job on one GPU. lost: events that the server could not keep."""

    gpu: int
    pid: int
    slot: int
    rank: int | None
    events: list[Event] = field(default_factory=list)
    lost: int = 0


class Collector:
    """look() at least every two seconds; the first one switches recording on, and it ends by itself after the last.

    Where somebody else has looked shortly before, the first look finds what was recorded since: that is left out.
    """

    def __init__(self, job_dir: str, gpus: int, abi: bytes) -> None:
        self._job_dir, self._gpus, self._abi = job_dir, gpus, abi
        self._answers: list[tuple[int, dict[str, Any], bytes]] = []
        self._begun_ns: int | None = None
        self.silent: dict[int, str] = {}  # GPUs whose server does not answer now, and why

    def look(self) -> None:
        if self._begun_ns is None:
            self._begun_ns = time.monotonic_ns()
        for gpu in range(self._gpus):
            try:
                facts, data = stats.trace(self._job_dir, gpu, self._abi)
            except (ServerUnreachable, ServerStopped) as error:
                self.silent[gpu] = str(error)
                continue
            self.silent.pop(gpu, None)
            self._answers.append((gpu, facts, data))

    def clients(self) -> list[OfClient]:
        """All that was seen. Only at the end: what is decoded meanwhile takes time from the job."""
        found: dict[tuple[int, int, int], OfClient] = {}
        begun_ns = self._begun_ns or 0
        for gpu, facts, data in self._answers:
            at = 0
            for one in facts["clients"]:
                key = (gpu, one["pid"], one["slot"])
                client = found.setdefault(key, OfClient(gpu, *key[1:], one.get("rank")))
                client.lost += one["lost"]
                end = at + one["events"] * _EVENT.size
                client.events += (e for e in _events(data[at:end], one["names"]) if e.end_ns >= begun_ns)  # fmt: skip
                at = end
        return list(found.values())


def _events(data: bytes, names: list[str]) -> Iterator[Event]:
    for submitted, begin, end, size, name, lane, kind in _EVENT.iter_unpack(data):
        yield Event(submitted, begin, max(begin, end), size, names[name], lane, kind)
