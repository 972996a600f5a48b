# SPDX-License-Identifier: Apache-2.0
"""What the servers of a job share with its processes: files in the job folder."""

from __future__ import annotations

import os

SUFFIXES = (".seg", ".pinned", ".link", ".data")
# Communicators' boards, what other trees' members have sent, and where the servers of NCCL's communicators are.
PREFIXES = ("comm-", "shadow-", "nccl-")
TREES = "trees"  # where the servers of all trees are


def remove(job_dir: str) -> None:
    """What is left of servers that have gone, all of the tree's at once: segments, pinned windows, links, the slot table,
    boards."""
    for name in os.listdir(job_dir):
        if name.endswith(SUFFIXES) or name.startswith(PREFIXES) or name in ("slots", TREES):
            os.unlink(os.path.join(job_dir, name))


def data_address(job_dir: str, gpu: int) -> str:
    """ "ADDR:PORT" where that server takes data of other trees, and behind it, where no other tree may have the same GPU,
    " UUID" of that. Raises OSError or ValueError where it has not said."""
    with open(os.path.join(job_dir, f"gpu{gpu}.data"), encoding="ascii") as file:
        address, port, *uuid = file.read().split()
    return " ".join([f"[{address}]:{port}" if ":" in address else f"{address}:{port}", *uuid])


def tell_trees(job_dir: str, table: str) -> None:
    """For the servers: where all trees' servers are."""
    path = os.path.join(job_dir, TREES)
    fd = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="ascii") as file:
        file.write(table)
    os.rename(path + ".new", path)
