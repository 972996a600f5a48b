"""The agent: what serves a job's verbs beside the job. Also the whole supervisor of a job that was restored detached.

    python -m devproxy.control.agent --restore SPEC.json

SPEC.json, written by devproxyd: {"image", "store", "name" | null, "gpus" | null, "output" | null, "strict"}.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any, NoReturn

from devproxy import runtime
from devproxy.control import agent_service, burial, client, restore
from devproxy.control.coordinator import JobCoordinator
from devproxy.control.job import Job, stop_agent
from devproxy.errors import EXIT_SERVER_LOST, DevproxyError, RestoreError, object_of
from devproxy.log import say
from devproxy.proxy import command as cmd
from devproxy.proxy import janitor

AGENT_SOCKET = "agent.sock"


class Agent:
    """The coordinator, its service, and the thread that takes periodic images."""

    def __init__(self, job: Job, coordinator: JobCoordinator) -> None:
        self.coordinator = coordinator
        path = os.path.join(job.folder.path, AGENT_SOCKET)
        self._service = agent_service.serve(coordinator, path)
        self.operation = self._service.operation

    def begin(self) -> None:
        """The job runs: from now on periodic images."""
        threading.Thread(target=self.coordinator.periodic, name="periodic", daemon=True).start()

    def stop(self) -> None:
        self.coordinator.end()
        self._service.stop()


def serve(job: Job) -> Agent:
    """Starts the service of a running job, and devproxyd where there is none."""
    agent = Agent(job, JobCoordinator(job))
    agent.begin()
    if job.spec.plain:
        # Nothing to route to it but what a CLI asks, which starts one itself; and to start one from here, an orphan
        # of the job could slip away for an instant.
        return agent
    try:
        client.ensure_daemon()
    except DevproxyError as error:
        say(f"devproxyd cannot be started ({error}); the job runs on, `devproxy` will try again")
    return agent


def run_foreground(spec: dict[str, Any]) -> int:
    """Restores a job and is its supervisor until it ends. Returns the exit code; raises DevproxyError."""
    burial.install()
    mask = cmd.block_signals()
    del mask  # the restored processes have their own
    cmd.become_subreaper()
    folder = restore.make_folder(spec)
    keeper = janitor.start(folder, "")
    try:
        job, agent = restore.bring_back(spec, folder, keeper, Agent)
        job.agent = agent
        try:
            code = job.wait(lambda: None)
            lost = job.supervisor.lost(folder)
            job.end(frozenset())
            for server in lost:
                say(f"the server of GPU {server.gpu} {server.how_it_ended()} while the job ran")
            return code if code or not lost else EXIT_SERVER_LOST
        finally:
            stop_agent(job)
            job.supervisor.stop()
    finally:
        keeper.dismiss()
        runtime.remove_job(folder)


def main() -> NoReturn:
    """Entry point of a detached agent. Its stdout and stderr are the job's log."""
    if len(sys.argv) != 3 or sys.argv[1] != "--restore":
        say("usage: python -m devproxy.control.agent --restore SPEC.json")
        sys.exit(2)
    try:
        with open(sys.argv[2], encoding="utf-8") as file:
            spec = json.load(file)
        code = run_foreground(spec)
    except (DevproxyError, OSError) as caught:
        error = caught
        if isinstance(error, OSError):
            error = RestoreError(
                "start", f"{type(error).__name__}: {error}", object=object_of(error)
            )
        say(str(error))
        _leave_word(sys.argv[2], error)
        sys.exit(error.exit_code)
    sys.stdout.flush()
    os._exit(code)


def _leave_word(path: str, error: DevproxyError) -> None:
    """For the daemon that started us: why nothing runs."""
    facts = {"error": error.what, "remedy": error.remedy, "exit_code": error.exit_code}
    facts["stage"] = getattr(error, "stage", "restore")
    facts["object"] = object_of(error)
    with open(path + ".failed", "w", encoding="utf-8") as file:
        json.dump(facts, file)


if __name__ == "__main__":
    main()
