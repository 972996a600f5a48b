# SPDX-License-Identifier: Apache-2.0
"""A tree on this host, as its job's coordinator sees it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from devproxy import state
from devproxy.checkpoint.files.records import FileEntry
from devproxy.checkpoint.files.tracker import FilesTracker
from devproxy.checkpoint.files.watch import FanotifyWatch
from devproxy.checkpoint.image import Image
from devproxy.checkpoint.store import Store
from devproxy.errors import DevproxyError
from devproxy.log import say
from devproxy.node import shared
from devproxy.node.dump import TreeDump
from devproxy.node.move import TreeMove
from devproxy.node.participant import Dump
from devproxy.node.placement import place
from devproxy.node.restore import TreeRestore, Wishes
from devproxy.node.stages import Stages
from devproxy.node.tree import Tree

if TYPE_CHECKING:
    from devproxy.proxy.control_channel import ControlChannel

NOTE_S = 2.0  # how often the state of the job's files is noted


def node_line(name: str, gpus: list[int], code: int | None) -> str:
    end = "" if code is None else f"; its command has ended with exit code {code}"
    return f"{name}: GPU {', '.join(map(str, gpus))}{end}"


class LocalTree:
    """See participant.Participant. Verbs come from one thread at a time; begin(), look() and steps() from the periodic one."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._previous_files: list[FileEntry] = []
        self._tracker = FilesTracker(tree.folder.path, state.state_dir(), job_id=tree.spec.job_id)
        self._watch = FanotifyWatch(self._tracker, lambda: tree.root or 0, lambda text: None)
        self._began = False
        self._next_note_s = 0.0
        self._said = False
        self._step_channel: ControlChannel | None = None

    @property
    def gpus(self) -> list[int]:
        return self._tree.gpus

    @property
    def name(self) -> str:
        place = self._tree.place
        return f"node {place.tree if place else 0} ({os.uname().nodename})"

    @property
    def code(self) -> int | None:
        return self._tree.code

    def about(self) -> str:
        return node_line(self.name, self.gpus, self.code)

    def has_processes(self) -> bool:
        return self._tree.root is not None

    def lives(self) -> bool:
        return self._tree.lives()

    def has_ended(self) -> bool:
        return self._tree.code is not None

    def lost_servers(self) -> str:
        return self._tree.lost_servers()

    def send(self, number: int) -> None:
        self._tree.send(number)

    # -- verbs --------------------------------------------------------------------------------------------------

    def dump(self, stages: Stages, *, leave: bool, strict: bool) -> TreeDump:
        previous = self._previous_files
        self._previous_files = []  # until this image is whole: those of the last may be what the store has lost
        return TreeDump(self._tree, self._tracker, previous, stages, leave=leave, strict=strict)

    def dumped(self, dump: Dump) -> None:
        assert isinstance(dump, TreeDump)
        self._previous_files = dump.files

    def place(self, onto: list[int]) -> tuple[list[int], bool]:
        alike, gpus = self._tree.alike, self._tree.gpus
        return place(alike or [[0] * len(gpus) for _ in gpus], onto, gpus), alike is not None

    def move(self, to: list[int], stages: Stages, onto: list[int] | None = None) -> TreeMove:
        return TreeMove(self._tree, to, stages, onto)

    def restore(
        self,
        store: Store,
        image: Image,
        number: int,
        gpus: list[int],
        wishes: Wishes,
        stages: Stages,
    ) -> TreeRestore:
        part = image.trees[number]
        return TreeRestore(self._tree, store, image, part, gpus, wishes, stages, self._adopt)

    def addresses(self) -> list[str]:
        return [
            shared.data_address(self._tree.folder.path, gpu) for gpu in range(len(self._tree.gpus))
        ]

    def meet(self, table: str) -> None:
        shared.tell_trees(self._tree.folder.path, table)

    def _adopt(self, files: list[FileEntry]) -> None:
        """What the image says is where this tree goes on."""
        self._previous_files = files
        self._tracker.adopt(files)

    # -- from the periodic thread -------------------------------------------------------------------------------

    def steps(self) -> int:
        try:
            if self._step_channel is None:
                self._step_channel = self._tree.channel(self._tree.servers.members[0])
            return self._step_channel.steps()
        except (OSError, DevproxyError, IndexError):
            self._step_channel = None
            raise

    def begin(self) -> None:
        self._began = True
        self._watch.start()
        self._next_note_s = time.monotonic() + NOTE_S

    def look(self) -> None:
        now = time.monotonic()
        if (
            now < self._next_note_s or not self.has_processes()
        ):  # without processes it changes nothing
            return
        self._next_note_s = now + NOTE_S
        try:
            self._tracker.note_state()
            self._watch.refresh()
        except (OSError, DevproxyError) as error:
            if not self._said:
                say(f"the state of the job's files cannot be noted: {error}")
            self._said = True

    def end(self, *, has_image: bool, asleep: bool) -> None:
        self._watch.stop()
        # A restore that failed has not written the files as they are now; nor has a job that sleeps.
        if not self._began or asleep:
            return
        try:
            if has_image:
                self._tracker.note_state(ended=True)
            else:
                self._tracker.forget()
        except (OSError, DevproxyError) as error:
            say(f"the state of the job's files cannot be kept: {error}")
