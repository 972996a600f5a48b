# SPDX-License-Identifier: Apache-2.0
"""What a job's coordinator asks of each of its trees: on this host (local.py), or on another (control/remote.py).

A participant decides nothing about the job: it says what it can do, does its part, and undoes it. Everything that the
coordinator must know of an operation stands in the operation's object, so that a participant has no state of a verb
that failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from devproxy.checkpoint.image import Image
from devproxy.checkpoint.store import Store
from devproxy.checkpoint.writer import Writer
from devproxy.node.answer import Answer, Marked, Met, Still
from devproxy.node.restore import Wishes
from devproxy.node.stages import Stages


class Part(Protocol):
    """A tree's part of an operation that cuts the job: how it comes to where that may be."""

    stages: Stages  # this tree's own
    warnings: list[str]

    @property
    def still_s(self) -> float: ...  # the tree stood still, as far as it goes on again

    def check(self) -> None:
        """Nothing has stopped. Raises Refused by name of what is in the way."""
        ...

    def ranks(self) -> list[dict[str, Any]]:
        """What each client has submitted. Holds nothing."""
        ...

    def barrier(self, comm: tuple[int, int], attempt: int) -> Met:
        """The ranks meet beside that communicator's collectives, and stand there. Asked again until they have."""
        ...

    def aim(self, reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Whoever has the least device memory rests, as its report says; who owes goes on. Asked again and again."""
        ...

    def hold(self) -> list[dict[str, Any]]:
        """Nobody goes past the communication that is submitted. What has been, client by client."""
        ...

    def withhold(self) -> Still:
        """Nothing of a communicator begins any more, once it is still."""
        ...

    def mark(self, number: int) -> Marked:
        """A mark behind all that its servers have said to those of other trees."""
        ...

    def agree(self, reports: list[dict[str, Any]]) -> Answer:
        """All ranks' reports: whoever owes goes on."""
        ...

    def lift(self) -> None:
        """Nothing is held any more. At any time before the cut."""
        ...


class Dump(Part, Protocol):
    """One tree's part of an image. In this order; go_on() and close() from any point on."""

    freeze_s: float  # the processes stood still

    def cut(self, wait_ms: int) -> None:
        """The servers stand still between two messages."""
        ...

    def write(self) -> None:
        """Everything is staged. The processes are frozen when it returns."""
        ...

    def put_share(self, writer: Writer, number: int, of: int) -> None:
        """Ahead of put(), where there are several: what all of them hold goes into the store once. The caller flushes `writer`,
        and looks again, when all have done this."""
        ...

    def put(self, writer: Writer, report: Callable[[int, int], None]) -> dict[str, Any]:
        """Into the store. Returns the tree's entry in the manifest."""
        ...

    def thaw(self) -> None:
        """The tree runs on."""
        ...

    def end_tree(self) -> None:
        """The image is whole: the processes end."""
        ...

    def tree_has_ended(self) -> bool:
        """After end_tree() failed."""
        ...

    def leave(self) -> None:
        """The processes have ended: the servers end."""
        ...

    def go_on(self) -> None: ...

    def close(self, error: BaseException | None) -> None:
        """The operation's end, with its error: nothing stands still, nothing is left in the staging folder."""
        ...


class Move(Part, Protocol):
    """A tree's change to other GPUs of its host. In this order; close() from any point on."""

    handed_over: bool  # no way back

    def cut(self) -> None: ...

    def copy(self) -> None: ...

    def start(self) -> None: ...

    def ready(self) -> None:
        """The last step from which there is a way back. No tree hands over before all have passed it."""
        ...

    def hand_over(self) -> None: ...

    def close(self) -> None: ...


class Restoring(Protocol):
    """One tree out of an image. In this order; undo() from any point before settle()."""

    stages: Stages

    def prepare(self) -> None:
        """Processes live, servers hold what they held, and stand still; nothing passes between the trees."""
        ...

    def go_on(self) -> None:
        """It runs, and is the job's when all do: until then its end is not the job's."""
        ...

    def settle(self) -> None: ...

    def undo(self) -> None:
        """Nothing of the tree runs."""
        ...


def steps_of(kind: type) -> frozenset[str]:
    """The methods of one of the protocols above: what a coordinator may ask for, also over a line."""
    return frozenset(
        name
        for base in kind.__mro__
        for name, what in vars(base).items()
        if callable(what) and not name.startswith("_")
    )


class Participant(Protocol):
    """One process tree with its servers."""

    @property
    def gpus(self) -> list[int]:
        """[k]: the host's GPU behind the tree's GPU k."""
        ...

    @property
    def name(self) -> str:
        """The node's number and host."""
        ...

    @property
    def code(self) -> int | None:
        """The exit code of its command, which has ended for good; None before, and where nobody knows."""
        ...

    def about(self) -> str:
        """For `devproxy status`: which node it is, where, on which GPUs."""
        ...

    def has_processes(self) -> bool: ...

    def lives(self) -> bool:
        """Its command, and not only what that left running."""
        ...

    def has_ended(self) -> bool:
        """For good."""
        ...

    def lost_servers(self) -> str:
        """Which servers have ended under the tree, and how; "" for none."""
        ...

    def steps(self) -> int:
        """Optimizer steps so far. Raises OSError or DevproxyError where no server says."""
        ...

    def send(self, number: int) -> None:
        """A signal."""
        ...

    def dump(self, stages: Stages, *, leave: bool, strict: bool) -> Dump: ...

    def dumped(self, dump: Dump) -> None:
        """That image is whole: the next one's files are compared with its."""
        ...

    def place(self, onto: list[int]) -> tuple[list[int], bool]:
        """Where its GPUs would be on these of the machine; whether it is known what they hold, or that is a guess."""
        ...

    def move(self, to: list[int], stages: Stages, onto: list[int] | None = None) -> Move:
        """onto: `to` is a guess, and what its GPUs hold decides, in the cut."""
        ...

    def restore(
        self,
        store: Store,
        image: Image,
        number: int,
        gpus: list[int],
        wishes: Wishes,
        stages: Stages,
    ) -> Restoring:
        """Tree `number` of the image, on these GPUs of the host. Nothing is begun yet."""
        ...

    def addresses(self) -> list[str]:
        """Of each server, where it takes other trees' data (shared.data_address). Only in a job of several trees."""
        ...

    def meet(self, table: str) -> None:
        """Where the servers of all trees are (docs/protocol.md: the file `trees`)."""
        ...

    def begin(self) -> None:
        """The tree runs: from now on the state of its files is noted."""
        ...

    def look(self) -> None:
        """From time to time: notes that state, where it is due."""
        ...

    def end(self, *, has_image: bool, asleep: bool) -> None:
        """The job has ended. has_image: what its files are now is kept for a restore. asleep: as its image has them."""
        ...
