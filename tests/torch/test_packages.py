# SPDX-License-Identifier: Apache-2.0
"""Ops of other packages, which the server has not loaded: their CPU kernels run in the job; what has none is refused by name."""

from __future__ import annotations

import queue

import pytest
import torch
import torch.multiprocessing as mp

LIBRARY = torch.library.Library("devproxy_test", "DEF")
LIBRARY.define("keep(Tensor boxes, float least) -> Tensor")
LIBRARY.impl("keep", lambda boxes, least: (boxes > least).nonzero().flatten(), "CPU")
LIBRARY.define("add_one_(Tensor(a!) x) -> Tensor(a!)")
LIBRARY.impl("add_one_", lambda x: x.add_(1), "CPU")
LIBRARY.define("both(Tensor[] xs) -> (Tensor, Tensor)")
LIBRARY.impl("both", lambda xs: (xs[0] + xs[1], xs[0] * xs[1]), "CPU")
LIBRARY.define("nothing(Tensor x) -> Tensor")
ops = torch.ops.devproxy_test


def test_a_cpu_kernel_of_a_package_runs_in_the_job(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.tensor([1.0, 2.0, 3.0], device="cuda")
    for _ in range(2):
        kept = ops.keep(x, 1.5)
    assert kept.is_cuda
    assert kept.tolist() == [1, 2]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert ops.keep(x * 2, 3.0).tolist() == [1, 2]
    assert ops.add_one_(x).data_ptr() == x.data_ptr()
    assert x.tolist() == [2.0, 3.0, 4.0]
    total, product = ops.both([x, x])
    assert (total.tolist(), product.tolist()) == ([4.0, 6.0, 8.0], [4.0, 9.0, 16.0])
    assert capfd.readouterr().err.count("devproxy_test::keep is in no library of the server") == 1


def test_gradients_go_through_it() -> None:
    @torch.library.custom_op("devproxy_test::cube", mutates_args=(), device_types="cpu")
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x**3

    cube.register_autograd(
        lambda ctx, gradient: gradient * 3 * ctx.saved_tensors[0] ** 2,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    x = torch.tensor([2.0], device="cuda", requires_grad=True)
    cube(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [12.0]


def test_an_op_without_any_kernel_is_refused_by_name() -> None:
    x = torch.ones(2, device="cuda")
    with pytest.raises(NotImplementedError, match="devproxy_test::nothing.*no such op"):
        ops.nothing(x)
    assert x.sum().item() == 2


def test_a_tensor_for_another_process_is_refused_by_name() -> None:
    context = mp.get_context("spawn")
    x = torch.ones(2, device="cuda")
    assert x.share_memory_() is x  # nothing to do, as on CUDA
    process = context.Process(target=queue.Queue, args=(x,))
    with pytest.raises(RuntimeError, match="CUDA IPC.*tensor.cpu()"):
        process.start()
    with pytest.raises(RuntimeError, match="shared between processes"):
        torch.cuda.Event(interprocess=True)
