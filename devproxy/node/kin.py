# SPDX-License-Identifier: Apache-2.0
"""Jobs of this host that have the same files: the one that an image is of, and its copies.

What puts the files of an image back asks here first: a job that lives may have written to them since.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from devproxy import runtime, state
from devproxy.checkpoint.files.tracker import FilesTracker
from devproxy.checkpoint.image import Image
from devproxy.errors import Refused
from devproxy.node.spec import own_id, read_job_file


class Living(NamedTuple):
    """A job of this user on this host. facts: its job.json."""

    name: str
    folder: str
    facts: dict[str, Any]


def first_id(whole: Image) -> str:
    """Of the job that the image's job is, or is a copy of: all of those have the same files."""
    return str(whole.spec.get("copy_of") or whole.job_id)


def living(whole: Image, node: int, but: str = "") -> list[Living]:
    """The job of the image and its copies, as far as they live on this host; not the one named `but`."""
    first, mine = first_id(whole), own_id("", node)
    found = []
    for name, path, alive in runtime.list_jobs():
        if not alive or name == but:
            continue
        try:
            facts = read_job_file(path)
            if facts.get("files_dir"):
                continue  # it has files of its own
            job_id, dot, number = str(facts["job_id"]).partition(".")
        except (OSError, ValueError, KeyError):
            continue
        # On one host may be several nodes of a job, each with files of its own.
        if first in (job_id, facts.get("copy_of")) and dot + number == mine:
            found.append(Living(name, path, facts))
    return found


def check_beside(other: Living, whole: Image, *, instead: str = "") -> None:
    """Beside a living job its files cannot be taken back under that one's feet. Raises Refused where they would be.

    instead: what else can be done than end it.
    """
    tracker = FilesTracker(other.folder, state.state_dir(), job_id=other.facts["job_id"])
    changed = [path for tree in whole.trees for path in tracker.would_change(tree.files)]
    if not changed:
        return
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    of_copy = " a copy" if whole.spec.get("copy_of") else ""
    kin = "a copy of it" if other.facts.get("copy_of") else f"of which it is{of_copy}"
    raise Refused(
        f"image {whole.id}: job {other.name!r}, {kin}, runs and has changed files since:"
        f" {', '.join(changed[:3])}{more}",
        f"end it first (devproxy kill {other.name}): the image needs them as they were{instead}",
    )
