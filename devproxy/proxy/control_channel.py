# SPDX-License-Identifier: Apache-2.0
"""The coordinator's end of a device-proxy server's control channel (docs/protocol.md)."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from devproxy import proctree
from devproxy.errors import DevproxyError

_MAGIC = 0x41505044  # csrc/wire/attach.h: kAttachMagic
_KIND_CONTROL = 3  # AttachKind::kControl
_HELLO = struct.Struct("<II32sII")  # AttachRequest
_MAX_ANSWER_BYTES = 1 << 28
# A server that hangs must not hold its job for ever; one that copies much to a slow disk may take its time.
PATIENCE_S = 300.0
LOOK_S = 1.0
STOPPED_S = 5.0  # a server that a signal has stopped is waited for so long


class ServerError(DevproxyError):
    """The server answered that it could not. state is what its clients are in: "running" or "parked"."""

    def __init__(self, what: str, state: str, gpu: int) -> None:
        super().__init__(what, "", object=f"GPU {gpu}")
        self.state = state


class ServerGone(DevproxyError):
    """The server hung up, or nobody answers on its socket."""


class ControlChannel:
    """One open channel to the server of one GPU. Not for several threads at once.

    A server that is parked goes on by itself when the channel that cut it is closed.
    """

    def __init__(self, job_dir: str, gpu: int, abi: bytes = b"", connect_s: float = 10.0) -> None:
        """Connects to job_dir/gpu<gpu>.sock. abi: 32 bytes, for information. Raises ServerGone."""
        self.gpu = gpu
        self.path = f"{job_dir}/gpu{gpu}.sock"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.settimeout(connect_s)
            self._socket.connect(self.path)
            self._server = proctree.listener(self._socket)
            self._socket.sendall(_HELLO.pack(_MAGIC, _KIND_CONTROL, abi.ljust(32, b"\0"), 0, 0))
        except OSError as error:
            self._socket.close()
            raise ServerGone(
                f"the server of GPU {gpu} cannot be reached at {self.path}: {error}",
                "see the server's log in the job folder",
                object=f"GPU {gpu}",
            ) from None

    def __enter__(self) -> ControlChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def request(
        self,
        op: str,
        timeout_s: float,
        progress: Callable[[], int] | None = None,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Sends one request and waits for its answer. Raises ServerError, ServerGone (also after timeout_s).

        progress: a figure that changes while the server is busy with it; then timeout_s counts from its last change.
        A server that a signal has stopped is not waited for so long, and named.
        """
        text = json.dumps({"op": op, **arguments}).encode()
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(struct.pack("<I", len(text)) + text)
            self._wait_for_answer(timeout_s, progress or (lambda: 0))
            (length,) = struct.unpack("<I", self._read(4))
            if length > _MAX_ANSWER_BYTES:
                raise OSError(f"an answer of {length} bytes")
            answer = json.loads(self._read(length))
        except (OSError, ValueError) as error:
            why = str(error)
            if proctree.stopped(self._server):
                why = f"it {proctree.stopped_words(self._server)}"
            raise ServerGone(
                f"the server of GPU {self.gpu} did not answer '{op}': {why}",
                "see the server's log in the job folder",
                object=f"GPU {self.gpu}",
            ) from None
        if not isinstance(answer, dict) or not answer.get("ok"):
            state = str(answer.get("state", "running"))
            raise ServerError(str(answer.get("error")), state, self.gpu)
        return answer

    def _wait_for_answer(self, patience_s: float, progress: Callable[[], int]) -> None:
        """Returns when something can be read, also an end."""
        last, deadline = progress(), time.monotonic() + patience_s
        stopped_s: float | None = None
        while not select.select([self._socket], [], [], min(LOOK_S, patience_s / 4))[0]:
            now = progress()
            if not proctree.stopped(self._server):
                stopped_s = None
            elif stopped_s is None:
                stopped_s = time.monotonic()
            elif time.monotonic() - stopped_s > STOPPED_S:
                raise TimeoutError
            if now != last:
                last, deadline = now, time.monotonic() + patience_s
            elif time.monotonic() > deadline:
                raise TimeoutError(f"no progress for {patience_s:g} s")

    def _written(self, folder: str) -> Callable[[], int]:
        """How much of the folder's files this server has written: in blocks, since its threads write at their own places."""

        def blocks() -> int:
            try:
                with os.scandir(folder) as entries:
                    mine = [e for e in entries if e.name.startswith(f"gpu{self.gpu}-")]
                    return sum(e.stat().st_blocks for e in mine)
            except OSError:
                return 0  # the server will say what is wrong with it

        return blocks

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self._socket.recv(min(count - len(data), 1 << 20))
            if not part:
                raise OSError("it hung up")
            data += part
        return bytes(data)

    def can_dump(self) -> dict[str, Any]:
        """Level, clients and what stands in the way. Changes nothing."""
        return self.request("can_dump", 30)

    def ranks(self) -> list[dict[str, Any]]:
        """The clients' reports (csrc/server/agreement.h). Changes nothing."""
        reports: list[dict[str, Any]] = self.request("ranks", 30)["reports"]
        return reports

    def barrier(self, comm: tuple[int, int], attempt: int) -> dict[str, Any]:
        """Clients meet beside the communicator's collectives (csrc/server/meta_barrier.h). Answers members, acquired,
        reports. attempt: another one each time, up to 2^20."""
        return self.request("barrier", 30, comm=list(comm), attempt=attempt)

    def aim(self, reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Clients rest where they have the least device memory, until lift or a cut; but those that owe what others have
        submitted, by all ranks' reports, go on. Their own reports, of which `rests` says whether they do; ask again."""
        given: dict[str, Any] = {"reports": reports} if reports else {}
        found: list[dict[str, Any]] = self.request("aim", 30, **given)["reports"]
        return found

    def hold(self) -> list[dict[str, Any]]:
        """Clients hold before their next communication message. Their reports (csrc/server/agreement.h)."""
        reports: list[dict[str, Any]] = self.request("hold", 30)["reports"]
        return reports

    def withhold(self) -> dict[str, Any]:
        """Nothing of a communicator begins on this server any more (hal/pending.h), until lift or resume. Answers still
        (false: something is about to; ask again) and the clients' reports."""
        return self.request("withhold", 30)

    def mark(self, number: int) -> dict[str, Any]:
        """A mark behind all that this server has said to those of other trees. Withheld. number: above 0, another one
        each time. Answers still, server, to and from: who has its mark, and whose have come."""
        return self.request("mark", 30, number=number)

    def agree(self, reports: list[dict[str, Any]]) -> dict[str, Any]:
        """Every rank's reports. Answers settled, reports, failure, debt."""
        return self.request("agree", 30, reports=reports)

    def lift(self) -> None:
        """Nothing is held any more."""
        self.request("lift", 30)

    def cut(self, wait_ms: int = 0, drain_ms: int = 10_000) -> dict[str, Any]:
        """Parks all clients. wait_ms: how long to wait for least live bytes; -1: two periods of the job's rhythm.

        drain_ms: patience without progress; then ServerError, and the job runs on.
        """
        # The server's own limits end the wait; this one is for a server that hangs.
        limit_s = max(wait_ms, 30_000) / 1000 + 25 * drain_ms / 1000 + 30
        return self.request("cut", limit_s, wait_ms=wait_ms, drain_ms=drain_ms)

    def dump(self, folder: str, *, moves: bool = False) -> dict[str, Any]:
        """Device memory and state into the folder. Parked. moves: for a successor, so who attaches from now on waits for it."""
        return self.request("dump", PATIENCE_S, self._written(folder), dir=folder, moves=moves)

    def dump_shared(self, folder: str) -> dict[str, Any]:
        """Segments and pinned windows into the same folder. Parked, and the job's processes frozen."""
        return self.request("dump_shared", PATIENCE_S, self._written(folder), dir=folder)

    def resume(self) -> None:
        self.request("resume", 60)

    def leave(self) -> None:
        """Parked: the server exits; its successor or the image has the clients."""
        self.request("leave", 60)

    def executors(self, folder: str) -> bool:
        """Lists there what a successor is to load before it takes over. False: a server of an older devproxy, whose
        successors do not wait."""
        try:
            self.request("executors", 30, dir=folder)
        except ServerError as error:
            if "unknown control request" not in str(error):
                raise
            return False
        return True

    def steps(self) -> int:
        """Optimizer steps counted by all clients so far."""
        return int(self.request("steps", 30)["steps"])


@contextmanager
def parked(
    channel: ControlChannel, wait_ms: int = 0, drain_ms: int = 10_000
) -> Iterator[dict[str, Any]]:
    """The block runs while all clients of the server stand still."""
    facts = channel.cut(wait_ms, drain_ms)
    try:
        yield facts
    finally:
        channel.resume()
