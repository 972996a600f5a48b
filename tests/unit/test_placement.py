# SPDX-License-Identifier: Apache-2.0
"""Which ranks go together on fewer GPUs (devproxy/node/placement.py)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from devproxy.checkpoint import staged
from devproxy.node.placement import alike_in, place


def alike(*sets: set[int]) -> list[list[int]]:
    count = sum(len(one) for one in sets)
    return [
        [100 * any({i, j} <= one for one in sets) * (i != j) for j in range(count)]
        for i in range(count)
    ]


def together(to: list[int]) -> set[frozenset[int]]:
    return {frozenset(k for k, gpu in enumerate(to) if gpu == there) for there in set(to)}


def test_replicas_go_together() -> None:
    # Tensor parallel pairs (0, 1), (2, 3), ...: the even ones are replicas, and the odd ones.
    of_two = alike({0, 2, 4, 6}, {1, 3, 5, 7})
    now = list(range(8))
    assert together(place(of_two, [0, 1], now)) == {
        frozenset({0, 2, 4, 6}),
        frozenset({1, 3, 5, 7}),
    }
    for group in together(place(of_two, [4, 5, 6, 7], now)):
        assert len(group) == 2 and len({k % 2 for k in group}) == 1
    assert place(of_two, [3], now) == [3] * 8


def test_who_can_stay_stays() -> None:
    assert place(alike({0, 1}, {2, 3}), [5, 2], [0, 1, 2, 2]) == [5, 5, 2, 2]
    assert place(alike({0, 1}, {2, 3}), [0, 1], [1, 1, 0, 0]) == [1, 1, 0, 0]
    assert place([[0] * 4] * 4, [0, 1, 2, 3], [3, 2, 1, 0]) == [3, 2, 1, 0]


@pytest.mark.parametrize("seed", range(50))
def test_every_gpu_has_its_share(seed: int) -> None:
    dice = random.Random(seed)
    count = dice.randint(1, 9)
    onto = dice.sample(range(12), dice.randint(1, count))
    table = [[0] * count for _ in range(count)]
    for i in range(count):
        for j in range(i):
            table[i][j] = table[j][i] = dice.randint(0, 3)
    to = place(table, onto, [dice.randint(0, 11) for _ in range(count)])
    shares = [to.count(gpu) for gpu in onto]
    assert sum(shares) == count and max(shares) - min(shares) <= 1


def write_refs(folder: Path, gpu: int, refs: list[tuple[int, int, int, int, int]]) -> None:
    data = staged._REFS_HEADER.pack(staged._REFS_MAGIC, len(refs))
    data += b"".join(staged._REF.pack(*ref) for ref in refs)
    (folder / f"gpu{gpu}-1.refs").write_bytes(data)


def test_a_dump_says_who_holds_the_same(tmp_path: Path) -> None:
    """GPU 1 and 2 have a block of GPU 0, and GPU 2 another of GPU 1; zeros do not count, nor a block twice in one."""
    zeros = staged._ZEROS_GPU
    write_refs(tmp_path, 0, [(0, 50, zeros, 0, 0), (4096, 10, 0, 1, 0)])
    write_refs(tmp_path, 1, [(0, 1000, 0, 1, 8192), (1000, 50, zeros, 0, 0)])
    write_refs(tmp_path, 2, [(0, 1000, 0, 1, 8192), (4096, 7, 1, 1, 2000)])
    assert alike_in(str(tmp_path), 3) == [[0, 1000, 1000], [1000, 0, 1007], [1000, 1007, 0]]
