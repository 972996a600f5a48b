# SPDX-License-Identifier: Apache-2.0
"""A supervisor that ended, or was stopped, in the middle of a verb: what the verb's caller hears."""

from __future__ import annotations

import os
import time

from devproxy import proctree
from devproxy.control import client
from devproxy.errors import (
    CheckpointError,
    MigrateError,
    OperationFailed,
    ResizeError,
    RestoreError,
    SuspendError,
)

# From a supervisor's kill -9 to the end of the rest of its job, which the janitor sees to.
REST_ENDS_S = 5.0
FAILED: dict[str, type[OperationFailed]] = {
    "checkpoint": CheckpointError,
    "suspend": SuspendError,
    "resume": RestoreError,
    "migrate": MigrateError,
    "resize": ResizeError,
}


def stopped(path: str) -> client.SupervisorStopped | None:
    pid = client.stopped_supervisor(path)
    return client.SupervisorStopped(client.supervisor_of(path), pid) if pid else None


def verb_stopped(
    verb: str, name: str, stage: str, error: client.SupervisorStopped
) -> OperationFailed:
    """The error for a verb that has not failed: it goes on when its supervisor does."""
    remedy = f"{error.remedy}; the {verb} goes on with it, see: devproxy watch {name}"
    return FAILED[verb](stage, error.what, remedy, "stopped", f"job {name}")


def supervisor_lost(verb: str, name: str, path: str, stage: str) -> OperationFailed:
    """The supervisor was killed in the middle of a verb. What it leaves behind is ended before anybody is told."""
    deadline = time.monotonic() + REST_ENDS_S
    while os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.02)
    pid = client.job_file(path).get("pid")
    if isinstance(pid, int) and proctree.lives(pid):
        return FAILED[verb](
            stage,
            f"{client.supervisor_of(path)} (process {pid}) hung up during the call",
            f"it lives, so restore nothing beside it; see: devproxy status {name}",
            "unknown",
            f"job {name}",
        )
    return FAILED[verb](
        stage,
        f"{client.supervisor_of(path)} went away during the call",
        f"if an image of it is whole: devproxy restore {name}",
        "its supervisor is gone" if os.path.exists(path) else "the job has ended",
        f"job {name}",
    )
