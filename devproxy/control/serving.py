# SPDX-License-Identifier: Apache-2.0
"""What serves a job's verbs beside the job: the coordinator, its service, and the thread that takes periodic images."""

from __future__ import annotations

import os
import threading

from devproxy.control import agent_service, client
from devproxy.control.coordinator import JobCoordinator
from devproxy.errors import DevproxyError
from devproxy.log import say
from devproxy.node.local import LocalTree
from devproxy.node.tree import Tree
from devproxy.proxy import command as cmd

AGENT_SOCKET = "agent.sock"


class Agent:
    """Serves from the first line on; begin() when the job runs."""

    def __init__(self, job_dir: str, coordinator: JobCoordinator) -> None:
        self.coordinator = coordinator
        path = os.path.join(job_dir, AGENT_SOCKET)
        self._service = agent_service.serve(coordinator, path)
        self.operation = self._service.operation

    def begin(self) -> None:
        """The job runs: from now on periodic images."""
        threading.Thread(target=self.coordinator.periodic, name="periodic", daemon=True).start()

    def finish(self, code: int) -> None:
        """The job's command has ended. Waits for an image that is being uploaded (JobCoordinator.finish_image)."""
        try:
            self.coordinator.finish_image(code, cmd.check_interrupted)
        except cmd.Interrupted:
            say("the image is given up")

    def stop(self) -> None:
        self.coordinator.end()
        self._service.stop()


def serve(tree: Tree, coordinator: JobCoordinator | None = None) -> Agent:
    """Starts the service of a running job, and devproxyd where there is none. coordinator: that of several trees."""
    if coordinator is None:
        coordinator = JobCoordinator(tree.spec, [LocalTree(tree)], lib=tree.lib)
    agent = Agent(tree.folder.path, coordinator)
    agent.begin()
    if tree.spec.plain:
        # Nothing to route to it but what a CLI asks, which starts one itself; and to start one from here, an orphan
        # of the job could slip away for an instant.
        return agent
    try:
        client.ensure_daemon()
    except DevproxyError as error:
        say(f"devproxyd cannot be started ({error}); the job runs on, `devproxy` will try again")
    return agent
