"""What the servers of a job share with its processes: files in the job folder."""

from __future__ import annotations

import os

SUFFIXES = (".seg", ".pinned", ".link")


def remove(job_dir: str) -> None:
    """Segments, pinned windows, links and the slot table of servers that have left."""
    for name in os.listdir(job_dir):
        if name.endswith(SUFFIXES) or name == "slots":
            os.unlink(os.path.join(job_dir, name))
