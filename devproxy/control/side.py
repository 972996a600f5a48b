# SPDX-License-Identifier: Apache-2.0
"""A node's part in a job of several nodes, from finding the others to the end: for devproxy-run and for a restore.

The first node has the job's coordinator; what the others are asked to do is member.py's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from devproxy.checkpoint.store import Store
from devproxy.control import agent_service, serving
from devproxy.control import coordinator_api as api
from devproxy.control.coordinator import JobCoordinator
from devproxy.control.coordinator_api import RUNNING
from devproxy.control.job_log import follow_log
from devproxy.control.meeting import Hello, Joined, Meeting, own_address
from devproxy.control.member import Member
from devproxy.control.remote import RemoteTree
from devproxy.control.serving import Agent
from devproxy.control.stage_note import note_that_it_waits
from devproxy.errors import DevproxyError, Refused
from devproxy.log import say
from devproxy.node.history import Span
from devproxy.node.local import LocalTree
from devproxy.node.network import DEFAULT, Place
from devproxy.node.participant import Participant
from devproxy.node.spec import own_id
from devproxy.node.stages import Report
from devproxy.node.tree import Tree

LOOK_S = 0.05
MEET_S = 600.0  # for all nodes to come
# A launcher on one node ends a little after that on another.
LAST_NODE_S = 60.0
# For a tree whose coordinator is gone: what it can still do by itself it does in that time.
ALONE_S = 15.0
KILL_S = 10.0


class First:
    """Node 0. Raises Refused where it cannot listen."""

    def __init__(
        self, meet: str, hello: Hello, *, job_id: str, store: str, network: str = "", address: str = ""
    ) -> None:  # fmt: skip
        self.job_id = job_id
        self.store = store
        self._tree: Tree | None = None
        self._others: list[RemoteTree] = []
        self._coordinator: JobCoordinator | None = None
        self._stopping = False
        network = network or DEFAULT
        welcome = {"job_id": job_id, "store": store, "network": network}
        self._meeting = Meeting(meet, hello, welcome, self._deliver, self._node_lost)
        data = address or own_address(meet, 0)
        self.place = Place(0, hello.nodes, network, data, self._meeting.send, hello.encrypt_data)

    def _deliver(self, packets: list[bytes]) -> None:
        if self._tree is not None:
            self._tree.deliver(packets)

    def _node_lost(self, name: str) -> None:
        if self._tree is not None:
            _end_alone(self._tree, name, lambda: self._stopping)

    def attach(self, tree: Tree) -> None:
        self._tree = tree

    def gather(self, timeout_s: float, interrupted: Callable[[], None]) -> None:
        """All nodes are ready. Raises Refused."""
        self._others = self._meeting.wait(timeout_s, interrupted)

    def coordinator(self, *, phase: str = RUNNING, opened: Store | None = None) -> JobCoordinator:
        assert self._tree is not None
        trees: list[Participant] = [LocalTree(self._tree), *self._others]
        return JobCoordinator(
            self._tree.spec, trees, lib=self._tree.lib, phase=phase, opened=opened
        )

    def before_command(self, interrupted: Callable[[], None]) -> None:
        """Our servers listen. Returns when the commands may run. Raises Refused."""
        self.gather(MEET_S, interrupted)
        self._coordinator = self.coordinator()
        try:
            self._coordinator.introduce()
            for other in self._others:
                other.call("start")
        except DevproxyError as error:
            raise Refused(error.what, "nothing was started") from None
        assert self._tree is not None
        note_that_it_waits(self._tree.folder.path, False)

    def serve(self) -> Agent:
        """The job's verbs, from here on."""
        assert self._tree is not None
        assert self._coordinator is not None
        return serving.serve(self._tree, self._coordinator)

    def ended(self, interrupted: Callable[[], None]) -> None:
        """Our command has ended: theirs end as well."""
        end = time.monotonic() + LAST_NODE_S
        while time.monotonic() < end and not all(other.has_ended() for other in self._others):
            interrupted()
            time.sleep(LOOK_S)

    def stop(self) -> None:
        self._stopping = True
        self._meeting.stop()


class Other:
    """Another node. Raises Refused, also in node 0's words."""

    def __init__(
        self,
        meet: str,
        hello: Hello,
        *,
        timeout_s: float,
        interrupted: Callable[[], None],
        address: str = "",
    ) -> None:
        data = address or own_address(meet, hello.node)
        self._joined = Joined(meet, hello, timeout_s, interrupted)
        self.line = self._joined.line
        welcome = self._joined.welcome
        self.job_id = own_id(welcome["job_id"], hello.node)
        self.store = str(welcome["store"])
        network = str(welcome["network"])
        self.place = Place(
            hello.node, hello.nodes, network, data, self._joined.send, hello.encrypt_data
        )
        self.meet = meet
        self.member: Member | None = None
        self._ends = False
        self._tree: Tree | None = None

    def attach(self, tree: Tree) -> None:
        self._tree = tree
        self.member = Member(tree)
        self.line.handle = self.member.handle
        self.line.on_packets = lambda source, to, packets: tree.deliver(packets)
        self.line.on_lost = self._lost

    def serve(self) -> PartAgent:
        """Answers what is asked on this host. Raises Refused where the socket cannot be made."""
        assert self._tree is not None
        return PartAgent(self._tree.folder.path, Part(self._tree, self))

    def ready(self) -> None:
        """Our servers listen. Raises Refused."""
        assert self._tree is not None
        try:
            self._joined.ready(self._tree.gpus)
        except DevproxyError as error:
            raise Refused(error.what, "nothing was started") from None

    def wait_start(self, interrupted: Callable[[], None]) -> None:
        """Until the first node lets the commands run. Raises Refused where it does not."""
        assert self._tree is not None
        assert self.member is not None
        while not self.member.started.wait(LOOK_S):
            interrupted()
            if self._tree.code is not None and not self.member.is_asked():
                raise given_up(self._tree.code - 128)
            if self.line.lost.is_set() or self.member.over.is_set():
                raise Refused(f"{self.line.peer} is gone", "see what it says")

    def restore(self, news: Report, before_it_runs: Callable[[], None]) -> None:
        """Does what the first node asks for, until the tree runs. Raises Refused where it comes to nothing."""
        assert self.member is not None
        self.member.news, self.member.begin_streams = news, before_it_runs
        self.ready()
        self.wait_start(lambda: None)

    def before_command(self, interrupted: Callable[[], None]) -> None:
        """Our servers listen. Returns when the commands may run. Raises Refused."""
        assert self.member is not None
        self.ready()
        self.wait_start(interrupted)
        self.member.begin_streams = None  # the command's start does
        assert self._tree is not None
        note_that_it_waits(self._tree.folder.path, False)

    def _lost(self) -> None:
        """In the line's thread. The tree goes on for a while, for what it can do alone, and is then ended."""
        tree, member = self._tree, self.member
        if tree is None or member is None:
            return
        member.abandon()
        if not member.started.is_set():
            tree.end_now(1)
        _end_alone(tree, self.line.peer, lambda: self._ends or member.over.is_set())

    def ended(self, interrupted: Callable[[], None]) -> None:
        """Our command has ended: until the first node says that the job has, or is gone."""
        assert self.member is not None
        while not self.member.wait_over(LOOK_S) and not self.line.lost.is_set():
            interrupted()

    def stop(self) -> None:
        self._ends = True
        if self.member is not None:
            self.member.stop()
        self._joined.stop()


def given_up(number: int) -> Refused:
    """A signal that ends the job came before there was any of it."""
    return Refused(
        f"signal {number} came while it waited for the job's other nodes", "nothing of it runs here"
    )


def _end_alone(tree: Tree, peer: str, is_over: Callable[[], bool]) -> None:
    """A node is gone, and the job with it. Our tree may see that by itself, and say what it knows; then it is ended."""
    if is_over() or tree.code is not None:
        return
    say(f"{peer} is gone; job {tree.spec.job} is ended in {ALONE_S:g} s")
    end = time.monotonic() + ALONE_S
    for number in (15, 9):
        while time.monotonic() < end:
            if tree.code is not None or is_over():
                return
            time.sleep(LOOK_S)
        tree.send(number)
        end = time.monotonic() + KILL_S


class Part:
    """What a node that is not the first says of its job: coordinator_api.Coordinator without its verbs.

    The phase is the coordinator's, as node 0 has said it last; only a start and an end are seen here first.
    """

    def __init__(self, tree: Tree, side: Other) -> None:
        self._tree, self._side, self._meet = tree, side, side.meet
        self._ended = threading.Event()

    def status(self) -> api.JobStatus:
        spec, told = self._tree.spec, self._told()
        return api.JobStatus(
            job=spec.job,
            job_id=spec.job_id,
            phase=self._phase(),
            device=spec.device,
            gpus=self._tree.gpus,
            pid=os.getpid(),
            command=spec.command,
            started_unix_s=spec.started_unix_s,
            images=told.images,
            last_image=told.last_image,
            last_error=told.last_error,
            here=self._tree.gpus,
            nodes=[LocalTree(self._tree).about(), f"node 0: {self._meet}"],
            checkpointable=False,
            why_not=self._why(),
        )

    def _told(self) -> api.JobNews:
        return self._side.member.told if self._side.member else api.JobNews()

    def _phase(self) -> str:
        if self._tree.code is not None or self._side.line.lost.is_set():  # node 0 says nothing more
            return api.ENDING
        phase, member = self._told().phase, self._side.member
        if phase == api.RUNNING and not (member and member.started.is_set()):
            return api.STARTING  # the coordinator is there before the commands may run
        return phase

    def history(self, since_ns: int) -> list[Span]:
        return self._side.member.record.since(since_ns) if self._side.member else []

    def elsewhere(self) -> list[api.NodeServers]:
        """The first node asks the others."""
        return []

    def count_images(self) -> None:
        """The first node counts them."""

    def _why(self) -> str:
        place = self._side.place
        return f"it is node {place.tree} of a job of {place.trees} nodes"

    def _refuse(self, verb: str) -> Refused:
        remedy = f"give the verb to node 0 ({self._meet}): it is for all nodes"
        return Refused(f"{verb} of job {self._tree.spec.job}: {self._why()}", remedy)

    def checkpoint(
        self, *, cut_wait_ms: int | None, strict: bool, report: Report
    ) -> api.ImageFacts:
        raise self._refuse("checkpoint")

    def check(self, *, strict: bool, report: Report) -> list[str]:
        raise self._refuse("check")

    def suspend(self, *, strict: bool, cut_wait_ms: int | None, report: Report) -> api.ImageFacts:
        raise self._refuse("suspend")

    def resume(self, *, gpus: list[int] | None, report: Report) -> None:
        raise self._refuse("resume")

    def migrate(self, *, to: list[int], report: Report, anew: bool = False) -> dict[str, Any]:
        raise self._refuse("migrate")

    def resize(
        self, *, gpus: list[int], report: Report, onto: list[int] | None = None
    ) -> dict[str, Any]:
        raise self._refuse("resize")

    def kill(self, signal: int) -> None:
        self._tree.send(signal)

    def follow_log(self, offset: int) -> Iterator[bytes]:
        return follow_log(self._tree.spec.job, offset, self._ended)

    def end(self) -> None:
        self._ended.set()


class PartAgent:
    """Serves it."""

    def __init__(self, job_dir: str, part: Part) -> None:
        self._part = part
        path = os.path.join(job_dir, agent_service.SOCKET_NAME)
        self._service = agent_service.serve(part, path)
        self.operation = self._service.operation

    def finish(self, code: int) -> None:
        """As Agent.finish: the first node waits."""

    def stop(self) -> None:
        self._part.end()
        self._service.stop()


def new_job_id() -> str:
    return os.urandom(8).hex()
