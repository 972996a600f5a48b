# SPDX-License-Identifier: Apache-2.0
"""The guards of the op_db sweep (guards.py): each is broken on purpose here, and each says so."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("scipy", reason="op_db needs scipy")
pytest.importorskip("expecttest", reason="op_db needs expecttest")

import guards
import opdb

HERE = os.path.dirname(os.path.abspath(__file__))
N = 64


class FakeOp:
    """As much of an OpInfo as opdb.run_op wants: one sample, a vector of 64 floats."""

    name, variant_test_name, supports_autograd = "broken on purpose", "", False

    class Sample:
        def __init__(self) -> None:
            self.input, self.args, self.kwargs = torch.linspace(-1, 1, N), (), {}

    def __init__(self, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.run = run

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)

    def sample_inputs(self, *_: object, **__: object) -> list[Sample]:
        return [self.Sample()]


def broken_by(run: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, str]:
    """The guards that the sweep finds broken; the op's values are right all the same."""
    outcome = opdb.run_op(FakeOp(run), torch.float32, 1, guarded=True)
    assert outcome.kind == "bitwise", outcome.detail
    return outcome.broken


def test_an_honest_op_breaks_none() -> None:
    assert not broken_by(lambda x: (x + 1).relu())
    assert not broken_by(lambda x: x[x > 0])  # its size depends on data


def test_computing_on_the_host_is_seen() -> None:
    def on_the_host(x: torch.Tensor) -> torch.Tensor:
        return (x.cpu() * 2).to(x.device) + 1

    found = broken_by(on_the_host)
    assert set(found) == {"host", "reads_back"}
    assert "aten::mul" in found["host"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(N),
        lambda: torch.arange(float(N)),
        lambda: torch.full((N,), 2.0),
        lambda: torch.stack([torch.zeros(N)])[0],
    ],
)
def test_computing_on_the_host_is_seen_without_a_copy_back(
    make: Callable[[], torch.Tensor],
) -> None:
    assert set(broken_by(lambda x: x + make().to(x.device))) == {"host"}


def test_host_kernels_inside_other_ops_are_seen() -> None:
    """at::repeat computes on the CPU below its own dispatch, where a dispatch mode sees nothing."""
    assert set(broken_by(lambda x: x.repeat(2, 2))) == {"host"}


def test_reading_a_value_back_is_seen() -> None:
    found = broken_by(lambda x: x + x[0].item())
    assert set(found) == {"reads_back"}
    assert found["reads_back"].startswith("4 bytes")


def test_uploading_a_result_without_a_launch_is_seen() -> None:
    ready = torch.linspace(0, 1, N)
    assert set(broken_by(lambda x: ready.to(x.device))) == {"no_launch"}


def test_views_are_told_from_results_without_a_launch() -> None:
    assert set(broken_by(lambda x: x.view(8, 8).t())) == {"view"}
    assert set(broken_by(lambda x: torch.zeros(N, device=x.device))) == {"no_launch"}  # a memset


def test_storages_of_results_and_arguments_are_live() -> None:
    x = torch.ones(N, device="cuda")
    assert not guards.dead_storages([x, x[3:], x.view(8, 8), torch.ones(3), x.new_empty(0)])


# A dead address ends its process's context, so each has a process of its own.
DEAD = {
    "made up": "place = torch.ones(64, device='cuda').data_ptr() + (1 << 32)",
    "freed": """
        gone = torch.ones(1 << 20, device='cuda')
        place = gone.data_ptr() + gone.nbytes // 2  # not where the next small tensor goes
        del gone
        torch.cuda.empty_cache()
    """,
    "too long": """
        kept = torch.ones(1 << 20, device='cuda')
        place = kept.data_ptr() + kept.nbytes - 64
    """,
}


@pytest.mark.parametrize("how", DEAD)
def test_a_dead_storage_is_seen(how: str) -> None:
    program = "import sys, torch\nsys.path.insert(0, sys.argv[1])\nimport guards\n"
    program += textwrap.dedent(DEAD[how]).strip() + "\n"
    program += textwrap.dedent("""
        device = torch.device('cuda', 0)
        storage = torch._C._construct_storage_from_data_pointer(place, device, 256)
        wrong = torch.empty(0, device=device).set_(storage)
        x = torch.ones(64, device=device)

        def run():
            x + 1  # an op that launches, and hands out something else
            return [wrong]

        result, seen = guards.watch(run, [x])
        found = guards.broken(seen)
        print(sorted(found), found.get('dead'), flush=True)
    """)
    done = subprocess.run(
        [sys.executable, "-c", program, HERE], capture_output=True, text=True, timeout=120
    )
    assert "['dead']" in done.stdout, done.stdout + done.stderr[-2000:]
    assert "not in live memory" in done.stdout
