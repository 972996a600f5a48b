"""Fresh servers take over from a tree's old ones; its processes are not touched.

In order: check, cut, copy, start, hand_over. close() undoes what has not been handed over.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from devproxy import fault
from devproxy.errors import DevproxyError
from devproxy.log import say
from devproxy.node import staging
from devproxy.node.answer import Answer, Marked, Met, Still
from devproxy.node.parked import Parked, may_dump
from devproxy.node.stages import Stages
from devproxy.node.tree import Tree
from devproxy.proxy.server import Server

fault.register("migrate_start", "device memory is copied, the new servers are not started")
fault.register("migrate_hand_over", "the new servers are ready, the old ones have not left")


class TreeMove:
    """to: [k] is the machine's GPU that the tree's GPU k gets."""

    def __init__(self, tree: Tree, to: list[int], stages: Stages) -> None:
        self.stages = stages
        self.handed_over = False
        self.warnings: list[str] = []
        self._tree = tree
        self._to = to
        self._there = f"GPU {', '.join(map(str, to))}"
        self._old = list(tree.servers.members)
        self._old_servers = f"GPU {', '.join(str(s.gpu) for s in self._old)}"
        self._fresh: list[Server] = []
        self._parked = Parked(tree)
        self._staging = ""

    @property
    def still_s(self) -> float:
        return self._parked.still_s

    def check(self) -> None:
        """Nothing has stopped yet. Raises Refused."""
        tree = self._tree
        clients = [client for answer in may_dump(tree) for client in answer["clients"]]
        need = sum(client["live_bytes"] for client in clients)
        self._staging = staging.make(tree.folder, tree.spec.job_id, need, refuse=True)

    def ranks(self) -> list[dict[str, Any]]:
        return self._parked.ranks()

    def barrier(self, comm: tuple[int, int], attempt: int) -> Met:
        return self._parked.barrier(comm, attempt)

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
            self._parked.dump(self._staging)

    def start(self) -> None:
        tree = self._tree
        with self.stages.at("restore", f"starting servers on {self._there}", self._there):
            fault.point("migrate_start")
            self._fresh = tree.start_servers(self._to, ("--restore", self._staging))
            self._channels = [tree.channel(server) for server in self._fresh]

    def hand_over(self) -> None:
        """From the first line on there is no way back: the new servers are the job's."""
        with self.stages.at("hand_over", "the new servers take over", self._there):
            fault.point("migrate_hand_over")
            self.handed_over = True
            leaving = self._parked.hand_to(self._channels)
            for channel, server in zip(leaving, self._old, strict=True):
                try:
                    channel.leave()
                except (OSError, DevproxyError) as refusal:  # the new one has all that it held
                    say(f"GPU {channel.gpu}: the old server did not leave: {refusal}")
                    if server.status is None:  # it would go on when we hang up
                        os.kill(server.pid, signal.SIGKILL)
            for channel in leaving:
                channel.close()
            self._tree.servers.dismiss(self._old)
            self._tree.gpus = self._to

    def close(self) -> None:
        if self._fresh and not self.handed_over:
            self._tree.servers.dismiss(self._fresh)
        self._parked.go_on()
        self.warnings += self._parked.warnings
        staging.remove(self._staging)
