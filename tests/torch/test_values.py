# SPDX-License-Identifier: Apache-2.0
"""Ops that look at the values that they are given, and what PyTorch's CPU kernels lack: as on a GPU, also in a second call,
whose types and shapes the server has seen before."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

NAN = float("nan")


def matrix(value: float) -> Tensor:
    return torch.full((4, 4), value, device="cuda") + 2 * torch.eye(4, device="cuda")


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.float32)


def integers(*values: int) -> Tensor:
    return torch.tensor(values, device="cuda")


def quantized(point: int) -> Tensor:
    points = torch.tensor([point, 0], device="cuda", dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(
        torch.ones(2, 2, device="cuda"), numbers(1, 1), points, 0, 0, 255
    )


# A call that works, one that raises, and a word of what it says. PyTorch looks at these values on the host, on CUDA too; but
# for eigvals, of which CUDA leaves open what it does.
RAISING: dict[str, tuple[Callable[[], object], Callable[[], object], str]] = {
    "eigh": (lambda: torch.linalg.eigh(matrix(1)), lambda: torch.linalg.eigh(matrix(NAN)), "failed to converge"),
    "svd": (lambda: torch.linalg.svd(matrix(1)), lambda: torch.linalg.svd(matrix(NAN)), "failed to converge"),
    "eig": (lambda: torch.linalg.eig(matrix(1)), lambda: torch.linalg.eig(matrix(NAN)), "infs or NaNs"),
    "eigvals": (lambda: torch.linalg.eigvals(matrix(1)), lambda: torch.linalg.eigvals(matrix(NAN)), "infs or NaNs"),
    "eigh, out": (
        lambda: torch.linalg.eigh(matrix(1), out=(numbers(0, 0), matrix(0))),
        lambda: torch.linalg.eigh(matrix(NAN), out=(numbers(0, 0), matrix(0))),
        "failed to converge",
    ),
    "cholesky": (lambda: matrix(1).cholesky(), lambda: (-matrix(1)).cholesky(), "positive-definite"),
    "normal": (lambda: torch.normal(0.0, numbers(1, 1)), lambda: torch.normal(0.0, numbers(1, -1)), "std"),
    "histc": (lambda: numbers(1, 2).histc(2), lambda: numbers(1, NAN).histc(2), "not finite"),
    "searchsorted": (
        lambda: torch.searchsorted(numbers(1, 2), numbers(1), sorter=integers(0, 1)),
        lambda: torch.searchsorted(numbers(1, 2), numbers(1), sorter=integers(0, 9)),
        "out of range",
    ),
    "fake_quantize": (lambda: quantized(0), lambda: quantized(999), "zero_point"),
    "segment_reduce": (
        lambda: torch.segment_reduce(numbers(1, 2, 3), "sum", lengths=integers(1, 2)),
        lambda: torch.segment_reduce(numbers(1, 2, 3), "sum", lengths=integers(1, 1)),
        "lengths",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:An output with")
@pytest.mark.parametrize("name", RAISING)
def test_raises_at_the_call(name: str) -> None:
    good, bad, word = RAISING[name]
    good()
    with pytest.raises(RuntimeError, match=word):
        bad()
    good()
    assert numbers(1, 2).sum().item() == 3


def test_only_what_may_raise_waits() -> None:
    """The sleep is far longer than a call that does not."""
    table, order = numbers(1, 2, 3), integers(0, 1, 2)
    calls: dict[str, tuple[Callable[[], object], bool]] = {
        "a sum": (lambda: table + table, False),
        "no sorter": (lambda: torch.searchsorted(table, table), False),
        "a sorter": (lambda: torch.searchsorted(table, table, sorter=order), True),
        "a number": (lambda: torch.normal(table, 0.5), False),
        "deviations": (lambda: torch.normal(0.0, table), True),
    }
    for name, (call, waits) in calls.items():
        call()  # the first of its kind asks
        torch.cuda.synchronize()
        slept = torch.cuda.Event()
        torch.cuda._sleep(2_000_000_000)
        slept.record()
        call()
        assert slept.query() == waits, name
    torch.cuda.synchronize()


CELLS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(2, 3, 3), (1, 2, 8)),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU()), (1, 2, 8, 8)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 3), (1, 2, 8, 8)),
    "lstm cell": (lambda: nn.LSTMCell(4, 4), (2, 4)),
    "gru cell": (lambda: nn.GRUCell(4, 4), (2, 4)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("name", CELLS)
def test_a_trace(name: str) -> None:
    make, shape = CELLS[name]
    torch.manual_seed(0)
    model, x, other = make().cuda(), torch.rand(shape).cuda(), torch.rand(shape).cuda()
    traced = torch.jit.trace(model, x)
    for given in (x, other):
        found, wanted = traced(given), model(given)
        torch.testing.assert_close(found, wanted)
    parts = found if isinstance(found, tuple) else (found,)
    sum(part.sum() for part in parts).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_cell_differentiated_twice() -> None:
    """As a gradient penalty does."""
    torch.manual_seed(0)
    for cell, states in ((nn.LSTMCell(4, 3), 2), (nn.GRUCell(4, 3, bias=False), 1)):
        cell.double().cuda()
        x = torch.rand(2, 4, dtype=torch.float64).cuda().requires_grad_()
        state = [
            torch.rand(2, 3, dtype=torch.float64).cuda().requires_grad_() for _ in range(states)
        ]

        def run(x: Tensor, *state: Tensor, cell: nn.Module = cell, states: int = states) -> Tensor:
            found = cell(x, state if states == 2 else state[0])
            return found[0] if states == 2 else found

        assert torch.autograd.gradgradcheck(run, (x, *state))


def test_attention_by_kernels_that_the_cpu_lacks() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.rand(1, 2, 8, 16).cuda() for _ in range(3))
    wanted = F.scaled_dot_product_attention(q, k, v)
    others = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    for kinds in (*([kind] for kind in others), others, [SDPBackend.FLASH_ATTENTION, *others]):
        with sdpa_kernel(kinds):
            torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), wanted)
            dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
            assert not dropped.equal(wanted)
    mask = torch.ones(8, 8, dtype=torch.bool, device="cuda").tril()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert F.scaled_dot_product_attention(q, k, v, dropout_p=0.5).shape == q.shape
        q3 = q[0]
        with pytest.raises(RuntimeError, match="[Nn]o (viable|available)"):
            F.scaled_dot_product_attention(q3, q3, q3, mask)


def test_numbers_beyond_half() -> None:
    x = torch.tensor([1.0, -2.0], device="cuda", dtype=torch.half)
    for _ in range(2):
        assert x.clamp(min=-1e9).equal(x) and x.clone().clamp_(max=1e6).equal(x)
        assert F.hardtanh(x, -1e6, 1e6).equal(x)
        assert torch.add(x, x, alpha=1e6).tolist() == [torch.inf, -torch.inf]
        assert torch._foreach_clamp_min([x], -1e9)[0].equal(x)
        with pytest.raises(RuntimeError, match="overflow"):
            x.clone().fill_(1e9)


def test_arguments_for_cuda_alone() -> None:
    a = matrix(1)
    assert torch.linalg.svdvals(a, driver="gesvd").equal(torch.linalg.svdvals(a))
    h = torch.rand(3, 3, 3, device="cuda").half()
    assert torch.mm(h[0], h[1], out_dtype=torch.float32).equal(h[0].float() @ h[1].float())
    assert torch.bmm(h, h, out_dtype=torch.float32).dtype == torch.float32
    full = torch.addmm(h[2], h[0], h[1], beta=2, out_dtype=torch.float32)
    torch.testing.assert_close(full, 2 * h[2].float() + h[0].float() @ h[1].float())


def test_lists_on_several_devices() -> None:
    parts = [torch.ones(2, device="cuda"), torch.ones(2), torch.ones(2, device="cuda:1")]
    found = torch._foreach_mul(parts, 2.0)
    assert [(t.device, t.tolist()) for t in found] == [(t.device, [2, 2]) for t in parts]
    torch._foreach_add_(parts, found)
    assert [t.tolist() for t in parts] == [[3, 3]] * 3


def test_a_window_of_the_hosts() -> None:
    for words in ({}, {"periodic": False}, {"periodic": False, "beta": 3.0}):
        found = torch.kaiser_window(7, device="cuda", **words)
        assert found.is_cuda and found.cpu().equal(torch.kaiser_window(7, **words))


def test_what_is_refused_by_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(NotImplementedError, match="no quantized tensors on the device"):
            torch.quantize_per_tensor(numbers(1, 2), 0.1, 0, torch.qint8)
    with pytest.raises(
        NotImplementedError, match="_fused_dropout has no kernel on the software GPU"
    ):
        torch._fused_dropout(numbers(1, 2), 0.5)
    assert numbers(1, 2).sum().item() == 3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors() -> None:
    parts = [torch.ones(2, 8, device="cuda"), torch.ones(4, 8, device="cuda", requires_grad=True)]
    for make in (torch.nested.nested_tensor, torch.nested.as_nested_tensor):
        with pytest.raises(NotImplementedError, match="no nested tensors on the device"):
            make(parts)
    found = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    (found * 2).values().sum().backward()
    assert parts[1].grad is not None and parts[1].grad.unique().tolist() == [2]


@pytest.mark.parametrize("kind", ["linalg", "blas"])
def test_a_preferred_library(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    prefer = getattr(torch.backends.cuda, f"preferred_{kind}_library")
    try:
        for name in ("magma", "cusolver") if kind == "linalg" else ("cublaslt", "cublas"):
            prefer(name)
            assert torch.linalg.inv(matrix(1)).matmul(matrix(1)).trace().item() == pytest.approx(4)
    finally:
        prefer("default")


def test_the_time_between_events() -> None:
    for timing, word in ((True, "must be recorded"), (False, "enable_timing=True")):
        one, two = (torch.cuda.Event(enable_timing=timing) for _ in range(2))
        if not timing:
            one.record()
            two.record()
            torch.cuda.synchronize()
        with pytest.raises(RuntimeError, match=word):
            one.elapsed_time(two)


BLOCKING = """
import torch
x = torch.arange(4, device="cuda")
x[torch.tensor([1], device="cuda")]
torch.cuda.synchronize()
index = torch.tensor([9], device="cuda")
where = "before"
try:
    y = x[index]
    where = "after"
    torch.cuda.synchronize()
except RuntimeError as error:
    assert "device-side assert" in str(error), error
    print(where)
"""


@pytest.mark.parametrize(("value", "where"), [("1", "before"), ("0", "after")])
def test_launch_blocking(value: str, where: str) -> None:
    env = os.environ | {"CUDA_LAUNCH_BLOCKING": value}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKING], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == [where], done.stderr


def test_values_that_a_kernel_asserts() -> None:
    program = """
import torch
torch.bernoulli(torch.tensor([0.5], device="cuda"))
torch.cuda.synchronize()
torch.bernoulli(torch.tensor([1.5], device="cuda"))
torch.cuda.synchronize()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert "device-side assert triggered" in done.stderr, done.stderr
