# SPDX-License-Identifier: Apache-2.0
"""Which of a tree's GPUs go together where there are fewer of the machine's: those that hold the same (the paper's 5.3).

Replicas on one GPU of the machine keep parameters and optimizer states once, and compute their step once. Who is a
replica of whom, nobody has to say: a dump of all has equal blocks once, and its lists of references (checkpoint/staged.py)
say who has them.
"""

from __future__ import annotations

import glob
import os
from collections import defaultdict

from devproxy.checkpoint import staged


def alike_in(folder: str, gpus: int) -> list[list[int]]:
    """[i][j]: the bytes that GPU i and GPU j of the tree both hold, by the dump in that folder. Raises StoreError, OSError."""
    holders: dict[tuple[int, int, int, int], set[int]] = defaultdict(set)
    for path in glob.glob(os.path.join(glob.escape(folder), "gpu*-*" + staged.REFS_SUFFIX)):
        gpu = int(os.path.basename(path)[len("gpu") :].split("-")[0])
        for ref in staged.read_refs(path):
            if not ref.zeros:
                holders[ref.gpu, ref.client, ref.there, ref.bytes] |= {ref.gpu, gpu}
    alike = [[0] * gpus for _ in range(gpus)]
    for (_, _, _, size), both in holders.items():
        for i in both:
            for j in both:
                if i != j and i < gpus and j < gpus:
                    alike[i][j] += size
    return alike


def place(alike: list[list[int]], onto: list[int], now: list[int]) -> list[int]:
    """[k]: the machine's GPU, one of `onto`, for GPU k. As many on each as can be; together, who holds the same; and where
    that leaves a choice, where it is `now`.

    alike: of alike_in(), or all zero where nobody knows. onto: not more than GPUs.
    """
    count = len(now)
    left = set(range(count))
    groups: list[list[int]] = []
    for number in range(len(onto)):
        size = count // len(onto) + (number < count % len(onto))
        group = [min(left)]
        left.remove(group[0])
        while len(group) < size:
            best = max(sorted(left), key=lambda one: sum(alike[one][other] for other in group))
            group.append(best)
            left.remove(best)
        groups.append(group)
    to = [-1] * count
    free = list(onto)
    # Whoever would leave the most behind chooses first.
    stays = {
        (i, gpu): sum(now[k] == gpu for k in group)
        for i, group in enumerate(groups)
        for gpu in onto
    }
    while groups_left := [i for i, group in enumerate(groups) if to[group[0]] < 0]:
        i, gpu = max(((i, gpu) for i in groups_left for gpu in free), key=lambda pair: stays[pair])
        for k in groups[i]:
            to[k] = gpu
        free.remove(gpu)
    return to
