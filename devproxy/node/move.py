# SPDX-License-Identifier: Apache-2.0
"""Fresh servers take over from a tree's old ones; its processes are not touched.

In order: check, cut, copy, start, ready, hand_over. close() undoes what has not been handed over.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

from devproxy import fault
from devproxy.errors import DevproxyError, Refused
from devproxy.log import say
from devproxy.node import placement, staging
from devproxy.node.answer import Answer, Marked, Met, Still
from devproxy.node.parked import Parked, may_dump
from devproxy.node.stages import Stages
from devproxy.node.tree import Tree
from devproxy.proxy import preflight
from devproxy.proxy.server import Server

fault.register("migrate_start", "device memory is copied, the new servers have not taken it")
fault.register("migrate_hand_over", "the new servers are ready, the old ones have not left")


class _Held:
    """Device memory of one of the job's GPUs, in bytes. stable: of the live ones, what its ranks keep from step to step."""

    def __init__(self, clients: list[dict[str, Any]]) -> None:
        self.live = sum(client["live_bytes"] for client in clients)
        self.stable = sum(client.get("stable_bytes", 0) for client in clients)


class TreeMove:
    """to: [k] is the machine's GPU that the tree's GPU k gets. onto: that is a guess, and what they hold decides."""

    def __init__(
        self, tree: Tree, to: list[int], stages: Stages, onto: list[int] | None = None
    ) -> None:
        self._onto = onto
        self.stages = stages
        self.handed_over = False
        self.warnings: list[str] = []
        self._tree = tree
        self._go_to(to)
        self._old = list(tree.servers.members)
        self._old_servers = f"GPU {', '.join(str(s.gpu) for s in self._old)}"
        self._fresh: list[Server] = []
        self._parked = Parked(tree)
        self._staging = ""

    def _go_to(self, to: list[int]) -> None:
        self._to = to
        self._there = f"GPU {', '.join(map(str, to))}"

    @property
    def still_s(self) -> float:
        return self._parked.still_s

    def check(self) -> None:
        """Nothing has stopped yet. Raises Refused."""
        tree = self._tree
        preflight.check_there(tree.spec.device, self._to)
        held = [_Held(answer["clients"]) for answer in may_dump(tree)]
        self._check_room(held)
        total = sum(one.live for one in held)
        self._staging = staging.make(tree.folder, tree.spec.job_id, total, refuse=True)
        self._prepare()
        self._check_left(held)

    def _prepare(self) -> None:
        """The new servers start, and load what takes long, while the job still runs."""
        for server in self._old:
            with self._tree.channel(server) as channel:
                new_enough = channel.executors(self._staging)
            if not new_enough and len(set(self._to)) == len(self._to):
                return
            if not new_enough:
                raise Refused(
                    "the job runs with the servers of an older devproxy, which it brought along in its image, and they cannot share a GPU",
                    "name each GPU once; the job continues",
                )
        self.stages.say(f"preparing servers on {self._there}")
        ahead = ("--restore", self._staging, "--ahead", self._staging)
        self._fresh = self._tree.prepare_servers(self._to, ahead)

    def _needs(self, held: list[_Held]) -> Iterator[tuple[int, str, int]]:
        """For each of the machine's GPUs: which of the job's come there, and what they need at least: where all that ranks keep
        is equal. Whether it is shows when the new servers load."""
        for there in dict.fromkeys(self._to):
            here = [gpu for gpu, to in enumerate(self._to) if to == there]
            need = sum(held[gpu].live - held[gpu].stable for gpu in here)
            need += max(held[gpu].stable for gpu in here)
            yield there, ", ".join(map(str, here)), need

    def _check_room(self, held: list[_Held]) -> None:
        has = self._tree.spec.gpu_memory_bytes
        for there, here, need in self._needs(held):
            if has and need > has:
                raise Refused(
                    f"GPU {there} of this machine has {has >> 20} MiB, and the job's GPU {here} need at least {need >> 20} MiB there",
                    "spread them over more GPUs; the job continues",
                )

    def _check_left(self, held: list[_Held]) -> None:
        """What other jobs have of a GPU, its new server knows."""
        left = {self._to[server.gpu]: server.process.left_bytes for server in self._fresh}
        for there, here, need in self._needs(held):
            if there in left and need > left[there]:
                raise Refused(
                    f"other jobs leave {left[there] >> 20} MiB of GPU {there} of this machine, and the job's GPU {here} need at least {need >> 20} MiB there",
                    "name other GPUs; the job continues",
                )

    def ranks(self) -> list[dict[str, Any]]:
        return self._parked.ranks()

    def barrier(self, comm: tuple[int, int], attempt: int) -> Met:
        return self._parked.barrier(comm, attempt)

    def aim(self, reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self._parked.aim(reports)

    def hold(self) -> list[dict[str, Any]]:
        return self._parked.hold()

    def withhold(self) -> Still:
        return self._parked.withhold()

    def mark(self, number: int) -> Marked:
        return self._parked.mark(number)

    def agree(self, reports: list[dict[str, Any]]) -> Answer:
        return self._parked.agree(reports)

    def lift(self) -> None:
        self._parked.lift()

    def cut(self) -> None:
        with self.stages.at("cut", "stopping the servers between two messages", self._old_servers):
            self._parked.open()
            self._parked.cut(0)

    def copy(self) -> None:
        with self.stages.at("device", "copying device memory", self._old_servers):
            self._parked.dump(self._staging, moves=True)
        if self._onto:
            self._place(self._onto)

    def _place(self, onto: list[int]) -> None:
        """Now the job stands still, so who holds the same can be seen. Where the guess was wrong, other servers start."""
        tree = self._tree
        tree.alike = placement.alike_in(self._staging, len(self._to))
        to = placement.place(tree.alike, onto, tree.gpus)
        if to == self._to:
            return
        self._go_to(to)
        text = f"{self._there} instead: ranks that hold the same go together"
        with self.stages.at("place", text, self._there):
            tree.servers.dismiss(self._fresh)
            self._fresh = []

    def start(self) -> None:
        tree = self._tree
        with self.stages.at("restore", f"servers on {self._there} take the state", self._there):
            fault.point("migrate_start")
            if self._fresh:
                tree.begin_servers(self._fresh)
            else:
                self._fresh = tree.start_servers(self._to, ("--restore", self._staging))
            self._channels = [tree.channel(server) for server in self._fresh]

    def ready(self) -> None:
        """The new servers answer. What can fail before a hand-over fails here, while each tree can still go back."""
        with self.stages.at("hand_over", "the new servers are asked", self._there):
            fault.point("migrate_hand_over")
            for channel in self._channels:
                channel.steps()

    def hand_over(self) -> None:
        """From the first line on there is no way back: the new servers are the job's."""
        with self.stages.at("hand_over", "the new servers take over", self._there):
            self.handed_over = True
            # Before the first has left: whoever looks at that moment, as node 0 does at any, must not count it as lost.
            self._tree.servers.retire(self._old)
            leaving = self._parked.hand_to(self._channels)
            ended: list[str] = []
            for channel, server in zip(leaving, self._old, strict=True):
                try:
                    channel.leave()
                except (OSError, DevproxyError) as refusal:
                    say(f"GPU {channel.gpu}: the old server did not leave: {refusal}")
                    if server.status is None:  # it would go on when we hang up
                        os.kill(server.pid, signal.SIGKILL)
                        ended.append(f"GPU {channel.gpu}: {refusal}")
            for channel in leaving:
                channel.close()
            self._tree.servers.dismiss(self._old)
            self._tree.gpus = self._to
            if ended:
                raise DevproxyError(
                    f"old servers did not leave and were ended ({'; '.join(ended)})",
                    "processes that they had and the new servers have not lost their device state; the others run on",
                )

    def close(self) -> None:
        if self._fresh and not self.handed_over:  # the job stands still until they have gone
            self._tree.servers.dismiss(self._fresh, grace_s=0)
        self._parked.go_on()
        self.warnings += self._parked.warnings
        staging.remove(self._staging)
