# SPDX-License-Identifier: Apache-2.0
"""How the nodes of a job find together: node 0 listens, the others come, and a line to each stays while the job lives.

A node that comes says what it is (Hello). Node 0 refuses by name what does not fit; nothing of that node has been
started then. Packets between two nodes that are not node 0 go through it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from dataclasses import asdict, dataclass
from typing import Any, cast

from devproxy import __version__
from devproxy.control import trust
from devproxy.control._pb import job_pb2 as pb
from devproxy.control._pb import job_pb2_grpc
from devproxy.control.agent_service import ThreadPerCall
from devproxy.control.line import Line
from devproxy.control.messages import CHANNEL_OPTIONS
from devproxy.control.quiet_grpc import grpc
from devproxy.control.remote import RemoteTree
from devproxy.errors import DevproxyError, Refused
from devproxy.log import say
from devproxy.node.stages import Report

LOOK_S = 0.05
AGAIN_S = 0.5  # between two tries to reach node 0
NAME_S, NAME_AGAIN_S = 10.0, 60.0  # when the nodes that have not come are named
GOODBYE_S = 2.0
MOST_WORDS = 500  # of another node's error


@dataclass(frozen=True)
class Hello:
    """What a node says of itself. image: of a restore, else ""."""

    job: str
    node: int
    nodes: int
    device: str
    abi: str
    image: str = ""
    host: str = ""
    encrypt_data: bool = False
    version: str = __version__


def parse_meet(text: str) -> tuple[str, int]:
    """ "host:port". Raises Refused."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise Refused(
            f"--meet {text!r} is no address", "write it like node0:29400: where node 0 listens"
        )
    return host.strip("[]"), int(port)


def own_address(meet: str, node: int) -> str:
    """The address of this host that the other nodes reach: node 0's as it was named, else the one that leads there."""
    host, port = parse_meet(meet)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        if node == 0:
            return str(found[4][0])
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])
            return str(probe.getsockname()[0])
    except OSError as error:
        raise Refused(
            f"--meet {meet}: {error.strerror or error}", "name node 0 as all nodes can reach it"
        ) from None


class Meeting(job_pb2_grpc.MeetingServicer):  # type: ignore[misc, unused-ignore]
    """Node 0's side. welcome: what a node that fits is told, one JSON object.

    deliver(packets): for node 0's own tree. node_lost(name): in a thread of that node's line. Raises Refused where it cannot listen.
    """

    def __init__(
        self,
        meet: str,
        own: Hello,
        welcome: dict[str, Any],
        deliver: Callable[[list[bytes]], None],
        node_lost: Callable[[str], None],
    ) -> None:
        self._own = own
        self._meet = meet
        self._node_lost = node_lost
        self._welcome = welcome
        self._deliver = deliver
        self._mu = threading.Lock()
        self._lines: dict[int, Line] = {}
        self._ready: dict[int, RemoteTree] = {}
        self._stopping = False
        identity = trust.load()
        host, port = parse_meet(meet)
        self._server = grpc.server(
            cast(futures.ThreadPoolExecutor, ThreadPerCall()), options=CHANNEL_OPTIONS
        )
        job_pb2_grpc.add_MeetingServicer_to_server(self, self._server)
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._server.add_secure_port(where, identity.server()) == 0:
                raise RuntimeError("gRPC gives no reason")
        except RuntimeError as error:
            why = str(error).split("\n")[0][:200]
            raise Refused(
                f"node 0 cannot listen at {meet}: {why}", "is the port taken, or another host's?"
            ) from None
        self._server.start()

    # -- gRPC's thread of each node -----------------------------------------------------------------------------

    def Join(self, frames: Iterable[pb.Frame], context: grpc.ServicerContext) -> Iterator[pb.Frame]:
        line = Line(f"the node at {context.peer()}")
        joined: list[int] = []

        def greet(verb: str, arguments: dict[str, Any], report: Report) -> Any:
            if verb == "join":
                hello = Hello(**arguments)
                self._admit(hello, line)
                joined.append(hello.node)
                line.peer = f"node {hello.node} ({hello.host})"
                line.watch()
                return self._welcome
            if verb == "did_not_start":
                self._hear(**arguments)
                return None
            if verb == "ready" and joined:
                self._is_ready(joined[0], RemoteTree(line, joined[0], **arguments))
                return None
            raise DevproxyError(f"a node that joins does not call {verb!r}")

        line.handle = greet
        line.on_packets = self._route
        line.on_lost = lambda: self._lost(joined)
        context.add_callback(line.close)
        threading.Thread(target=line.read, args=(frames,), name="line", daemon=True).start()
        yield from line.outgoing()

    def _hear(self, job: str, node: int, host: str, why: str) -> None:
        """Another may come in its place, so this node goes on waiting."""
        if job == self._own.job:
            say(f"node {node} ({host}) of job {job} did not start: {why[:MOST_WORDS]}")

    def _admit(self, hello: Hello, line: Line) -> None:
        own, node = self._own, hello.node
        for name in ("job", "nodes", "image", "device", "abi"):
            theirs, ours = getattr(hello, name), getattr(own, name)
            if theirs != ours:
                raise Refused(
                    f"node {node} ({hello.host}) has {name} {theirs!r}, node 0 has {ours!r}",
                    "start all nodes of a job with the same devproxy, --name, --nodes and --device",
                )
        if hello.encrypt_data != own.encrypt_data:
            which, other = (f"node {node} ({hello.host})", "node 0")
            if own.encrypt_data:
                which, other = other, which
            raise Refused(
                f"{which} has --encrypt-data, {other} has not",
                "give it to all nodes of a job, or to none",
            )
        if not 0 < node < own.nodes:
            raise Refused(f"there is no node {node} in a job of {own.nodes}", "number them from 0")
        with self._mu:
            if node in self._lines:
                raise Refused(f"node {node} is here already", "give each host a --node of its own")
            self._lines[node] = line

    def _is_ready(self, node: int, tree: RemoteTree) -> None:
        with self._mu:
            self._ready[node] = tree

    def _lost(self, joined: list[int]) -> None:
        with self._mu:
            if not joined or self._stopping:
                return
            node = joined[0]
            tree = self._ready.get(node)
            if tree is None:  # it has not begun: another may come in its place
                self._lines.pop(node, None)
        if tree is not None and not tree.was_ended():
            self._node_lost(tree.name)

    def _route(self, source: int, to: int, packets: list[bytes]) -> None:
        if to == 0:
            self._deliver(packets)
            return
        line = self._lines.get(to)
        if line is not None:
            line.send_packets(source, to, packets)

    # -- the supervisor's threads -------------------------------------------------------------------------------

    def send(self, to: int, packets: list[bytes]) -> None:
        """From node 0's own tree."""
        self._route(0, to, packets)

    def wait(self, timeout_s: float, interrupted: Callable[[], None]) -> list[RemoteTree]:
        """All other nodes, in their order. Raises Refused, with the names of those that have not come."""
        end = time.monotonic() + timeout_s
        name_at = time.monotonic() + NAME_S
        others = range(1, self._own.nodes)
        while True:
            interrupted()
            with self._mu:
                here = [self._ready[node] for node in others if node in self._ready]
            if lost := next((tree for tree in here if tree.line.lost.is_set()), None):
                raise Refused(f"{lost.name} is gone", "see what it says; nothing was started")
            if len(here) == len(others):
                return here
            late = "node " + ", ".join(str(node) for node in others if node not in self._ready)
            if time.monotonic() > name_at:
                name_at += NAME_AGAIN_S
                say(
                    f"{late} of job {self._own.job} has not come to {self._meet} yet; see what it says there"
                )
            if time.monotonic() > end:
                raise Refused(
                    f"{late} of job {self._own.job} did not come within {timeout_s:g} s",
                    "start it with the same --meet, or see what it says; nothing was started",
                )
            time.sleep(LOOK_S)

    def stop(self) -> None:
        """The job is over. The others are told, so that they do not take it for a failure."""
        with self._mu:
            self._stopping = True
            lines = list(self._lines.values())
        for line in lines:
            try:
                line.call("bye", timeout_s=GOODBYE_S)
            except DevproxyError:
                pass
            line.close()
        self._server.stop(0.5).wait(GOODBYE_S)


def _channel(meet: str) -> grpc.Channel:
    identity = trust.load()
    host, port = parse_meet(meet)
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", trust.NAME)]
    return grpc.secure_channel(where, identity.channel(), options=options)


def tell_node_0(meet: str, job: str, node: int, error: DevproxyError) -> None:
    """Why this node does not start: whoever looks at node 0 reads it there. Where node 0 is not reached at once, not."""
    try:
        channel = _channel(meet)
    except DevproxyError:
        return
    line = Line(f"node 0 ({meet})")
    try:
        grpc.channel_ready_future(channel).result(timeout=GOODBYE_S)
        frames = job_pb2_grpc.MeetingStub(channel).Join(line.outgoing())
        threading.Thread(target=line.read, args=(frames,), name="line", daemon=True).start()
        facts = {"job": job, "node": node, "host": os.uname().nodename, "why": str(error)}
        line.call("did_not_start", facts, timeout_s=GOODBYE_S)
    except (DevproxyError, grpc.FutureTimeoutError):
        pass
    finally:
        line.close()
        channel.close()


class Joined:
    """Another node's side: its line to node 0. welcome: what node 0 said.

    Tries for timeout_s to reach node 0. Raises Refused in node 0's words, or where it is not reached.
    """

    def __init__(
        self, meet: str, hello: Hello, timeout_s: float, interrupted: Callable[[], None]
    ) -> None:
        self.node = hello.node
        self._channel = _channel(meet)
        ready = grpc.channel_ready_future(self._channel)
        end = time.monotonic() + timeout_s
        while True:
            interrupted()
            try:
                ready.result(timeout=AGAIN_S)
                break
            except grpc.FutureTimeoutError:
                if time.monotonic() > end:
                    self._channel.close()
                    raise Refused(
                        f"node 0 was not reached at {meet} within {timeout_s:g} s",
                        f"is it started, and has it the same trust folder ({trust.folder()})?",
                    ) from None
        self.line = Line(f"node 0 ({meet})")
        frames = job_pb2_grpc.MeetingStub(self._channel).Join(self.line.outgoing())
        threading.Thread(target=self.line.read, args=(frames,), name="line", daemon=True).start()
        try:
            self.welcome: dict[str, Any] = self.line.call("join", asdict(hello), timeout_s=30.0)
        except DevproxyError as error:
            self.stop()
            raise Refused(error.what, error.remedy) from None
        self.line.watch()

    def send(self, to: int, packets: list[bytes]) -> None:
        self.line.send_packets(self.node, to, packets)

    def ready(self, gpus: list[int]) -> None:
        """The tree's servers listen."""
        self.line.call("ready", {"host": os.uname().nodename, "gpus": gpus}, timeout_s=30.0)

    def stop(self) -> None:
        self.line.close()
        self._channel.close()
