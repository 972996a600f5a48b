# SPDX-License-Identifier: Apache-2.0
"""The look at a job's tree: what CRIU could not dump, or what would be lost."""

from __future__ import annotations

import time
from collections.abc import Iterable

from devproxy import proctree
from devproxy.checkpoint.criu import GHOST_LIMIT_BYTES
from devproxy.checkpoint.dumpable.descriptors import check_descriptors, check_terminals
from devproxy.checkpoint.dumpable.mappings import check_mappings
from devproxy.checkpoint.dumpable.pipes import check_pipes
from devproxy.checkpoint.dumpable.processes import (
    check_process,
    check_threads,
    check_zombies,
    namespaces,
)
from devproxy.checkpoint.dumpable.sockets import check_sockets
from devproxy.checkpoint.dumpable.sysv import check_sysv
from devproxy.checkpoint.dumpable.tree import Tree, process_of
from devproxy.checkpoint.dumpable.verdict import Obstacle, Verdict

_SETTLE_S = 1.0  # as long an attach may take
_SETTLE_STEP_S = 0.01


def check_tree(
    root_pid: int,
    job_dir: str,
    *,
    strict: bool = False,
    known_pipes: Iterable[int] = (),
    ghost_limit_bytes: int = GHOST_LIMIT_BYTES,
    settle_s: float = _SETTLE_S,
    network: str = "",
) -> Verdict:
    """Looks at the tree below (and with) `root_pid`. Changes and stops nothing.

    network: addresses (a.b.c.d/n) of the job's other trees, whose ends of connections are dumped at the same moment. The
    caller is in the tree's network namespace.
    known_pipes: inodes of pipes that the caller holds and restores. strict: losses count as refusals. It waits up to
    settle_s for obstacles that pass by themselves, above all a process that is attaching to its device proxy. It looks
    again, too, where the tree has changed meanwhile: what seems to be held outside may be held by a process that was just
    forked.
    """
    known = frozenset(known_pipes)
    end = time.monotonic() + settle_s
    while True:
        pids = [root_pid, *proctree.descendants(root_pid)]
        verdict = _check_once(root_pid, pids, job_dir, strict, known, ghost_limit_bytes, network)
        if not verdict.refusals or time.monotonic() >= end:
            return verdict
        lasting = any(not o.transient for o in verdict.refusals)
        if lasting and pids == [root_pid, *proctree.descendants(root_pid)]:
            return verdict
        time.sleep(_SETTLE_STEP_S)


def _check_once(
    root_pid: int,
    pids: list[int],
    job_dir: str,
    strict: bool,
    known_pipes: frozenset[int],
    ghost_limit: int,
    network: str,
) -> Verdict:
    tree = Tree(root_pid)
    spaces = namespaces(root_pid)
    for pid in pids:
        process = process_of(pid)
        if process is None:
            continue  # it ended while we looked
        tree.processes.append(process)
        check_process(tree, process, root_pid, spaces)
        check_threads(tree, process)
        if process.status.state != "Z":
            check_descriptors(tree, process, ghost_limit)
            check_mappings(tree, process, ghost_limit)
    if not tree.processes:
        gone = "the job's first process is not there"
        tree.refusals.append(Obstacle(0, root_pid, "", "", gone, "the job has ended", ""))
    check_zombies(tree)
    check_terminals(tree)
    check_pipes(tree, known_pipes)
    check_sysv(tree)
    verdict = Verdict(tree.refusals, tree.warnings)
    check_sockets(tree, verdict, root_pid, job_dir, network)
    if strict:
        verdict.refusals += verdict.warnings
        verdict.warnings = []
    return verdict
