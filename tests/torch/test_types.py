# SPDX-License-Identifier: Apache-2.0
"""Types that CUDA computes in and the CPU refuses, numbers that do not fit into a type, and tensors whose elements share
memory: what works on a GPU works here, and what raises there raises here."""

from __future__ import annotations

import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

ONLY_CUDA = {  # names of ATen's that only a CUDA build has: what torch.nn.functional makes of them is there
    "torch.ops.aten._flash_attention_forward",
    "torch.ops.aten._efficient_attention_forward",
}
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]


def to_cuda(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cuda()
    return "cuda" if isinstance(value, torch.device) else value


def test_each_type_of_cuda_is_computed() -> None:
    """op_db says which types CUDA has and the CPU lacks."""
    raised, ran = {}, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in op_db:
            for dtype in set(op.dtypesIfCUDA) - set(op.dtypes):
                for sample in list(op.sample_inputs("cpu", dtype))[:2]:
                    given = sample.transform(to_cuda)
                    try:
                        op.op(given.input, *given.args, **given.kwargs)
                    except Exception as error:
                        raised[op.name] = f"{dtype}: {error}"
                    ran += 1
            torch.cuda.synchronize()
    assert {name: why for name, why in raised.items() if name not in ONLY_CUDA} == {}
    assert set(raised) == ONLY_CUDA  # else the list is out of date
    assert ran > 150


def test_abs_and_trace_of_bools() -> None:
    x = torch.tensor([[True, False], [False, True]], device="cuda")
    assert x.abs().equal(x) and x.abs().data_ptr() != x.data_ptr()
    assert x.clone().abs_().equal(x)
    assert torch.abs(x, out=torch.empty(0, device="cuda", dtype=torch.bool)).equal(x)
    assert torch.abs(x, out=torch.empty(2, 2, device="cuda")).tolist() == [[1, 0], [0, 1]]
    assert x.trace().dtype == torch.int64 and x.trace().item() == 2
    with pytest.raises(RuntimeError, match="expected a matrix"):
        x[0].trace()


def bins_of(values: list[int], bins: int, least: int, most: int) -> list[int]:
    if least == most:
        least, most = (min(values), max(values)) if values else (least, most)
    if least == most:
        least, most = least - 1, most + 1
    counts = [0] * bins
    for value in values:
        if least <= value <= most:
            counts[min((value - least) * bins // (most - least), bins - 1)] += 1
    return counts


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_histc_of_integers(dtype: torch.dtype) -> None:
    draw = random.Random(7)
    for bins, least, most, count in [
        (4, 0, 0, 50),
        (7, 3, 60, 90),
        (100, 0, 100, 30),
        (3, 0, 0, 0),
        (5, 9, 9, 8),
    ]:
        values = [draw.randrange(0, 100) for _ in range(count)]
        x = torch.tensor(values, dtype=dtype, device="cuda")
        found = torch.histc(x, bins, least, most)
        assert found.dtype == dtype
        assert found.tolist() == bins_of(values, bins, least, most)
        out = torch.empty(0, dtype=dtype, device="cuda")
        assert torch.histc(x, bins, least, most, out=out).equal(found) and out.equal(found)
    same = torch.tensor([3, 3], dtype=dtype, device="cuda")
    assert torch.histc(same, 4).tolist() == [0, 0, 2, 0]
    with pytest.raises(RuntimeError, match="max must be larger than min"):
        torch.histc(same, 4, 5, 2)
    with pytest.raises(RuntimeError, match="bins must be > 0"):
        torch.histc(same, 0)


def divided(a: int, b: int, bits: int) -> tuple[int, int, int, int]:
    """Rounded down, the rest of that, rounded to zero, the rest of that; as no type of fixed length has to hold them."""
    if b == 0:
        rest = 0xFFFFFFFF if bits == 64 and a >= 0 else -1
        return -1, rest, -1, rest
    to_zero = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return a // b, a % b, to_zero, a - b * to_zero


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_divided_by_zero(dtype: torch.dtype) -> None:
    """Also the least integer by -1. Both end a CPU's program, and a GPU's goes on."""
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    dice = random.Random(str(dtype))
    a = [dice.randint(max(least, -30), 30) for _ in range(60)] + [least, least, most, 0]
    b = [dice.randint(max(least, -3), 3) for _ in range(60)] + [0, max(least, -1), 0, 0]
    bits = torch.iinfo(dtype).bits
    exact = [divided(one, by, bits) for one, by in zip(a, b, strict=True)]
    wanted = [
        torch.tensor([number % 2**bits for number in row], dtype=torch.uint64).to(dtype)
        for row in zip(*exact, strict=True)
    ]
    x, y = (torch.tensor(row, dtype=dtype, device="cuda") for row in (a, b))
    empty = torch.empty(0, dtype=dtype, device="cuda")
    results = (x // y, x % y, torch.div(x, y, rounding_mode="trunc"), torch.fmod(x, y))
    assert all(found.cpu().equal(row) for found, row in zip(results, wanted, strict=True))
    for found in (
        x.clone().floor_divide_(y),
        torch.floor_divide(x, y, out=empty.clone()),
        torch.div(x, y, rounding_mode="floor"),
        x.clone().div_(y, rounding_mode="floor"),
    ):
        assert found.cpu().equal(wanted[0])
    assert torch.div(x, y, rounding_mode="trunc", out=empty.clone()).cpu().equal(wanted[2])
    for found in (x.clone().remainder_(y), torch.remainder(x, y, out=empty.clone())):
        assert found.cpu().equal(wanted[1])
    for found in (x.clone().fmod_(y), torch.fmod(x, y, out=empty.clone())):
        assert found.cpu().equal(wanted[3])
    assert (x // 0).unique().tolist() == [-1 if least else most]
    assert (9 % y)[-1].item() == wanted[1][-1].item() and (x[:, None] // y[-1:]).shape == (64, 1)
    assert (x // y.to(torch.bool)).dtype == dtype
    assert torch.where(y != 0, x // y, 7)[-1].item() == 7
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        x.clone()[:1].floor_divide_(y)


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_nansum_of_complex_numbers(dtype: torch.dtype) -> None:
    nan = float("nan")
    x = torch.tensor(
        [[1 + 2j, complex(nan, 1), 3j], [complex(2, nan), 4, 1j]], dtype=torch.complex64
    )
    known = torch.where(x.isnan(), 0, x)
    x = x.to(dtype).cuda()
    for dims, keep in [(None, False), (0, False), (1, True), ((0, 1), False)]:
        found = torch.nansum(x, dims, keep)
        wanted = known.sum(dims, keep) if dims is not None else known.sum()
        assert found.dtype == dtype and found.to(torch.complex64).cpu().equal(wanted)
        out = torch.empty_like(found)
        torch.nansum(x, dims, keep, out=out)
        assert out.equal(found)
    wide = torch.nansum(x, dtype=torch.complex128)
    assert wide.dtype == torch.complex128 and wide.item() == known.sum().item()
    if dtype != torch.complex32:
        x.requires_grad_()
        torch.nansum(x).abs().backward()
        assert x.grad is not None and (x.grad != 0).equal(~x.detach().isnan())


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
