# SPDX-License-Identifier: Apache-2.0
"""The trees of one job as one: which GPUs they have, whether they live, and that their servers know one another."""

from __future__ import annotations

import os
from functools import partial
from itertools import islice

from devproxy.control.remote import RemoteTree
from devproxy.errors import DevproxyError, Refused
from devproxy.log import say
from devproxy.node.participant import Participant
from devproxy.node.spec import JobSpec
from devproxy.node.together import all_of


class Trees:
    def __init__(self, spec: JobSpec, trees: list[Participant]) -> None:
        self._spec = spec
        self.each = trees
        self._token = os.urandom(32).hex()  # servers of this job know one another by it
        self._key = os.urandom(32).hex()  # what they encrypt with, if they do

    @property
    def gpus(self) -> list[int]:
        """[k]: the machine's GPU behind the job's GPU k, tree after tree."""
        return [gpu for tree in self.each for gpu in tree.gpus]

    def elsewhere(self) -> list[RemoteTree]:
        return [tree for tree in self.each if isinstance(tree, RemoteTree)]

    def shares(self, gpus: list[int]) -> list[list[int]]:
        """The job's GPUs, tree by tree."""
        return shares(gpus, [len(tree.gpus) for tree in self.each])

    def each_once(self, gpus: list[int]) -> bool:
        """Does each tree get each GPU at most once?"""
        return all(len(set(one)) == len(one) for one in self.shares(gpus))

    def has_ended(self) -> bool:
        """Has one of them? The job ends with it."""
        return any(tree.has_ended() for tree in self.each)

    def was_ended(self) -> bool:
        """The same, and asks no other node."""
        return any(
            tree.was_ended() if isinstance(tree, RemoteTree) else tree.has_ended()
            for tree in self.each
        )

    def live(self) -> bool:
        return all(tree.lives() for tree in self.each)

    def have_processes(self) -> bool:
        return all(tree.has_processes() for tree in self.each)

    def lost_servers(self) -> str:
        """Which servers have ended under the job, and how; "" for none."""
        return ", ".join(filter(None, (tree.lost_servers() for tree in self.each)))

    def introduce(self, check: bool = True) -> None:
        """Tells all servers where those of the other trees are. Only a job of several trees has such.

        Raises Refused where two trees are on a GPU that takes one, if `check`; nobody is told then."""
        if len(self.each) < 2:
            return
        lines = [f"token {self._token}"]
        if self._spec.encrypt_data:
            lines.append(f"key {self._key}")
        has: dict[str, tuple[str, int]] = {}  # by GPU: who
        for number, tree in enumerate(self.each):
            found = [address.split() for address in tree.addresses()]
            lines.append(" ".join(["tree", str(number), str(len(found)), *(a for a, *_ in found)]))
            for gpu, (_, *uuids) in enumerate(found):
                for uuid in uuids:
                    name, theirs = has.setdefault(uuid, (tree.name, gpu))
                    if name != tree.name and check:
                        raise Refused(
                            f"GPU {theirs} of {name} and GPU {gpu} of {tree.name} are the same one, and NCCL takes one node for each",
                            "give every node GPUs of its own (--gpu)",
                        )
        table = "".join(line + "\n" for line in lines)
        all_of([partial(tree.meet, table) for tree in self.each])

    def introduce_again(self) -> None:
        """Some servers were told of successors that are gone."""
        try:
            self.introduce(check=False)
        except (OSError, ValueError, DevproxyError) as why:
            say(
                f"the servers of job {self._spec.job} could not be told where the others are: {why}"
            )


def shares(gpus: list[int], sizes: list[int]) -> list[list[int]]:
    """These GPUs, tree by tree."""
    rest = iter(gpus)
    return [list(islice(rest, size)) for size in sizes]
