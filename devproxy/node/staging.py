# SPDX-License-Identifier: Apache-2.0
"""Where a tree's state lies between the tree and the store: in memory where there is plenty, else on disk."""

from __future__ import annotations

import os
import shutil

from devproxy import machine, runtime, state
from devproxy.errors import Refused

MARGIN_BYTES = 256 << 20


def make(folder: runtime.JobFolder, job_id: str, need_bytes: int, *, refuse: bool) -> str:
    """An empty folder with room for that much.

    refuse: raises Refused where neither memory nor disk has the room. Without it need_bytes is an upper bound (pages of
    zeros take no room), and the disk is tried.
    """
    path = os.path.join(folder.path, "staging")
    available = machine.available_memory_bytes()
    space = shutil.disk_usage(folder.path).free
    if min(available // 2, space) < need_bytes + MARGIN_BYTES:
        path = os.path.join(state.subfolder("staging"), job_id)
        if refuse and shutil.disk_usage(os.path.dirname(path)).free < need_bytes + MARGIN_BYTES:
            raise Refused(
                f"neither memory nor {os.path.dirname(path)} has room for"
                f" {machine.show_bytes(need_bytes)} of this job's state",
                "free some, or set DEVPROXY_STATE_DIR; the job continues",
            )
    shutil.rmtree(path, ignore_errors=True)
    os.makedirs(os.path.join(path, "criu"), mode=0o700)
    return path


def make_for_files(staging: str, job_id: str, need_bytes: int) -> str:
    """A folder for copies of the job's files, which may be many times its memory: then on disk."""
    folder = os.path.join(staging, "files")
    if need_bytes > MARGIN_BYTES:
        folder = os.path.join(state.subfolder("staging"), f"{job_id}-files")
        if shutil.disk_usage(os.path.dirname(folder)).free < need_bytes + MARGIN_BYTES:
            raise Refused(
                f"{os.path.dirname(folder)} has no room for copies of"
                f" {machine.show_bytes(need_bytes)} of files that the job wrote",
                "free some, or start the job with a smaller --files-max; the job continues",
            )
        shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return folder


def remove(*folders: str) -> None:
    for folder in folders:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def keep_log(source: str, name: str) -> str:
    """CRIU's log outlives the staging folder: where it is then, or "" where there is none."""
    if not os.path.exists(source):
        return ""
    to = os.path.join(state.subfolder("logs"), f"{name}.{os.path.basename(source)}")
    try:
        shutil.copy(source, to)
    except OSError:
        return ""  # a full disk: the error that made the log is worth more than this one
    return to
