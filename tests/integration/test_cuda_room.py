# SPDX-License-Identifier: Apache-2.0
"""A real GPU that is nearly full, over the fake driver: what a job gets when its own freed memory still has work in front."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from tests.checkpoint.world import SUBJECTS
from tests.conftest import RUN
from tests.native.test_hal_cuda import fake_gpus


def run(
    job_env: dict[str, str], tmp_path: Path, program: str, taken_mib: int = 0
) -> subprocess.CompletedProcess[str]:
    """On a GPU of 1 GiB. taken_mib: what others have of it, beside every account."""
    env = job_env | fake_gpus(tmp_path / "root")
    env |= {"FAKE_MEMORY_MIB": "1024", "FAKE_TAKEN_MIB": str(taken_mib)}
    env |= {"DEVPROXY_CUDA_EXECUTOR": "host", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [*RUN, "--device", "cuda", "--gpus", "1", "--", sys.executable, "-c", textwrap.dedent(program)],
        env=env, capture_output=True, text=True, timeout=110,
    )  # fmt: skip


def test_memory_that_is_freed_behind_work_is_waited_for(
    job_env: dict[str, str], tmp_path: Path
) -> None:
    """By size both do not fit. Natively the second gets the first one's memory, behind the first one's work."""
    done = run(job_env, tmp_path, """
        import torch
        x = torch.ones(600 << 20, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        for _ in range(20):
            x.add_(1)  # some seconds of work
        total = x[:1000].to(torch.int64).sum()
        del x
        y = torch.full((560 << 20,), 3, dtype=torch.uint8, device="cuda")
        print("END", total.item(), y[-5:].to(torch.int64).sum().item())
    """)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["END", "21000", "15"]


def test_the_error_comes_where_it_does_not_fit(job_env: dict[str, str], tmp_path: Path) -> None:
    """The account is the GPU's size, and the driver has less."""
    done = run(job_env, tmp_path, """
        import torch
        held = [torch.empty(100 << 20, dtype=torch.uint8, device="cuda") for _ in range(7)]
        free, total = torch.cuda.mem_get_info()
        assert total == 1024 << 20 and free < 124 << 20, (free, total)
        try:
            held.append(torch.empty(200 << 20, dtype=torch.uint8, device="cuda"))
        except torch.cuda.OutOfMemoryError as error:
            print("OOM", str(error).startswith("CUDA out of memory. Tried to allocate 200.00 MiB. GPU 0 has"))
        torch.cuda.synchronize()
        held.clear()
        x = torch.full((600 << 20,), 1, dtype=torch.uint8, device="cuda")
        print("END", x[::1 << 20].to(torch.int64).sum().item())
    """, taken_mib=200)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["OOM", "True", "END", "600"]


def test_a_promise_that_the_gpu_cannot_keep_ends_the_job_in_words(
    job_env: dict[str, str], tmp_path: Path
) -> None:
    """Every second piece of 30 MiB stays, so most handles of the driver stay too, and what is free in them is of no use for
    440 MiB. No kernel may touch what is not there, nor may the server crash."""
    done = run(job_env, tmp_path, """
        import torch
        held = [torch.ones(30 << 20, dtype=torch.uint8, device="cuda") for _ in range(32)]
        torch.cuda.synchronize()
        del held[::2]
        try:
            x = torch.ones(440 << 20, dtype=torch.uint8, device="cuda")
            print("SUM", x[::1 << 20].to(torch.int64).sum().item())
            torch.cuda.synchronize()
        except torch.cuda.OutOfMemoryError as error:
            print("OOM", "promised" in str(error))
    """)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["OOM", "True"]
    assert "crash" not in done.stderr


def test_ranks_whose_activations_do_not_fit_take_turns(
    job_env: dict[str, str], tmp_path: Path
) -> None:
    """Two of 430 MiB at the peak on a GPU of 760 MiB, and on one each."""
    digests = []
    for number, gpus in enumerate(("0,1", "0,0")):
        folder = tmp_path / str(number)
        folder.mkdir()
        env = job_env | fake_gpus(tmp_path / f"root-{number}", 2)
        env |= {"FAKE_MEMORY_MIB": "760", "FAKE_NCCL_MANY": "1", "DEVPROXY_CUDA_EXECUTOR": "host"}
        env |= {"DEVPROXY_TORCH_OPS": "cuda", "PYTHONWARNINGS": "ignore"}
        script = (
            str(SUBJECTS / "activations.py"),
            "2",
            str(folder),
            "--layers",
            "25",
            "--steps",
            "5",
        )
        done = subprocess.run(
            [*RUN, "--device", "cuda", "--gpu", gpus, "--", sys.executable, *script],
            env=env, capture_output=True, text=True, timeout=110,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        digests.append(done.stdout.split()[-2:])
    assert digests[0] == digests[1] and len(set(digests[0])) == 2
