# SPDX-License-Identifier: Apache-2.0
"""What the campaign `ranks` of scripts/soak.py expects of a launcher whose rank was killed."""

from __future__ import annotations

import re

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.checkpoint.ways import WAYS
from tests.fault.rank_kills import says_of_rank

EXIT_CODES = {1: -6, 3: -9, 0: -15, 2: -6}  # rank 3 was killed; 1 and 2 have ended themselves


@pytest.mark.parametrize("first", [1, 3])
def test_torchrun_names_the_killed_rank(first: int) -> None:
    """Whoever it takes for the cause: it looks ten times a second, and ranks that wait end in less."""
    order = sorted(EXIT_CODES, key=lambda rank: rank != first)
    failures = {rank: ProcessFailure(rank, 7 + rank, EXIT_CODES[rank], "") for rank in order}
    said = str(ChildFailedError("parallel.py", failures))
    assert re.search(says_of_rank(WAYS["ddp"], "3"), said), said
    assert not re.search(says_of_rank(WAYS["ddp"], "1"), said), said


def test_torchrun_names_one_rank_alone() -> None:
    said = str(ChildFailedError("parallel.py", {3: ProcessFailure(3, 10, -9, "")}))
    assert re.search(says_of_rank(WAYS["ddp"], "3"), said), said


@pytest.mark.parametrize(
    "said",
    [
        "torch.multiprocessing.spawn.ProcessExitedException: process 3 terminated with signal SIGKILL",
        "rank 1 of 4: rank 3 on GPU 1 cannot be reached: the process that had it is gone. Under way was",
    ],
)
def test_spawn_names_the_killed_rank_or_another_does(said: str) -> None:
    assert re.search(says_of_rank(WAYS["launcher"], ""), said)
