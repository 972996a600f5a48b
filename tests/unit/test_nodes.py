# SPDX-License-Identifier: Apache-2.0
"""A job of two nodes, joined by a real line: what the node that is not the first says of its job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from devproxy.control import coordinator_api as api
from devproxy.control.coordinate import job
from devproxy.control.coordinator import JobCoordinator
from devproxy.control.line import Line
from devproxy.control.member import Member
from devproxy.control.remote import RemoteTree
from devproxy.control.side import Other, Part
from devproxy.errors import CheckpointError, Refused
from devproxy.node.stages import Report, Stages
from tests.unit.test_coordinator import FakeTree, World


class FarTree(FakeTree, RemoteTree):
    """Does its steps here, as a FakeTree; what the coordinator tells the other node goes over the line."""

    gpus: list[int] = []  # not asked for over the line

    def __init__(self, number: int, gpus: list[int], seen: list[str], line: Line) -> None:
        RemoteTree.__init__(self, line, number, "other", gpus)
        FakeTree.__init__(self, number, gpus, seen)


def line_to(other: Line | None = None) -> Line:
    """other: the other end. Without one nobody reads what is said, as of a host that has stopped."""
    line = Line("node 1 (other)")
    if other is not None:
        for reader, writer in ((line, other), (other, line)):
            threading.Thread(target=reader.read, args=(writer.outgoing(),), daemon=True).start()
    return line


def soon(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


class Node:
    """The other node: its tree is not started."""

    def __init__(self, folder: Path) -> None:
        place = SimpleNamespace(tree=1, trees=2)
        spec = SimpleNamespace(
            job="j.1", job_id="ab12.1", device="soft", command=["a"], started_unix_s=1.0
        )
        at = SimpleNamespace(path=str(folder))
        tree: Any = SimpleNamespace(
            spec=spec, folder=at, place=place, gpus=[7], code=None, root=None, begin_streams=lambda: None
        )  # fmt: skip
        self.tree = tree
        self.line = Line("node 0 (here)")
        self.member = Member(tree)
        self.line.handle = self.member.handle
        side: Any = SimpleNamespace(member=self.member, meet="here:1", place=place, line=self.line)
        self.part = Part(tree, side)

    @property
    def phase(self) -> str:
        return self.part.status().phase


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(job, "is_root", lambda: True)
    monkeypatch.setenv("DEVPROXY_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setenv("DEVPROXY_STATE_DIR", str(tmp_path / "state"))
    return World(tmp_path, 1)


@pytest.fixture
def node(world: World) -> Node:
    return Node(world.folder)


def join(world: World, line: Line) -> FarTree:
    far = FarTree(1, [7], world.seen, line)
    trees: list[Any] = [*world.trees, far]
    world.job = JobCoordinator(world.spec, trees, lib=world.lib, opened=world.store)
    return far


def test_a_node_says_the_phase_that_the_coordinator_has_written(world: World, node: Node) -> None:
    far = join(world, line_to(node.line))
    node.member.started.set()
    assert soon(lambda: node.phase == api.RUNNING)
    facts = world.suspend()
    assert soon(lambda: node.phase == api.SUSPENDED)
    status = node.part.status()
    assert (status.last_image, status.images, status.last_error) == (facts.id, 1, "")
    world.resume()
    assert soon(lambda: node.phase == api.RUNNING)
    far.fails_at = "write"
    with pytest.raises(CheckpointError):
        world.checkpoint()
    assert soon(lambda: "broken" in node.part.status().last_error)
    assert node.phase == api.RUNNING
    world.trees[0].ended = True  # the first node's command has ended
    world.job.tell_nodes()
    assert soon(lambda: node.phase == api.ENDING)


def test_a_node_that_does_not_answer_delays_no_verb(world: World) -> None:
    line = line_to()
    join(world, line)
    begun = time.monotonic()
    world.checkpoint()
    world.suspend()
    assert time.monotonic() - begun < 10  # a call that waits has 20 s
    assert line._waiting == {}
    line.close()
    world.resume()
    assert world.job.phase == api.RUNNING


def test_a_job_starts_where_its_command_may_not_run_yet(world: World, node: Node) -> None:
    """The coordinator is there before the servers know of one another."""
    join(world, line_to(node.line))
    assert soon(lambda: node.member.told.phase == api.RUNNING)
    assert node.phase == api.STARTING


def test_what_comes_late_is_old(node: Node) -> None:
    """Each call has a thread of its own, so a later one may be first."""
    node.member.started.set()
    for number, phase in ((2, api.SUSPENDED), (1, api.DUMPED)):
        news = {"phase": phase, "images": 1, "last_image": "i", "last_error": ""}
        node.member.handle("news", {"number": number, "news": news}, lambda _: None)
    assert node.phase == api.SUSPENDED


def test_a_job_without_its_first_node_ends(world: World, node: Node) -> None:
    """What that said last is no news any more."""
    node.member.started.set()
    join(world, line_to(node.line))
    assert soon(lambda: node.phase == api.RUNNING)
    node.line.close()
    assert node.phase == api.ENDING


def test_a_restore_that_nobody_has_asked_for_anything_ends(node: Node) -> None:
    """By a signal. Once it is asked it goes on: the coordinator undoes on all nodes what fails."""
    side = Other.__new__(Other)
    side.line, side.member, side._tree = node.line, node.member, node.tree
    node.tree.code = 128 + 15
    with pytest.raises(Refused, match="signal 15 came while it waited"):
        side.wait_start(lambda: None)
    node.member._number = 1
    threading.Timer(0.3, node.member.started.set).start()
    side.wait_start(lambda: None)


def test_what_a_step_has_changed_is_asked_for() -> None:
    """At once: a verb says how the tree stands behind its last step, not how it stood just before."""
    facts = {"gpus": [0], "processes": True, "lives": True, "ended": False, "code": None, "lost": ""}  # fmt: skip
    here, there = Line("node 1 (other)"), Line("node 0 (here)")
    for reader, writer in ((here, there), (there, here)):
        threading.Thread(target=reader.read, args=(writer.outgoing(),), daemon=True).start()

    def handle(verb: str, arguments: dict[str, Any], report: Report) -> Any:
        if verb == "facts":
            return dict(facts)
        if verb == "part":
            facts.update(gpus=[3], lost="the server of GPU 0 was ended by signal 9")
            return {"result": None, "error": None, "stage": "hand_over", "object": "GPU 3", "seconds": {},
                    "warnings": [], "still_s": 0.0, "freeze_s": 0.0, "handed_over": True}  # fmt: skip
        return 1

    there.handle = handle
    try:
        tree = RemoteTree(here, 1, "other", [0])
        move = tree.move([3], Stages(lambda _: None, "refuse_early", "job j"))
        assert (tree.gpus, tree.lost_servers()) == ([0], "")
        move.hand_over()
        assert (tree.gpus, tree.lost_servers()) == ([3], facts["lost"])
    finally:
        here.close()
