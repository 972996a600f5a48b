# SPDX-License-Identifier: Apache-2.0
"""Half and mixed types, and autocast: what CUDA computes in them computes here, and what cannot be raises at the call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.autocast_test_lists import AutocastTestLists
from torch.testing._internal.common_methods_invocations import op_db

import opdb

HALVES = [torch.float16, torch.bfloat16]
RAISES = {"cudnn_convolution", "cudnn_convolution_transpose"}  # of CUDA builds with cuDNN alone

ROUND_TWICE = {
    "fft.hfft2",
    "fft.hfftn",
    "fft.ihfft2",
    "fft.ihfftn",
}  # two ops, in half between them


def alive() -> bool:
    """The context has had no fault: it computes."""
    return torch.ones(2, device="cuda").sum().item() == 2


def cast(value: Any, dtype: torch.dtype, only: torch.dtype | None = None) -> Any:
    """The floating point tensors in it, or only those of one type, in another type."""
    if isinstance(value, Tensor):
        wanted = value.is_floating_point() if only is None else value.dtype == only
        return value.to(dtype) if wanted else value
    if isinstance(value, (list, tuple)):
        return type(value)(cast(v, dtype, only) for v in value)
    return value


def entries(lists: AutocastTestLists, name: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    for op, args, *more in getattr(lists, name):
        if op == "einsum":  # whose equation does not fit its operands; torch's own tests skip it
            yield op, ("ij,jk->ik", *more[0]), {}
        else:
            yield op, args, more[0] if more and isinstance(more[0], dict) else {}


# A list of AutocastTestLists, where its ops are, the type that autocast runs them in; None: the op's own choice.
LISTS: dict[str, tuple[Any, str | None]] = {
    "torch_expect_builtin_promote": (torch, None),
    "methods_expect_builtin_promote": (Tensor, None),
    "torch_fp16": (torch, "half"),
    "torch_fp32": (torch, "float"),
    "torch_need_autocast_promote": (torch, "float"),
    "nn_fp16": (torch._C._nn, "half"),
    "nn_fp32": (torch._C._nn, "float"),
    "linalg_fp16": (torch._C._linalg, "half"),
    "methods_fp16": (Tensor, "half"),
    "methods_fp32": (Tensor, "float"),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", LISTS)
def test_autocast_runs_the_whole_list(name: str, dtype: torch.dtype) -> None:
    """As torch's own test_autocast_*: under autocast an op gives what it gives in the type that autocast chooses."""
    where, kind = LISTS[name]
    torch.manual_seed(0)
    raised, ran = set(), 0
    for op, given, named in entries(AutocastTestLists(torch.device("cuda")), name):
        run = getattr(where, op, None)
        if run is None:
            continue  # Tensor.__div__, which Python 3 has not
        args = cast(given, dtype, only=torch.float16)
        try:
            with torch.autocast("cuda", dtype=dtype):
                mine = run(*args, **named)
        except RuntimeError as error:
            assert op in RAISES, f"{op}: {error}"
            raised.add(op)
            assert alive(), op
            continue
        assert alive(), op
        ran += 1
        if kind is None:
            continue
        wanted = run(*cast(args, dtype if kind == "half" else torch.float32), **named)
        for u, v in zip(opdb.tensors(mine), opdb.tensors(wanted), strict=True):
            assert (op, u.dtype) == (op, v.dtype)
            assert torch.equal(u, v), op
    assert ran > 0
    assert raised == (RAISES if name == "torch_fp16" else set())


def cuda_only(dtype: torch.dtype) -> list[Any]:
    """The ops of op_db that torch says CUDA has in that type, and the CPU has not."""
    return [
        op
        for op in op_db
        if dtype in op.dtypesIfCUDA and dtype not in op.dtypes and not op.name.startswith("jiter")
    ]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_ops_that_the_cpu_lacks_in_half_are_computed_in_float(dtype: torch.dtype) -> None:
    """Forward: the CPU's result where there is one, else the float32 result, rounded. Backward: it runs. The kernels of CUDA's attention raise; nothing faults."""
    outcomes: dict[str, set[str]] = {"ran": set(), "raised": set()}
    for op in cuda_only(dtype):
        for sample, _ in zip(op.sample_inputs("cpu", dtype, requires_grad=True), range(2)):
            args = opdb.to_device((sample.input, sample.args, sample.kwargs), "cuda")
            torch.manual_seed(1)
            try:
                mine = list(opdb.tensors(op(args[0], *args[1], **args[2])))
                opdb.gradients(mine, list(opdb.tensors(args)))
            except NotImplementedError:
                outcomes["raised"].add(op.name)
                assert alive(), op.name
                continue
            assert alive(), op.name
            outcomes["ran"].add(op.name)
            try:
                wanted = op(
                    sample.input, *sample.args, **sample.kwargs
                )  # torch's table may be wrong
            except RuntimeError:
                torch.manual_seed(1)
                wanted = op(*cast((args[0], *args[1]), torch.float32), **args[2])
            for u, v in zip(mine, opdb.tensors(wanted), strict=True):
                same = opdb.same_bits(u.cpu(), v.cpu().to(u.dtype))
                if op.name in ROUND_TWICE:
                    same = torch.allclose(u.cpu().cfloat(), v.cpu().cfloat(), rtol=5e-3, atol=5e-3)
                assert same, op.name
    attention = {
        "torch.ops.aten._efficient_attention_forward",
        "torch.ops.aten._flash_attention_forward",
    }
    assert outcomes["raised"] <= attention
    assert "nn.functional.avg_pool3d" in outcomes["ran"]


def test_softmax_from_half_to_float() -> None:
    x = torch.randn(4, 9, device="cuda").half()
    for function in (F.softmax, F.log_softmax):
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        mine = function(a, -1, dtype=torch.float32)
        wanted = function(b.float(), -1)
        assert torch.equal(mine, wanted)
        mine.sin().sum().backward()
        wanted.sin().sum().backward()
        assert a.grad is not None and b.grad is not None
        assert a.grad.dtype == torch.float16 and torch.equal(a.grad, b.grad)


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(8, 6, 2, bidirectional=True),
    "lstm, projected": lambda: nn.LSTM(8, 6, proj_size=3),
    "gru": lambda: nn.GRU(8, 6, 2),
    "rnn": lambda: nn.RNN(8, 6),
    "lstm cell": lambda: nn.LSTMCell(8, 6),
    "gru cell": lambda: nn.GRUCell(8, 6),
}


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of the parameters."""
    x = x.clone().requires_grad_()
    y = model(x)
    y = y[0] if isinstance(y, tuple) else y
    y.float().sin().sum().backward()
    found = [y, x.grad, *[p.grad for p in model.parameters()]]
    return [t.detach().cpu() for t in found if t is not None]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layer_in_half_equals_the_cpu(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mine = RECURRENT[name]().to(dtype)
    theirs = copy.deepcopy(mine).cuda()
    x = torch.randn((5, 8) if "cell" in name else (4, 5, 8)).to(dtype)
    for a, b in zip(step(mine, x), step(theirs, x.cuda()), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("given", ["float32", "half"])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layer_under_autocast(name: str, given: str, dtype: torch.dtype) -> None:
    """The layers in float16 whatever the type asked for, as cuDNN's autocast; the cells in the type asked for."""
    torch.manual_seed(0)
    model = RECURRENT[name]().cuda()
    x = torch.randn((5, 8) if "cell" in name else (4, 5, 8), device="cuda")
    x = x.to(dtype) if given == "half" else x
    inside = dtype if "cell" in name else torch.float16
    reference = copy.deepcopy(model).to(inside)
    with torch.autocast("cuda", dtype=dtype):
        mine = step(model, x)
    wanted = step(reference, x.to(inside))
    assert mine[0].dtype == inside
    for a, b in zip(mine, wanted, strict=True):
        assert torch.equal(a, b.to(a.dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("weights", [True, False])
def test_multihead_attention_under_autocast(weights: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 4).cuda()
    x = torch.randn(6, 3, 16, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=dtype):
        y, _ = model(x, x, x, need_weights=weights)
        y.float().square().mean().backward()
    assert y.dtype == dtype
    exact, _ = model(x, x, x, need_weights=weights)
    assert torch.allclose(y.float(), exact, atol=0.05)
    assert x.grad is not None and x.grad.isfinite().all()


def test_refusals_come_at_the_call() -> None:
    """Also for a form of op that would need no question: whose shapes the client knows by itself."""
    x = torch.ones(2, 3, 8, 8, device="cuda", dtype=torch.int32)
    for op in (
        lambda: torch.ops.aten._upsample_bilinear2d_aa(x, [4, 4], False),
        lambda: F.avg_pool3d(x, 2),
        lambda: F.interpolate(x, scale_factor=2, mode="bicubic"),
        lambda: torch.linalg.inv(torch.eye(3, device="cuda").half()),
    ):
        with pytest.raises(RuntimeError, match="not implemented for|Low precision"):
            op()
        assert alive()
