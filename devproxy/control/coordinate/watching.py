# SPDX-License-Identifier: Apache-2.0
"""What a job's coordinator does by itself until the job ends: looks after its trees, counts steps, takes images when they
are due."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from devproxy.control import coordinator_api as api
from devproxy.control.coordinate.job import Job
from devproxy.control.pace import Pace
from devproxy.errors import DevproxyError
from devproxy.log import say
from devproxy.node.spec import parse_every

LOOK_S = 0.5
STEP_POLL_S = 0.1


class Watch:
    """take: a periodic checkpoint."""

    def __init__(
        self, job: Job, ended: threading.Event, take: Callable[[], api.ImageFacts]
    ) -> None:
        self._job = job
        self._ended = ended
        self._take = take
        self.pace = Pace()
        self.next_unix_s: float | None = None  # the next image
        self._failed: set[str] = set()  # names of nodes
        self._came_back = (
            job.standing.phase == api.RESTORING
        )  # from an image, and its steps with it

    def run(self) -> None:
        """Returns when the job has ended."""
        job = self._job
        seconds, steps = parse_every(job.spec.every) if job.spec.every else (0.0, 0)
        for tree in job.trees.each:
            tree.begin()
        next_image = time.monotonic() + seconds
        last_steps = None if self._came_back else 0
        while not self._ended.wait(STEP_POLL_S if steps else LOOK_S):
            for tree in job.trees.each:
                tree.look()
            # What no verb has changed: a node's end, images that somebody removed.
            job.standing.tell_nodes()
            self._say_who_has_failed()
            if job.standing.phase != api.RUNNING:
                self.next_unix_s = None
                self.pace.forget()
                continue
            if (seconds or steps) and (lost := job.trees.lost_servers()):
                seconds, steps = 0.0, 0
                self.next_unix_s = None
                self._say_no_more_images(lost)
            try:
                self.pace.look(time.monotonic(), job.trees.each[0].steps())
            except (OSError, DevproxyError, IndexError):
                pass  # between two servers, or at the end
            if steps:
                if last_steps is None:
                    last_steps = self.pace.steps or None
                elif self.pace.steps // steps > last_steps // steps:
                    last_steps = self.pace.steps
                    self.due()
            elif seconds:
                now = time.monotonic()
                if now >= next_image:
                    next_image = now + seconds
                    self.next_unix_s = None
                    self.due()
                self.next_unix_s = time.time() + max(0.0, next_image - time.monotonic())

    def due(self) -> None:
        """Takes an image. What goes wrong is said, and the job goes on."""
        try:
            facts = self._take()
        except DevproxyError as error:
            if not self._ended.is_set() and self._job.trees.live():
                self._job.standing.last_error = str(error)
                say(f"no image now: {error}")
            return
        except OSError as error:
            say(f"no image now: {error}; the job continues")
            return
        for warning in facts.warnings:
            say(warning)

    def _say_who_has_failed(self) -> None:
        """Without a launcher that looks after all nodes, the others' ranks may wait for those for ever."""
        trees = self._job.trees.each
        if len(trees) < 2 or all(tree.has_ended() for tree in trees):
            return
        for tree in trees:
            if tree.code and tree.name not in self._failed:
                self._failed.add(tree.name)
                say(
                    f"{tree.name}: its command has ended with exit code {tree.code}; "
                    f"the commands of the other nodes go on until they end, or Ctrl-C or devproxy kill {self._job.spec.job}"
                )

    def _say_no_more_images(self, lost: str) -> None:
        """The job's processes may go on for a while, but what they had on that GPU is gone."""
        job, last = self._job.spec.job, self._job.images.last
        remedy = (
            f"its last whole image is {last}: devproxy restore {job}" if last else "it has none"
        )
        say(f"no more images of job {job}: {lost}; {remedy}")
