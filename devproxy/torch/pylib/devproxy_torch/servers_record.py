# SPDX-License-Identifier: Apache-2.0
"""What this process's GPUs did while a profile ran, as the servers know it (csrc/server/trace.h)."""

from __future__ import annotations

import ctypes
import json
import struct
import time
from typing import Any

# Late imports: torch is being imported when this module is.


class ServersRecord:
    """Of one profile, and into an exported trace with it."""

    # csrc/server/trace.h: Event and Kind, and what Kineto calls them. The rest is no work of a GPU.
    EVENT = "<QQQQIHBx"
    KINDS = {1: "gpu_memcpy", 2: "gpu_memset", 3: "kernel", 7: "kernel"}
    PAGE_BYTES, KEPT_MS = 4096, 3_600_000

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.lost = 0

    def _ask(self, gpu: int, what: int, first: int = 0) -> tuple[bytes, int, int, int] | None:
        """(tail, the server's clock, total, lost)"""
        rep, tail = (ctypes.c_ulong * 3)(), ctypes.create_string_buffer(self.PAGE_BYTES)
        ask = getattr(ctypes.CDLL(None), "devproxy_trace", None)
        if ask is None:  # a libcuda that is not ours
            return None
        ask.argtypes = [ctypes.c_int, ctypes.c_uint, ctypes.c_ulong, ctypes.c_ulong, *[ctypes.c_void_p] * 2, ctypes.c_int]  # fmt: skip
        got = ask(gpu, what, self.KEPT_MS, first, rep, tail, self.PAGE_BYTES)
        return None if got < 0 else (tail.raw[:got], rep[0], rep[1], rep[2])

    def begin(self) -> None:
        import torch

        self.events, self.lost = [], 0
        if torch.cuda._is_in_bad_fork():
            return
        if not torch.cuda.is_current_stream_capturing():  # then there is somebody to ask
            try:
                torch.cuda.synchronize()  # also makes the GPU's context where there is none
            except RuntimeError:
                return  # a broken context: the program's own calls say so
        for gpu in range(torch.cuda.device_count()):
            self._ask(gpu, 0)

    def end(self) -> None:
        import torch

        for gpu in range(torch.cuda.device_count()):
            begun = self._ask(gpu, 1)
            if begun is None:
                continue
            day_ns = time.time_ns() - begun[1]
            size = struct.calcsize(self.EVENT)
            data = self._all(gpu, 2, begun[2], size)
            named = self._ask(gpu, 3)
            names = (
                self._all(gpu, 3, named[2], 1).decode(errors="replace").split("\0") if named else []
            )
            self._ask(gpu, 4)
            self.lost += begun[3]
            for queued, start, end, count, name, stream, kind in struct.iter_unpack(self.EVENT, data):  # fmt: skip
                if kind not in self.KINDS or name >= len(names):
                    continue
                self.events.append(
                    {
                        "ph": "X",
                        "cat": self.KINDS[kind],
                        "name": names[name] or self.KINDS[kind],
                        "pid": gpu,
                        "tid": stream,
                        "ts": start + day_ns,
                        "dur": end - start,
                        "args": {
                            "device": gpu,
                            "stream": stream,
                            "queued": start - queued,
                            "bytes": count,
                        },  # fmt: skip
                    }
                )

    def _all(self, gpu: int, what: int, total: int, size: int) -> bytes:
        """Less where the server was replaced meanwhile: what it had recorded went with it."""
        data = b""
        while len(data) < total * size:
            page = self._ask(gpu, what, len(data) // size)
            if page is None or not page[0]:
                break
            data += page[0]
        return data[: len(data) // size * size]

    def add_to(self, path: str) -> None:
        """To a trace in Chrome's format, whose times are microseconds since a base."""
        with open(path, encoding="utf-8") as file:
            trace = json.load(file)
        base_ns = trace.get("baseTimeNanoseconds", 0)
        events = trace["traceEvents"]
        for gpu in sorted({event["pid"] for event in self.events}):
            for what, said in (("name", f"GPU {gpu}"), ("labels", "by devproxy's server")):
                named = {what: said}
                events.append({"ph": "M", "name": f"process_{what}", "pid": gpu, "tid": 0, "ts": 0, "args": named})  # fmt: skip
        for event in self.events:
            ts, dur = (event["ts"] - base_ns) / 1e3, event["dur"] / 1e3
            events.append(event | {"ts": ts, "dur": dur})
        if self.lost:
            trace["devproxyLostEvents"] = self.lost
        with open(path, "w", encoding="utf-8") as file:
            json.dump(trace, file)
