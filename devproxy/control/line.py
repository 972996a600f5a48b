# SPDX-License-Identifier: Apache-2.0
"""One connection between the supervisors of two nodes of a job: calls both ways, packets of the job's network, and the
news that the other side is gone.

It is a gRPC stream in each direction (job.proto: Meeting). Who made it is no difference afterwards.

Threads: one reads what comes and hands it out; each call that comes has a thread of its own; gRPC's takes what goes out.
Locks: _mu, over the calls under way and the queue's size; a leaf.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from devproxy.control import messages
from devproxy.control._pb import job_pb2 as pb
from devproxy.control.quiet_grpc import grpc
from devproxy.errors import DevproxyError
from devproxy.log import say
from devproxy.node.stages import Progress, Report

# Somebody who has stopped, or whose host has lost its power, is found out after the sum of both.
ALIVE_EVERY_S, ALIVE_WITHIN_S = 5.0, 15.0
ALIVE = "alive"  # a call that is answered here
MOST_PACKET_BYTES = 32 << 20  # on their way out; what is more is lost, which is TCP's to mend


class LineLost(DevproxyError):
    """The other node does not answer any more."""


Handler = Callable[[str, dict[str, Any], Report], Any]
Packets = Callable[[int, int, list[bytes]], None]


def _unasked(verb: str, arguments: dict[str, Any], report: Report) -> Any:
    raise DevproxyError(f"the node takes no calls yet ({verb})")


class Line:
    """peer: what the other side is called in errors.

    handle(verb, arguments, report): answers a call; anything JSON. May raise. on_packets(from, to, packets): must not
    block. on_lost: once, when the other side is gone or close() was called.
    """

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.handle: Handler = _unasked
        self.on_packets: Packets = lambda source, to, packets: None
        self.on_lost: Callable[[], None] = lambda: None
        self.lost = threading.Event()
        self._out: queue.SimpleQueue[pb.Frame | None] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._mu = threading.Lock()
        self._waiting: dict[int, queue.SimpleQueue[pb.Answer | None]] = {}
        self._packet_bytes = 0

    # -- the stream ---------------------------------------------------------------------------------------------

    def outgoing(self) -> Iterator[pb.Frame]:
        """For gRPC, until the end."""
        while (frame := self._out.get()) is not None:
            if frame.HasField("packets"):
                with self._mu:
                    self._packet_bytes -= sum(map(len, frame.packets.packet))
            yield frame

    def read(self, incoming: Iterable[pb.Frame]) -> None:
        """Hands out what comes until the stream ends. One thread."""
        try:
            for frame in incoming:
                self._take(frame)
        except grpc.RpcError:
            pass
        finally:
            self.close()

    def watch(self) -> None:
        """From now on the other side is asked whether it is there; one that does not answer is lost."""

        def ask() -> None:
            while not self.lost.wait(ALIVE_EVERY_S):
                try:
                    self.call(ALIVE, timeout_s=ALIVE_WITHIN_S)
                except DevproxyError:
                    self.close()

        threading.Thread(target=ask, name="alive", daemon=True).start()

    def close(self) -> None:
        """The end for both sides. May be called more than once."""
        with self._mu:
            if self.lost.is_set():
                return
            self.lost.set()
            waiting = list(self._waiting.values())
        self._out.put(None)
        for answers in waiting:
            answers.put(None)
        self.on_lost()

    def _take(self, frame: pb.Frame) -> None:
        kind = frame.WhichOneof("of")
        if kind == "packets":
            packets = frame.packets
            self.on_packets(getattr(packets, "from"), packets.to, list(packets.packet))
        elif kind == "call":
            threading.Thread(
                target=self._answer, args=(frame.call,), name=frame.call.verb, daemon=True
            ).start()
        elif kind == "answer":
            with self._mu:
                answers = self._waiting.get(frame.answer.id)
            if answers:
                answers.put(frame.answer)

    # -- what goes out ------------------------------------------------------------------------------------------

    def send_packets(self, source: int, to: int, packets: list[bytes]) -> None:
        """Never blocks; where too much waits already they are lost."""
        size = sum(map(len, packets))
        with self._mu:
            if self.lost.is_set() or self._packet_bytes + size > MOST_PACKET_BYTES:
                return
            self._packet_bytes += size
        self._out.put(pb.Frame(packets=pb.Packets(**{"from": source}, to=to, packet=packets)))

    def post(self, verb: str, arguments: dict[str, Any]) -> None:
        """A call whose answer nobody waits for. Never blocks; where the other side is gone it comes to nothing."""
        if not self.lost.is_set():
            call = pb.Call(id=next(self._numbers), verb=verb, json=json.dumps(arguments))
            self._out.put(pb.Frame(call=call))

    def call(
        self,
        verb: str,
        arguments: dict[str, Any] | None = None,
        *,
        report: Report | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Raises what the other side raised, and LineLost where it is gone or says nothing for timeout_s."""
        number = next(self._numbers)
        answers: queue.SimpleQueue[pb.Answer | None] = queue.SimpleQueue()
        with self._mu:
            if self.lost.is_set():
                raise self._lost()
            self._waiting[number] = answers
        call = pb.Call(id=number, verb=verb, json=json.dumps(arguments or {}))
        self._out.put(pb.Frame(call=call))
        try:
            while True:
                try:
                    answer = answers.get(timeout=timeout_s)
                except queue.Empty:
                    raise LineLost(f"{self.peer} does not answer ({verb})") from None
                if answer is None:
                    raise self._lost()
                kind = answer.WhichOneof("of")
                if kind == "progress":
                    if report:
                        report(messages.progress_from_pb(answer.progress))
                elif kind == "error":
                    raise messages.error_from_pb(answer.error)
                else:
                    return json.loads(answer.json)
        finally:
            with self._mu:
                del self._waiting[number]

    def _lost(self) -> LineLost:
        return LineLost(f"{self.peer} is gone")

    # -- calls that came ----------------------------------------------------------------------------------------

    def _answer(self, call: pb.Call) -> None:
        def report(progress: Progress) -> None:
            self._out.put(
                pb.Frame(answer=pb.Answer(id=call.id, progress=messages.progress_to_pb(progress)))
            )

        try:
            result = None
            if call.verb != ALIVE:
                result = self.handle(call.verb, json.loads(call.json), report)
            answer = pb.Answer(id=call.id, json=json.dumps(result))
        except BaseException as error:
            if not isinstance(error, DevproxyError):
                say(f"{call.verb}: {traceback.format_exc()}")
            answer = pb.Answer(id=call.id, error=messages.error_to_pb(error))
        self._out.put(pb.Frame(answer=answer))
