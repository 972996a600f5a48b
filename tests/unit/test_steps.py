# SPDX-License-Identifier: Apache-2.0
"""Each step that a coordinator may ask a tree for reaches a tree on another host too."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from devproxy.control.line import Line
from devproxy.control.member import Member
from devproxy.control.remote import RemoteDump, RemoteMove, RemoteRestoring, RemoteTree
from devproxy.node.answer import Answer, Marked, Met, Still
from devproxy.node.dump import TreeDump
from devproxy.node.move import TreeMove
from devproxy.node.participant import Dump, Move, Restoring, steps_of
from devproxy.node.restore import TreeRestore
from devproxy.node.stages import Stages

KINDS = [
    (Dump, TreeDump, RemoteDump),
    (Move, TreeMove, RemoteMove),
    (Restoring, TreeRestore, RemoteRestoring),
]
# By annotation, something to give and something to get back. A step with a new one needs a line here.
GIVEN: dict[str, Any] = {
    "int": 7,
    "tuple[int, int]": (1, 2),
    "list[dict[str, Any]]": [{"a": 1}],
    "BaseException | None": None,
    "Writer": SimpleNamespace(image_id="i", add_sizes=lambda sizes: None),
    "Callable[[int, int], None]": lambda done, total: None,
}
ANSWERED: dict[str, Any] = {
    "None": None,
    "bool": True,
    "dict[str, Any]": {"host": "h"},
    "list[dict[str, Any]]": [{"b": 2}],
    "Answer": Answer(True, [{"b": 2}], "", "debt"),
    "Met": Met(3, 2, [{"b": 2}]),
    "Still": Still(True, [{"b": 2}]),
    "Marked": Marked(True, [{"b": 2}]),
}
STEPS = [(*kind, step) for kind in KINDS for step in sorted(steps_of(kind[0]))]


def test_the_steps_are_those_of_the_protocols() -> None:
    assert {"check", "ranks", "barrier", "close", "put_share"} <= steps_of(Dump)
    assert {"check", "ranks", "barrier", "close", "ready", "hand_over"} <= steps_of(Move)
    assert steps_of(Restoring) == {"prepare", "go_on", "settle", "undo"}


@pytest.mark.parametrize(
    ("asked", "local", "remote", "step"), STEPS, ids=[f"{s[0].__name__}-{s[3]}" for s in STEPS]
)
def test_a_step_reaches_the_other_node(
    asked: type,
    local: type,
    remote: type,
    step: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DEVPROXY_STATE_DIR", str(tmp_path / "state"))
    signature = inspect.signature(getattr(asked, step))
    answer = ANSWERED[signature.return_annotation]
    seen: list[str] = []

    def act(self: object, *arguments: object) -> Any:
        seen.append(step)
        return answer

    def put(self: object, part: object, dump: TreeDump, image_id: str) -> dict[str, Any]:
        return {"tree": dump.put(None, None), "sizes": {}}  # type: ignore[arg-type]

    monkeypatch.setattr(local, step, act)
    # Stores are not what this is about.
    monkeypatch.setattr(Member, "_put", put)
    monkeypatch.setattr(
        Member, "_put_share", lambda self, part, dump, *given: dump.put_share(*given)
    )
    here, there = Line("node 1 (other)"), Line("node 0 (here)")
    for reader, writer in ((here, there), (there, here)):
        threading.Thread(target=reader.read, args=(writer.outgoing(),), daemon=True).start()
    tree: Any = SimpleNamespace(
        spec=SimpleNamespace(job="j", job_id="ab", store=""),
        folder=SimpleNamespace(path=str(tmp_path)),
        begin_streams=lambda: None,
    )
    member = Member(tree)
    there.handle = member.handle
    target = local.__new__(local)
    still = SimpleNamespace(still_s=0.0)
    vars(target).update(_parked=still, warnings=[], freeze_s=0.0, handed_over=False)
    stages = Stages(lambda _: None, "refuse_early", "job j")
    part = remote(RemoteTree(here, 1, "other", [0]), "", {}, stages)
    part.part = member._add(lambda _: target)
    given = [GIVEN[p.annotation] for p in list(signature.parameters.values())[1:]]
    try:
        assert getattr(part, step)(*given) == answer
        assert part.warnings == []  # where a last step has failed
        assert seen == [step]
    finally:
        here.close()
