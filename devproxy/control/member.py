# SPDX-License-Identifier: Apache-2.0
"""What a node that is not the first does for its job's coordinator (remote.py is the other end).

Every call names one step of one part of an operation; the parts live here, so that a coordinator that goes away in the
middle leaves nothing standing still.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from typing import Any

from devproxy.checkpoint import image
from devproxy.checkpoint.store import Store
from devproxy.checkpoint.writer import Writer
from devproxy.control import messages, servers
from devproxy.control.coordinator_api import JobNews
from devproxy.errors import DevproxyError
from devproxy.node.dump import TreeDump
from devproxy.node.history import History
from devproxy.node.local import LocalTree
from devproxy.node.move import TreeMove
from devproxy.node.participant import Dump, Move, Restoring, steps_of
from devproxy.node.restore import TreeRestore, Wishes
from devproxy.node.spec import own_id
from devproxy.node.stages import Progress, Report, Stages
from devproxy.node.tree import Tree

LOOK_S = 0.5


class _Part:
    def __init__(self, make: Callable[[Stages], Any], about: str, record: History) -> None:
        self.report: Report = lambda progress: None
        self.stages = Stages(lambda progress: self.report(progress), "refuse_early", about, record)
        self.object = make(self.stages)
        self.failure: BaseException | None = None
        self.busy = (
            threading.Lock()
        )  # one step at a time, also where the coordinator goes away in the middle of one
        self.writer: Writer | None = None
        self.runs = False  # of a restore: the tree has gone on

    def end_upload(self) -> None:
        writer, self.writer = self.writer, None
        if writer is not None:
            writer.abort()  # what was put stays: the coordinator's manifest names it


class Member:
    """The tree of this node. Threads: each call has its own; the coordinator does one step of a part at a time."""

    def __init__(self, tree: Tree) -> None:
        self.started = threading.Event()  # the job's command may run, or runs again
        self.record = History()
        self.told = JobNews()  # what the coordinator has said last
        self.over = threading.Event()  # the coordinator has said goodbye
        self._tree = tree
        self._local = LocalTree(tree)
        self._mu = threading.Lock()
        self._parts: dict[int, _Part] = {}
        self._number = 0
        self._told_number = 0
        self._ended = threading.Event()
        self.begin_streams: Callable[[], None] | None = tree.begin_streams  # None: they have begun
        self.news: Report = lambda progress: None  # also for our own host

    def handle(self, verb: str, arguments: dict[str, Any], report: Report) -> Any:
        """For Line.handle."""
        step = getattr(self, f"_call_{verb}", None)
        if step is None:
            raise DevproxyError(f"this devproxy does not know the call {verb!r}")
        if verb == "part":
            return step(report=report, **arguments)
        return step(**arguments)

    def is_asked(self) -> bool:
        """An operation has begun."""
        return self._number > 0

    def abandon(self) -> None:
        """The coordinator is gone: whatever stands still goes on, or is undone."""
        with self._mu:
            parts, self._parts = list(self._parts.values()), {}
        for part in parts:
            with part.busy:
                self._give_up(part)

    def _give_up(self, part: _Part) -> None:
        one = part.object
        try:
            if isinstance(one, TreeRestore):
                if part.runs:
                    one.settle()
                    self._runs_again()
                else:
                    one.undo()
            elif isinstance(one, TreeDump):
                one.close(part.failure or DevproxyError("node 0 is gone"))
            else:
                one.close()
        finally:
            part.end_upload()

    def stop(self) -> None:
        """The tree has ended, and nobody will say how its files are to be kept."""
        self._end(has_image=False, asleep=False)

    # -- facts --------------------------------------------------------------------------------------------------

    def _call_facts(self) -> dict[str, Any]:
        local = self._local
        return {
            "gpus": local.gpus,
            "processes": local.has_processes(),
            "lives": local.lives(),
            "ended": local.has_ended(),
            "code": local.code,
            "lost": local.lost_servers(),
        }

    def _call_servers(self, phase: str) -> list[dict[str, Any]]:
        gpus = self._local.gpus
        facts = {"phase": phase, "here": gpus, "gpus": gpus}
        return servers.ask(facts, self._tree.folder.path, servers.client_abi())

    def _call_news(self, number: int, news: dict[str, Any]) -> None:
        """Each call has a thread of its own, so the later one may be first."""
        with self._mu:
            if number > self._told_number:
                self._told_number, self.told = number, JobNews(**news)

    def _call_steps(self) -> int:
        return self._local.steps()

    def _call_send(self, number: int) -> None:
        self._local.send(number)

    def _call_addresses(self) -> list[str]:
        return self._local.addresses()

    def _call_meet(self, table: str) -> None:
        self._local.meet(table)

    def _call_start(self) -> None:
        self.started.set()

    def _call_bye(self) -> None:
        self.over.set()

    def _call_begin(self) -> None:
        self._local.begin()

        def look() -> None:
            while not self._ended.wait(LOOK_S):
                self._local.look()

        threading.Thread(target=look, name="look", daemon=True).start()

    def _call_end(self, has_image: bool, asleep: bool) -> None:
        self._end(has_image, asleep)

    def _end(self, has_image: bool, asleep: bool) -> None:
        with self._mu:
            if self._ended.is_set():
                return
            self._ended.set()
        self._local.end(has_image=has_image, asleep=asleep)

    # -- operations ---------------------------------------------------------------------------------------------

    def _add(self, make: Callable[[Stages], Any]) -> int:
        part = _Part(make, f"job {self._tree.spec.job}", self.record)
        with self._mu:
            self._number += 1
            self._parts[self._number] = part
            return self._number

    def _call_dump(self, leave: bool, strict: bool) -> int:
        return self._add(lambda stages: self._local.dump(stages, leave=leave, strict=strict))

    def _call_dumped(self, part: int) -> None:
        with self._mu:
            found = self._parts.pop(part, None)
        if found:
            self._local.dumped(found.object)

    def _call_place(self, onto: list[int]) -> tuple[list[int], bool]:
        return self._local.place(onto)

    def _call_move(self, to: list[int], onto: list[int] | None = None) -> int:
        return self._add(lambda stages: self._local.move(to, stages, onto))

    def _call_restore(
        self, image: str, number: int, gpus: list[int], wishes: dict[str, Any]
    ) -> int:
        return self._add(lambda stages: self._restoring(image, number, gpus, wishes, stages))

    def _restoring(
        self, image_id: str, number: int, gpus: list[int], wishes: dict[str, Any], stages: Stages
    ) -> TreeRestore:
        store = Store.open(self._tree.spec.store)
        whole = image.load(store, image_id)
        if wishes["image_job_id"]:
            wishes["image_job_id"] = own_id(wishes["image_job_id"], number)
        wishes["looked_beside"] = False  # this host was looked at before the nodes met, long ago
        if wishes["other_device"]:
            wishes["other_device"] = tuple(wishes["other_device"])
        return self._local.restore(store, whole, number, gpus, Wishes(**wishes), stages)

    def _call_part(self, part: int, step: str, arguments: list[Any], report: Report) -> Any:
        """Answers how the part stands, also where the step has failed."""
        with self._mu:
            one = self._parts.get(part)
        if one is None:
            raise DevproxyError(f"there is no part {part}")

        def both(progress: Progress) -> None:
            self.news(progress)
            report(progress)

        one.report = both
        result: Any = None
        error: BaseException | None = None
        with one.busy:
            try:
                result = self._step(one, step, arguments)
            except BaseException as caught:
                error = one.failure = caught
        kept = isinstance(one.object, TreeDump) and not one.failure  # for dumped()
        if step in ("close", "undo", "settle") and not kept:
            with self._mu:
                self._parts.pop(part, None)
        return {
            "result": result,
            "error": error_fields(error) if error else None,
            "stage": one.stages.name,
            "object": one.stages.object,
            "seconds": one.stages.seconds,
            "warnings": getattr(one.object, "warnings", []),
            "still_s": getattr(one.object, "still_s", 0.0),
            "freeze_s": getattr(one.object, "freeze_s", 0.0),
            "handed_over": getattr(one.object, "handed_over", False),
        }

    def _step(self, one: _Part, step: str, arguments: list[Any]) -> Any:
        target = one.object
        if isinstance(target, TreeDump) and step == "put_share":
            return self._put_share(one, target, *arguments)
        if isinstance(target, TreeDump) and step == "put":
            return self._put(one, target, *arguments)
        if isinstance(target, TreeDump) and step == "close":
            error = one.failure or (DevproxyError(arguments[0]) if arguments[0] else None)
            one.end_upload()
            return target.close(error)
        if step not in _STEPS[type(target)]:
            raise DevproxyError(f"{type(target).__name__} has no step {step!r}")
        result = getattr(target, step)(*arguments)
        if isinstance(target, TreeRestore) and step == "go_on":
            one.runs = True
        if isinstance(target, TreeRestore) and step == "settle":
            self._runs_again()
        is_answer = is_dataclass(result) and not isinstance(result, type)
        return asdict(result) if is_answer else result

    def _put_share(self, one: _Part, dump: TreeDump, image_id: str, number: int, of: int) -> None:
        """By an upload of our own, which ends with the part: until then gc leaves its packs alone."""
        one.end_upload()  # of a try before
        one.writer = Store.open(self._tree.spec.store).writer(image_id)
        dump.put_share(one.writer, number, of)
        one.writer.flush()

    def _put(self, one: _Part, dump: TreeDump, image_id: str) -> dict[str, Any]:
        """Behind _put_share() of the same image, by all nodes."""
        if one.writer is None or one.writer.image_id != image_id:
            raise DevproxyError(f"no upload of image {image_id} has begun here")
        one.writer.look_again()

        def report(done: int, total: int) -> None:
            one.report(Progress("upload", "storing", done, total))

        tree = dump.put(one.writer, report)
        one.writer.flush()
        return {"tree": tree, "sizes": one.writer.sizes()["per_kind"]}

    def _runs_again(self) -> None:
        begin, self.begin_streams = self.begin_streams, None
        if begin is not None:
            begin()
        self.started.set()

    def wait_over(self, timeout_s: float) -> bool:
        """Until the coordinator has said how the job ended, or is gone."""
        end = time.monotonic() + timeout_s
        while not self._ended.wait(0.05):
            if self.over.is_set() or time.monotonic() > end:
                return self.over.is_set()
        return True


_STEPS: dict[type, frozenset[str]] = {
    TreeDump: steps_of(Dump),
    TreeMove: steps_of(Move),
    TreeRestore: steps_of(Restoring),
}


def error_fields(error: BaseException) -> dict[str, Any]:
    """Of an error, as JSON; remote.answer_error makes the error again."""
    info = messages.error_to_pb(error)
    names = ("kind", "what", "remedy", "stage", "object", "state", "exit_code")
    return {name: getattr(info, name) for name in names}
