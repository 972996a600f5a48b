# SPDX-License-Identifier: Apache-2.0
"""torch.distributed on 'nccl' behind devproxy: jobs of several ranks, each on a GPU of its own, compared with 'gloo'."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.conftest import ROOT

pytest.importorskip("torch")

PROGRAM = ROOT / "tests" / "subjects" / "driver" / "process_group.py"
EXAMPLE = ROOT / "examples" / "train_ddp.py"
RunJob = Callable[..., CompletedProcess[str]]


@pytest.fixture
def run_ranks(run_job: RunJob, job_env: dict[str, str]) -> RunJob:
    def run(ranks: int, script: Path, *arguments: str) -> CompletedProcess[str]:
        job_env["OMP_NUM_THREADS"] = "1"
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ]
        options = ["--device", "soft", "--gpus", str(ranks)]
        return run_job(*torchrun, str(script), *arguments, options=options, timeout=280)

    return run


def said(done: CompletedProcess[str]) -> str:
    return (done.stdout + done.stderr)[-8000:]


def ran_on_all(done: CompletedProcess[str], ranks: int) -> None:
    """Every rank was content with every subject."""
    assert done.returncode == 0, said(done)
    subjects: dict[str, set[str]] = {}
    for subject, rank in re.findall(r"ok (\w+) rank (\d+)", done.stdout):
        subjects.setdefault(subject, set()).add(rank)
    assert subjects and all(len(who) == ranks for who in subjects.values()), said(done)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_operations_and_trainers_do_what_they_do_on_gloo(run_ranks: RunJob, ranks: int) -> None:
    ran_on_all(run_ranks(ranks, PROGRAM, "all"), ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_groups_made_by_splitting(run_ranks: RunJob, ranks: int) -> None:
    ran_on_all(run_ranks(ranks, PROGRAM, "splitting"), ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_groups_made_by_shrinking(run_ranks: RunJob, ranks: int) -> None:
    ran_on_all(run_ranks(ranks, PROGRAM, "shrinking"), ranks)


def test_a_group_shrinks_over_a_death(run_ranks: RunJob, job_env: dict[str, str]) -> None:
    job_env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # the others shall live on
    done = run_ranks(3, PROGRAM, "shrinking_over_a_death")
    assert done.returncode == 0, said(done)
    assert sorted(re.findall(r"ok shrinking_over_a_death rank (\d)", done.stdout)) == ["0", "1"]


@pytest.mark.parametrize(
    "program, operation, whom",
    [
        ("hang", "ALLREDUCE", "submit what rank 0 has: AllReduce(3 x float32, sum)"),
        ("hang_in_a_receive", "RECV", "send what rank 0 receives: Recv(5 x float32)"),
    ],
)
def test_a_rank_that_does_not_come_ends_the_others_in_words(
    run_ranks: RunJob, program: str, operation: str, whom: str
) -> None:
    done = run_ranks(2, PROGRAM, program)
    assert done.returncode != 0
    for part in (
        "rank 0 of 2",
        "collective operation timeout",
        operation,
        f"It waits for rank 1 on GPU 1 to {whom}",
        "SIGABRT",
    ):
        assert part in done.stdout + done.stderr, said(done)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_rank_that_does_not_join_is_named(
    run_ranks: RunJob, job_env: dict[str, str], blocking: bool
) -> None:
    """A blocking making waits as NCCL's does, and says for whom; one that does not block ends at the group's time-out."""
    job_env["TORCH_NCCL_USE_COMM_NONBLOCKING"] = "0" if blocking else "1"
    done = run_ranks(2, PROGRAM, "hang_in_a_new_group")
    assert done.returncode != 0
    words = "rank 0 of a communicator of 2 waits for" if blocking else "It waits for"
    assert f"{words} rank 1 to join the communicator" in done.stderr, said(done)


def test_a_rank_that_was_killed_ends_the_others_by_its_name(run_ranks: RunJob) -> None:
    done = run_ranks(2, PROGRAM, "gone")
    assert done.returncode != 0
    for part in (
        "(rank 0 of 2): its communicator failed: ",
        "rank 1 on GPU 1 cannot be reached: ",
        "ALLREDUCE",
        "SIGABRT",
    ):
        assert part in done.stdout + done.stderr, said(done)


def test_a_works_future_says_how_it_ended(run_ranks: RunJob, job_env: dict[str, str]) -> None:
    job_env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
    ran_on_all(run_ranks(2, PROGRAM, "future_result"), 2)


def test_a_blocking_wait_raises(run_ranks: RunJob, job_env: dict[str, str]) -> None:
    job_env["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    ran_on_all(run_ranks(2, PROGRAM, "blocking_wait"), 2)


def test_example_ends_with_the_same_parameters_on_all_ranks_and_in_every_run(
    run_ranks: RunJob,
) -> None:
    digests = set()
    for _ in range(2):
        done = run_ranks(2, EXAMPLE, "--steps", "8")
        found = re.search(r"parameters ([0-9a-f]+) equal on all ranks", done.stdout)
        assert done.returncode == 0 and found is not None, said(done)
        digests.add(found.group(1))
    assert len(digests) == 1, digests
