# SPDX-License-Identifier: Apache-2.0
"""The agent of a job that was just started: from a thread and a little later, so that a short command does not pay for
what it imports."""

from __future__ import annotations

import threading

from devproxy.log import say
from devproxy.node.tree import Tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from devproxy.control.serving import Agent
    from devproxy.control.side import First, Other, PartAgent

DELAY_S = 0.4


class LateAgent:
    """Serves the tree's job DELAY_S after start(). side: of a job of several nodes, which knows how."""

    def __init__(self, tree: Tree, side: First | Other | None = None) -> None:
        self._tree = tree
        self._side = side
        self._agent: Agent | PartAgent | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="agent", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _serve(self) -> None:
        if self._ended.wait(DELAY_S):
            return
        try:
            from devproxy.control import (
                serving,  # gRPC and the store: 0.3 s, after the command has begun
            )

            self._agent = self._side.serve() if self._side else serving.serve(self._tree)
        except Exception as error:
            say(f"no checkpoints for this job: its control service cannot start: {error}")

    def finish(self, code: int) -> None:
        """The command has ended. See Agent.finish."""
        if self._agent:
            self._agent.finish(code)

    def stop(self) -> None:
        """Ends the service; a verb that runs is told that the job is gone."""
        self._ended.set()
        self._thread.join()  # at most the time of an import
        if self._agent:
            self._agent.stop()
