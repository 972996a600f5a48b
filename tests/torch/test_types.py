# SPDX-License-Identifier: Apache-2.0
"""Types that CUDA computes in and the CPU refuses, numbers that do not fit into a type, and tensors whose elements share
memory: what works on a GPU works here, and what raises there raises here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

# An op, a number that it takes, one that it does not, and the tensor's type. Tried in a process of its own: a fault would
# break its context.
NUMBERS = """
import torch
import torch.nn.functional as F
NUMBERS = {
    "fill_": (lambda x, v: x.fill_(v), 3, 300, torch.uint8),
    "fill_, half": (lambda x, v: x.fill_(v), -100.0, -1e9, torch.float16),
    "fill_, gaps": (lambda x, v: x[::2].fill_(v), 3, 300, torch.uint8),
    "masked_fill": (lambda x, v: x.masked_fill(x > 0, v), 3, 300, torch.uint8),
    "masked_fill, half": (lambda x, v: x.masked_fill(x > 0, v), 3.0, -1e9, torch.float16),
    "full_like": (lambda x, v: torch.full_like(x, v), 3, 300, torch.uint8),
    "clamp": (lambda x, v: x.clamp(max=v), 3, 300, torch.uint8),
    "index_fill": (lambda x, v: x.index_fill(0, torch.tensor([1], device=x.device), v), 3, 300, torch.uint8),
    "scatter": (lambda x, v: x.scatter(0, torch.tensor([1], device=x.device), v), 3, 300, torch.uint8),
    "pow": (lambda x, v: x**v, 3, 300, torch.uint8),
    "floor_divide": (lambda x, v: x // v, 3, 0, torch.int64),
    "remainder": (lambda x, v: x % v, 3, 0, torch.int64),
    "fmod": (lambda x, v: torch.fmod(x, v), 3, 0, torch.int32),
    "histc": (lambda x, v: x.histc(3, 2, v), 3, 1, torch.float32),
    "histc, inf": (lambda x, v: x.histc(3, 2, v), 3, float("inf"), torch.float32),
    "threshold": (lambda x, v: F.threshold(x, 2, v), 3, 300, torch.uint8),
    "addcmul": (lambda x, v: torch.addcmul(x, x, x, value=v), 3, 300, torch.uint8),
    "sub, alpha": (lambda x, v: torch.sub(x, x, alpha=v), 3, 300, torch.uint8),
    "lerp": (lambda x, v: torch.lerp(x, x, v), 0.5, 1j, torch.float32),
}
for name, (op, good, bad, dtype) in NUMBERS.items():
    found = []
    for device in ("cpu", "cuda"):
        x = torch.tensor([1, 2, 3, 4, 5, 6], dtype=dtype, device=device)
        said = []
        for number in (good, bad, good):
            try:
                said.append(op(x.clone(), number).tolist())
            except RuntimeError as error:
                said.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        found.append(said)
    assert found[0] == found[1], (name, found)
    assert isinstance(found[1][1], str), name  # it was refused
"""


def test_a_number_that_an_op_does_not_take_raises() -> None:
    """Also where the same op has taken another before: the call raises, and the context lives on."""
    done = subprocess.run([sys.executable, "-c", NUMBERS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# What ATen writes though several elements share a place: each of them gets the same.
FILLS: dict[str, Callable[[Tensor], object]] = {
    "fill_": lambda v: v.fill_(7),
    "zero_": lambda v: v.zero_(),
    "_foreach_zero_": lambda v: torch._foreach_zero_([v, v[1:]]),
    "masked_fill_": lambda v: v.masked_fill_(torch.ones(4, 4, dtype=torch.bool, device=v.device), 2),
    "index_fill_": lambda v: v.index_fill_(0, torch.tensor([0], device=v.device), 2),
    "fill_diagonal_": lambda v: v.fill_diagonal_(3),
    "a row": lambda v: v.__setitem__(0, 5),
}  # fmt: skip
OVERLAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "diagonal": lambda t: t.diagonal().expand(4, 4),
    "row": lambda t: t[:1].expand(4, 4),
    "column": lambda t: t[:, 1:2].expand(4, 4),
    "one": lambda t: t[2, 3].expand(4, 4),
    "windows": lambda t: t.view(-1).unfold(0, 4, 2)[:4],
}


@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("fill", FILLS)
def test_elements_that_share_memory(fill: str, overlap: str, dtype: torch.dtype) -> None:
    def told(device: str) -> tuple[list[object], str]:
        t = torch.arange(16, device=device).reshape(4, 4).to(dtype)
        said = ""
        try:
            FILLS[fill](OVERLAPS[overlap](t))
        except RuntimeError as error:
            said = str(error)
        return t.tolist(), said

    assert told("cuda") == told("cpu")
