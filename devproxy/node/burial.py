# SPDX-License-Identifier: Apache-2.0
"""What of a killed job's folder is needed after it: set as runtime.before_removal by everybody who sweeps."""

from __future__ import annotations

import os

from devproxy import config, runtime
from devproxy.errors import DevproxyError
from devproxy.node.spec import read_job_file


def bury(path: str) -> None:
    """What the job changed in its last seconds is only in its folder; a restore needs it to take it back. And an image
    on its way that was too large for memory lies on disk."""
    staging = os.path.join(config.state_dir(), "staging")
    if not os.path.exists(os.path.join(path, runtime.JOURNAL)) and not os.path.isdir(staging):
        return
    # devproxy-run loads this module at every start, and seldom needs these.
    import shutil

    from devproxy import state
    from devproxy.checkpoint.files.tracker import FilesTracker

    try:
        job_id = runtime.check_job_name(read_job_file(path)["job_id"])
        for name in (job_id, f"{job_id}-files"):
            shutil.rmtree(os.path.join(state.state_dir(), "staging", name), ignore_errors=True)
        FilesTracker(path, state.state_dir(), job_id=job_id).absorb()
    except (OSError, ValueError, KeyError, DevproxyError):
        pass  # no job.json, or no room: the image's own list remains


def install() -> None:
    runtime.before_removal = bury
