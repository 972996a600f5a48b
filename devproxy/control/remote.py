# SPDX-License-Identifier: Apache-2.0
"""A tree on another host, as its job's coordinator sees it: node/participant.py over a line.

What it is asked for is done by member.py at the other end. A tree whose line is lost has ended for its job: its servers'
connections break too, and the rest of the job ends of that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from devproxy.checkpoint.image import Image
from devproxy.checkpoint.store import Store
from devproxy.checkpoint.writer import Writer
from devproxy.control import messages
from devproxy.control._pb import job_pb2 as pb
from devproxy.control.coordinator_api import JobNews, NodeServers
from devproxy.control.line import Line, LineLost
from devproxy.errors import DevproxyError
from devproxy.node.answer import Answer, Marked, Met, Still
from devproxy.node.local import node_line
from devproxy.node.participant import Dump
from devproxy.node.restore import Wishes
from devproxy.node.stages import Progress, Stages

FACTS_S = 0.25  # how old they may be
STATISTICS_S = 3.0  # for those who look at the job
ANSWERS_S = 20.0  # to a question that the other side answers at once


class RemoteTree:
    """See participant.Participant. number: of the node. host: what that calls itself. gpus: its own numbers."""

    def __init__(self, line: Line, number: int, host: str, gpus: list[int]) -> None:
        self.line = line
        self.number = number
        self.host = host
        self.name = f"node {number} ({host})"
        self._mu = threading.Lock()
        self._facts: dict[str, Any] = {"gpus": gpus, "processes": True, "lives": True}
        self._facts |= {"ended": False, "code": None, "lost": ""}
        self._asked = 0.0

    # -- facts --------------------------------------------------------------------------------------------------

    def _fact(self, name: str) -> Any:
        """Of a tree whose host does not answer: that it has ended."""
        with self._mu:
            if not self.line.lost.is_set() and time.monotonic() - self._asked > FACTS_S:
                try:
                    self._facts = self.line.call("facts", timeout_s=ANSWERS_S)
                except LineLost:
                    pass
                self._asked = time.monotonic()
            if self.line.lost.is_set():
                gone = {"processes": False, "lives": False, "ended": True, "lost": f"{self.name} is gone"}  # fmt: skip
                self._facts |= gone
            return self._facts[name]

    def ask_anew(self) -> None:
        """What is known may not be so any more."""
        with self._mu:
            self._asked = 0.0

    @property
    def gpus(self) -> list[int]:
        return list(self._fact("gpus"))

    @property
    def code(self) -> int | None:
        code = self._fact("code")
        return None if code is None else int(code)

    def about(self) -> str:
        return node_line(self.name, self.gpus, self.code)

    def has_processes(self) -> bool:
        return bool(self._fact("processes"))

    def lives(self) -> bool:
        return bool(self._fact("lives"))

    def has_ended(self) -> bool:
        return bool(self._fact("ended"))

    def was_ended(self) -> bool:
        """By what it said last; asks nobody."""
        return bool(self._facts["ended"])

    def lost_servers(self) -> str:
        return str(self._fact("lost"))

    def servers(self, phase: str) -> NodeServers:
        """phase: the job's, which that host may not have heard yet."""
        try:
            found = self.line.call("servers", {"phase": phase}, timeout_s=STATISTICS_S)
        except DevproxyError as error:
            return NodeServers(self.name, [], error.what)
        return NodeServers(self.name, found)

    def tell(self, number: int, news: JobNews) -> None:
        """Waits for nobody. number: later news have a higher one."""
        self.line.post("news", {"number": number, "news": asdict(news)})

    def steps(self) -> int:
        return int(self.call("steps"))

    def send(self, number: int) -> None:
        self._try("send", {"number": number})

    def call(self, verb: str, arguments: dict[str, Any] | None = None) -> Any:
        try:
            return self.line.call(verb, arguments, timeout_s=ANSWERS_S)
        except DevproxyError as error:
            raise named(self.name, error) from None

    def _try(self, verb: str, arguments: dict[str, Any] | None = None) -> None:
        try:
            self.call(verb, arguments)
        except DevproxyError:
            pass  # it is gone, and its job with it

    # -- verbs --------------------------------------------------------------------------------------------------

    def dump(self, stages: Stages, *, leave: bool, strict: bool) -> RemoteDump:
        return RemoteDump(self, "dump", {"leave": leave, "strict": strict}, stages)

    def dumped(self, dump: Dump) -> None:
        assert isinstance(dump, RemoteDump)
        self._try("dumped", {"part": dump.part})

    def place(self, onto: list[int]) -> tuple[list[int], bool]:
        to, known = self.call("place", {"onto": onto})
        return to, known

    def move(self, to: list[int], stages: Stages, onto: list[int] | None = None) -> RemoteMove:
        more = {"onto": onto} if onto else {}
        return RemoteMove(self, "move", {"to": to, **more}, stages)

    def restore(
        self,
        store: Store,
        image: Image,
        number: int,
        gpus: list[int],
        wishes: Wishes,
        stages: Stages,
    ) -> RemoteRestoring:
        arguments = {"image": image.id, "number": number, "gpus": gpus, "wishes": asdict(wishes)}
        return RemoteRestoring(self, "restore", arguments, stages)

    def addresses(self) -> list[str]:
        return list(self.call("addresses"))

    def meet(self, table: str) -> None:
        self.call("meet", {"table": table})

    def begin(self) -> None:
        self._try("begin")

    def look(self) -> None:
        """Its own host does."""

    def end(self, *, has_image: bool, asleep: bool) -> None:
        self._try("end", {"has_image": has_image, "asleep": asleep})


def named(name: str, error: DevproxyError) -> DevproxyError:
    if not error.what.startswith(name):
        error.what = f"{name}: {error.what}"
        error.args = (str(error),)
    return error


class _Part:
    """An operation's part at the other end: begun with the first step."""

    def __init__(
        self, tree: RemoteTree, kind: str, arguments: dict[str, Any], stages: Stages
    ) -> None:
        self.stages = stages
        self.warnings: list[str] = []
        self.still_s = 0.0
        self.freeze_s = 0.0
        self.handed_over = False
        self.part = 0
        self._tree = tree
        self._begin = (kind, arguments)

    def _do(self, step: str, *arguments: Any, report: Callable[[Progress], None] | None = None) -> Any:  # fmt: skip
        """Raises what the other end raised, with its host's name."""
        line = self._tree.line
        try:
            if not self.part:
                kind, given = self._begin
                self.part = int(line.call(kind, given, timeout_s=ANSWERS_S))
            call = {"part": self.part, "step": step, "arguments": arguments}
            answer = line.call("part", call, report=report or self._news)
        except DevproxyError as error:
            raise named(self._tree.name, error) from None
        finally:
            self._tree.ask_anew()  # a step changes its GPUs, or loses a server
        self._note(answer)
        if answer["error"]:
            raise named(self._tree.name, answer_error(answer["error"]))
        return answer["result"]

    def _news(self, progress: Progress) -> None:
        text = f"{self._tree.name}: {progress.text}"
        self.stages.beside(progress.stage, text, progress.done_bytes, progress.total_bytes)

    def _note(self, answer: dict[str, Any]) -> None:
        self.stages.name, self.stages.object = answer["stage"], answer["object"]
        self.stages.seconds.update(answer["seconds"])
        self.warnings = [f"{self._tree.name}: {text}" for text in answer["warnings"]]
        self.still_s, self.freeze_s = answer["still_s"], answer["freeze_s"]
        self.handed_over = answer["handed_over"]

    def _last(self, step: str, *arguments: Any) -> None:
        """Undoes what the other end has begun; where it is gone, nothing of it stands still."""
        if not self.part:
            return
        try:
            self._do(step, *arguments)
        except DevproxyError as error:
            self.warnings.append(str(error))

    def check(self) -> None:
        self._do("check")

    def aim(self, reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return list(self._do("aim", reports))

    def hold(self) -> list[dict[str, Any]]:
        return list(self._do("hold"))

    def withhold(self) -> Still:
        return Still(**self._do("withhold"))

    def mark(self, number: int) -> Marked:
        return Marked(**self._do("mark", number))

    def agree(self, reports: list[dict[str, Any]]) -> Answer:
        return Answer(**self._do("agree", reports))

    def ranks(self) -> list[dict[str, Any]]:
        return list(self._do("ranks"))

    def barrier(self, comm: tuple[int, int], attempt: int) -> Met:
        return Met(**self._do("barrier", comm, attempt))

    def lift(self) -> None:
        self._last("lift")


class RemoteDump(_Part):
    """See participant.Dump."""

    def cut(self, wait_ms: int) -> None:
        self._do("cut", wait_ms)

    def write(self) -> None:
        self._do("write")

    def put_share(self, writer: Writer, number: int, of: int) -> None:
        self._do("put_share", writer.image_id, number, of)

    def put(self, writer: Writer, report: Callable[[int, int], None]) -> dict[str, Any]:
        def news(progress: Progress) -> None:
            report(progress.done_bytes, progress.total_bytes)

        answer = self._do("put", writer.image_id, report=news)
        writer.add_sizes(answer["sizes"])
        return dict(answer["tree"])

    def thaw(self) -> None:
        self._do("thaw")

    def end_tree(self) -> None:
        self._do("end_tree")

    def tree_has_ended(self) -> bool:
        try:
            return bool(self._do("tree_has_ended")) if self.part else False
        except DevproxyError:
            return False

    def leave(self) -> None:
        self._do("leave")

    def go_on(self) -> None:
        self._last("go_on")

    def close(self, error: BaseException | None) -> None:
        self._last("close", str(error) if error else "")


class RemoteMove(_Part):
    """See participant.Move."""

    def cut(self) -> None:
        self._do("cut")

    def copy(self) -> None:
        self._do("copy")

    def start(self) -> None:
        self._do("start")

    def ready(self) -> None:
        self._do("ready")

    def hand_over(self) -> None:
        self._do("hand_over")

    def close(self) -> None:
        self._last("close")


class RemoteRestoring(_Part):
    """See participant.Restoring."""

    def prepare(self) -> None:
        self._do("prepare")

    def go_on(self) -> None:
        self._do("go_on")

    def settle(self) -> None:
        self._last("settle")

    def undo(self) -> None:
        self._last("undo")


def answer_error(fields: dict[str, Any]) -> DevproxyError:
    """See member.error_fields."""
    return messages.error_from_pb(pb.ErrorInfo(**fields))
