# SPDX-License-Identifier: Apache-2.0
"""How a job stands: its phase, what its verbs have come to, and that the other nodes hear of it.

Threads: the verb's thread writes, anyone reads. _telling is held over what the other nodes are told, so that they hear
it in order.
"""

from __future__ import annotations

import threading

from devproxy.control import coordinator_api as api
from devproxy.control.coordinate.images import Images
from devproxy.control.coordinate.trees import Trees
from devproxy.node.history import History


class Standing:
    """phase: that of a job which begins."""

    def __init__(self, trees: Trees, images: Images, phase: str) -> None:
        self._trees = trees
        self._images = images
        self.record = History()
        self.entered = ""  # the phase that a verb has written last; the job may have ended since
        self._in_phase: object | None = None
        self.last_error = ""
        self.last_cut = ""
        # Sums over the verbs.
        self.still_s, self.stored_bytes, self.failures = 0.0, 0, 0
        self._telling = threading.Lock()
        self._told, self._told_number = api.JobNews(), 0
        self.enter(phase)

    @property
    def phase(self) -> str:
        return api.ENDING if self._trees.has_ended() else self.entered

    def enter(self, phase: str) -> None:
        """The job's phase from now on. Only the verb's thread calls it."""
        if self._in_phase is not None:
            if phase == self.entered:
                return
            self.record.end(self._in_phase)
        self.entered = phase
        self._in_phase = self.record.begin("phase", phase)
        self.tell_nodes()

    def tell_nodes(self) -> None:
        """The other nodes hear how the job is, where that has changed. Asks and waits for nobody: a node that does not answer
        is in no verb's way."""
        others = self._trees.elsewhere()
        if not others:
            return
        with self._telling:
            phase = api.ENDING if self._trees.was_ended() else self.entered
            news = api.JobNews(phase, len(self._images), self._images.last, self.last_error)
            if news == self._told:
                return
            self._told, self._told_number = news, self._told_number + 1
            for tree in others:
                tree.tell(self._told_number, news)
