# SPDX-License-Identifier: Apache-2.0
"""A tree whose servers stand still between two messages, and the way back from it."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from devproxy.checkpoint import staged
from devproxy.errors import DevproxyError, Refused
from devproxy.node.answer import Answer, Marked, Met, Still
from devproxy.node.together import all_of
from devproxy.node.tree import Tree

if TYPE_CHECKING:
    from devproxy.proxy.control_channel import ControlChannel

DRAIN_MS = 10_000  # without progress
DYING_S = 1.0  # between a server's hanging up and its end


class Parked:
    """Stops the servers and lets them go on. One operation, one thread at a time.

    still_s: how long the job stood still, as far as it goes on again.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.channels: list[ControlChannel] = []  # to servers that stand still
        self.still_s = 0.0
        self.waited_s = 0.0  # for the moment of least device memory
        self.warnings: list[str] = []
        self._since: float | None = None
        self._relays_paused = False

    def open(self) -> None:
        if self.channels:
            return
        self.channels = [self._tree.channel(server) for server in self._tree.servers.members]

    def ranks(self) -> list[dict[str, Any]]:
        """What has been submitted, client by client. Nobody is held."""
        self.open()
        return [
            report for reports in all_of([c.ranks for c in self.channels]) for report in reports
        ]

    def barrier(self, comm: tuple[int, int], attempt: int) -> Met:
        self.open()
        answers = all_of([partial(c.barrier, comm, attempt) for c in self.channels])
        return Met(
            members=sum(a["members"] for a in answers),
            acquired=sum(a["acquired"] for a in answers),
            reports=[report for a in answers for report in a["reports"]],
        )

    def aim(self, reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Whoever has the least device memory rests, as its report says, until lift() or a cut. reports: see
        ControlChannel.aim."""
        self.open()
        found = all_of([partial(c.aim, reports) for c in self.channels])
        return [report for one in found for report in one]

    def hold(self) -> list[dict[str, Any]]:
        """Nobody goes past what is submitted: what has been, client by client."""
        self.open()
        return [report for reports in all_of([c.hold for c in self.channels]) for report in reports]

    def withhold(self) -> Still:
        """Nothing of a communicator begins any more. See ControlChannel.withhold."""
        self.open()
        answers = all_of([c.withhold for c in self.channels])
        return Still(
            still=all(a["still"] for a in answers),
            reports=[report for a in answers for report in a["reports"]],
        )

    def mark(self, number: int) -> Marked:
        answers = all_of([partial(c.mark, number) for c in self.channels])
        return Marked(
            still=all(a["still"] for a in answers),
            servers=[{key: a[key] for key in ("server", "to", "from")} for a in answers],
        )

    def agree(self, reports: list[dict[str, Any]]) -> Answer:
        answers = all_of([partial(c.agree, reports) for c in self.channels])
        return Answer(
            settled=all(a["settled"] for a in answers),
            reports=[report for a in answers for report in a["reports"]],
            failure=next((a["failure"] for a in answers if a["failure"]), ""),
            debt=next((a["debt"] for a in answers if a["debt"]), ""),
        )

    def lift(self) -> None:
        """May be called at any time. A server that does not answer lifts it when the channel is closed."""
        for channel in self.channels:
            with suppress(OSError, DevproxyError):
                channel.lift()
        self.close()

    def cut(self, wait_ms: int) -> None:
        """All at once: each server learns its own least, and none waits for another's. wait_ms: see ControlChannel.cut."""
        answers = all_of([partial(c.cut, wait_ms, DRAIN_MS) for c in self.channels])
        drained_s = max((a["drained_us"] for a in answers), default=0) / 1e6
        self._since = time.monotonic() - drained_s
        self.waited_s = max((a["waited_us"] for a in answers), default=0) / 1e6

    def dump(self, staging: str, *, moves: bool = False) -> None:
        """Device memory and the servers' state. What several clients have alike lies there once. moves: for other servers."""
        clients = [client for channel in self.channels for client in channel.can_dump()["clients"]]
        if len(clients) > 1:
            staged.make_index(staging, staged.expected_blocks(clients))
        all_of([partial(c.dump, staging, moves=moves) for c in self.channels])

    def pause_relays(self) -> None:
        self._relays_paused = True
        self._tree.stdio.prepare()

    def go_on(self) -> None:
        """Servers and relays go on, as far as they were stopped. May be called more than once."""
        for channel in self.channels:
            try:
                channel.resume()
            except (OSError, DevproxyError) as error:
                self.warnings.append(f"a server did not go on: {error}")
                same = [s for s in self._tree.servers.members if s.gpu == channel.gpu]
                self._tree.servers.wait_gone(same, DYING_S)
            channel.close()
        self.channels = []
        if self._relays_paused:
            self._tree.stdio.go_on()
            self._relays_paused = False
        self.stands_still_no_more()

    def stands_still_no_more(self) -> None:
        if self._since is not None:
            self.still_s = time.monotonic() - self._since
            self._since = None

    def leave(self) -> None:
        """The servers end, since an image or other servers have all that they hold. Raises where one did not."""
        for channel in self.channels:
            channel.leave()

    def hand_to(self, channels: list[ControlChannel]) -> list[ControlChannel]:
        """Other servers, parked like these, stand for them from here on. Returns the channels to the old ones."""
        leaving, self.channels = self.channels, channels
        return leaving

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self.channels = []


def may_dump(tree: Tree) -> list[dict[str, Any]]:
    """What each server holds. Changes nothing. Raises Refused where a server names what stands in the way."""
    answers = []
    for server in tree.servers.members:
        with tree.channel(server) as channel:
            answer = channel.can_dump()
        if answer["refusals"]:
            raise Refused(f"GPU {server.gpu}: {'; '.join(answer['refusals'])}", "the job continues")
        answers.append(answer)
    return answers
