# SPDX-License-Identifier: Apache-2.0
"""What scripts do with torch.cuda, by behaviour."""

from __future__ import annotations

import copy
import ctypes
import io
import os
import pickle
import subprocess
import sys
import textwrap
import time
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def equal(a: Tensor, b: Tensor) -> bool:
    """A device tensor and its CPU reference have the same values."""
    assert b.is_cuda
    return torch.equal(a, b.cpu())


# -- devices ---------------------------------------------------------------------------------------------------------


def test_device_says_what_it_is() -> None:
    assert torch.cuda.is_available()
    assert torch.version.cuda == "13.0"
    properties = torch.cuda.get_device_properties(0)
    assert properties.total_memory > 1 << 20
    assert torch.cuda.get_device_capability() == (properties.major, properties.minor)
    assert torch.cuda.get_device_name() == properties.name
    assert "total_memory" in repr(properties)
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.accelerator.device_count() == torch.cuda.device_count()


def test_unknown_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(1, device=f"cuda:{torch.cuda.device_count()}")


def test_mixing_devices_raises() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="cuda") + torch.ones(2)
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, 2, device="cuda").gather(0, torch.zeros(2, 2, dtype=torch.long))


def test_second_device_and_peer_copies(two_devices: None) -> None:
    torch.cuda.set_device(1)
    try:
        assert torch.empty(1, device="cuda").device.index == 1
    finally:
        torch.cuda.set_device(0)
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
        x = torch.arange(6.0, device="cuda").view(2, 3)
    assert x.device.index == 1
    assert torch.cuda.current_device() == 0
    assert isinstance(torch.cuda.can_device_access_peer(0, 1), bool)
    y = x.to("cuda:0")
    assert y.device.index == 0
    assert y.tolist() == x.tolist()
    assert x.t().to("cuda:0", torch.int64).tolist() == [[0, 3], [1, 4], [2, 5]]
    with pytest.raises(RuntimeError, match="same device"):
        x + y


def test_data_parallel(two_devices: None) -> None:
    """transformers.Trainer takes it where there are several GPUs. The oracle does the halves one after the other."""
    torch.manual_seed(3)
    alone = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    both = nn.DataParallel(copy.deepcopy(alone).to("cuda:0"))
    x = torch.rand(10, 6)
    halves = [alone(half) for half in x.chunk(2)]
    for inputs in (x, x.to("cuda:0")):
        y = both(inputs)
        assert y.device.index == 0
        assert equal(torch.cat(halves), y)
    y.square().sum().backward()
    torch.cat(halves).square().sum().backward()
    for mine, theirs in zip(alone.parameters(), both.parameters()):
        assert torch.allclose(mine.grad, theirs.grad.cpu(), rtol=1e-6, atol=1e-6)


def test_comm(two_devices: None) -> None:
    from torch.nn.parallel import comm

    x = torch.arange(12.0).reshape(6, 2)
    first, second = comm.scatter(x, [0, 1], [4, 2])
    assert (first.device.index, second.device.index) == (0, 1)
    assert equal(x[:4], first) and equal(x[4:], second)
    assert equal(x, comm.gather([first, second], destination=1))
    assert torch.equal(x, comm.gather([first, second], out=torch.empty(6, 2)))
    out = [torch.empty(3, 2, device=f"cuda:{i}") for i in (0, 1)]
    assert equal(x[3:], comm.scatter(x.cuda(), out=out)[1])
    assert [t.device.index for t in comm.broadcast(x.cuda(), [0, 1])] == [0, 1]
    assert equal(x[:3], comm.broadcast(x[:3].cuda(), out=out)[1])
    assert equal(x + x, comm.reduce_add([x.to("cuda:0"), x.to("cuda:1")]))


def test_backward_runs_on_each_device(two_devices: None) -> None:
    a = nn.Linear(4, 4).to("cuda:0")
    b = nn.Linear(4, 4).to("cuda:1")
    b(a(torch.ones(2, 4, device="cuda:0")).to("cuda:1")).sum().backward()
    assert a.weight.grad.device.index == 0
    assert b.weight.grad.device.index == 1


# -- tensors ---------------------------------------------------------------------------------------------------------

FACTORIES = {
    "empty": lambda: torch.empty(2, 3, device="cuda"),
    "zeros": lambda: torch.zeros(2, device="cuda"),
    "full": lambda: torch.full((2,), 3.0, device="cuda"),
    "arange": lambda: torch.arange(10, device="cuda"),
    "linspace": lambda: torch.linspace(0, 1, 5, device="cuda"),
    "eye": lambda: torch.eye(3, device="cuda"),
    "randn": lambda: torch.randn(3, device="cuda"),
    "randint": lambda: torch.randint(0, 9, (4,), device="cuda"),
    "randperm": lambda: torch.randperm(8, device="cuda"),
    "tensor": lambda: torch.tensor([1.0, 2], device="cuda"),
    "tril_indices": lambda: torch.tril_indices(3, 3, device="cuda"),
    "complex": lambda: torch.zeros(2, dtype=torch.complex64, device="cuda"),
    "empty of nothing": lambda: torch.empty(0, 3, device="cuda"),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factory_makes_a_device_tensor(name: str) -> None:
    t = FACTORIES[name]()
    assert t.is_cuda
    assert t.cpu().shape == t.shape


VIEWS = {
    "transpose": lambda x: x.transpose(0, 1),
    "slice": lambda x: x[:, 1:],
    "select": lambda x: x[1],
    "expand": lambda x: x[..., None].expand(2, 3, 4, 5),
    "permute": lambda x: x.permute(2, 0, 1),
    "unfold": lambda x: x.unfold(2, 2, 1),
    "view_as_complex": lambda x: torch.view_as_complex(x.reshape(2, 3, 2, 2)),
    "diagonal": lambda x: x.diagonal(dim1=1, dim2=2),
    "chunk": lambda x: x.chunk(2, 2)[1],
    "flatten": lambda x: x.flatten(),
    "strided": lambda x: x.view(-1)[::2],
    "as_strided": lambda x: x.as_strided((2, 2), (1, 2), 3),
    "other type": lambda x: x.view(torch.int32),
    "unbind": lambda x: x.unbind(1)[2],
    "mT": lambda x: x.mT,
}


@pytest.mark.parametrize("name", VIEWS)
def test_view_shares_storage(name: str) -> None:
    a = torch.arange(24.0).view(2, 3, 4)
    b = a.cuda()
    u, v = VIEWS[name](a), VIEWS[name](b)
    assert (u.stride(), u.storage_offset()) == (v.stride(), v.storage_offset())
    assert equal(u, v)
    assert v.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


INDEX = torch.tensor([0, 3, 1])
OPS = {
    "mask": lambda x: x[x > 0],
    "index": lambda x: x[INDEX.to(x.device)],
    "host index": lambda x: x[:, INDEX],
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "masked_select": lambda x: x.masked_select(x < 0),
    "unique": lambda x: torch.unique((x * 2).int(), return_counts=True, return_inverse=True),
    "topk": lambda x: x.topk(2),
    "sort": lambda x: x.sort(1),
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x]),
    "scatter_": lambda x: torch.zeros(5, 6, device=x.device).scatter_(
        1, torch.ones(5, 1, dtype=torch.long, device=x.device), x
    ),
    "index_add": lambda x: x.clone().index_add_(
        0, INDEX.to(x.device), torch.ones(3, 6, device=x.device)
    ),
    "index_put": lambda x: x.clone().index_put_(
        (INDEX.to(x.device),), torch.ones(6, device=x.device), True
    ),
    "max": lambda x: x.max(1),
    "std": lambda x: x.std(),
    "bincount": lambda x: torch.bincount((x.abs() * 3).int().flatten()),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "svd": lambda x: torch.linalg.svd(x)[1],
    "solve": lambda x: torch.linalg.solve(x[:, :5] @ x[:, :5].T + torch.eye(5, device=x.device), x),
    "rfft": lambda x: torch.fft.rfft(x),
    "quantile": lambda x: x.quantile(0.5),
    "repeat_interleave": lambda x: torch.repeat_interleave(
        x, torch.tensor([1, 2, 0, 1, 3], device=x.device), 0
    ),
    "one_hot": lambda x: F.one_hot((x > 0).long()),
    "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
    "cdist": lambda x: torch.cdist(x, x),
    "embedding_bag": lambda x: F.embedding_bag(
        torch.tensor([0, 1, 2], device=x.device), x, torch.tensor([0, 2], device=x.device)
    ),
    "ctc_loss": lambda x: F.ctc_loss(
        x[:, None].log_softmax(2),
        torch.tensor([[1, 2]], device=x.device),
        torch.tensor([5]),
        torch.tensor([2]),
    ),
    "half": lambda x: x.half().float(),
    "bfloat16 mm": lambda x: x.bfloat16() @ x.bfloat16().T,
    "conj": lambda x: torch.complex(x, x).conj() @ torch.complex(x, -x).T,
    "in place": lambda x: x.clone().mul_(2).add_(x).clamp_(min=0),
    "allclose": lambda x: torch.tensor(torch.allclose(x, x.clone())),
}


@pytest.mark.parametrize("name", OPS)
def test_op_equals_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    a = torch.randn(5, 6)
    mine, theirs = OPS[name](a), OPS[name](a.cuda())
    if isinstance(mine, Tensor):
        mine, theirs = (mine,), (theirs,)
    for u, v in zip(mine, theirs, strict=True):
        assert torch.equal(u.resolve_conj(), v.cpu().resolve_conj())


def test_values_leave_the_device() -> None:
    t = torch.arange(6.0, device="cuda").view(2, 3)
    assert t.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert "cuda:0" in repr(t)
    assert f"{t[0, 1]:.2f}" == "1.00"
    assert (float(t[0, 1]), int(t[1, 1]), bool(t[0, 0])) == (1.0, 4, False)
    assert torch.complex(t, t).conj()[0, 1].item() == 1 - 1j
    with pytest.raises(TypeError, match="convert cuda:0 device type tensor to numpy"):
        t.numpy()


COPIES = [
    (lambda x: x, torch.float32),
    (lambda x: x.t(), torch.float32),
    (lambda x: x[:, ::2], torch.float32),
    (lambda x: x[:1].expand(5, 6), torch.float32),
    (lambda x: x, torch.float64),
    (lambda x: x.t()[1:], torch.int32),
]


@pytest.mark.parametrize("view,dtype", COPIES)
def test_copies_both_ways(view: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a = torch.randn(5, 6) * 9
    assert equal(view(a).to(dtype), view(a).to("cuda", dtype))
    assert torch.equal(view(a).to(dtype), view(a.cuda()).to("cpu", dtype))
    out = torch.zeros(view(a).shape, device="cuda").t().contiguous().t()
    out.copy_(view(a))
    assert equal(view(a), out)
    back = torch.zeros(view(a).shape).t().contiguous().t()
    back.copy_(view(a.cuda()))
    assert torch.equal(view(a), back)


def test_complex_copies_keep_conjugation() -> None:
    a = torch.randn(3, 4, dtype=torch.complex64)
    assert torch.equal(a.conj(), a.conj().cuda().cpu())
    assert torch.equal(a.conj(), a.cuda().conj().cpu())
    assert torch.equal(a.imag.neg(), a.cuda().conj().imag.cpu())
    out = torch.zeros(3, 4, dtype=torch.complex64, device="cuda")
    out.copy_(a.conj())
    assert equal(a.conj().resolve_conj(), out)


def test_broadcasting_copy_that_does_not_fit_raises() -> None:
    with pytest.raises(RuntimeError, match="expanded size|must match"):
        torch.zeros(3, device="cuda").copy_(torch.ones(2))


# -- out=, storage, errors -------------------------------------------------------------------------------------------


def test_out_of_another_size_is_resized_as_on_the_cpu() -> None:
    for shape in ((0,), (5,), (2, 2), (3, 1)):
        mine, theirs = torch.empty(shape), torch.empty(shape, device="cuda")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.mm(torch.ones(2, 3), torch.ones(3, 2), out=mine)
            expected = len(seen)
            torch.mm(torch.ones(2, 3, device="cuda"), torch.ones(3, 2, device="cuda"), out=theirs)
        assert theirs.shape == mine.shape
        assert equal(mine, theirs)
        assert len(seen) == 2 * expected


def test_out_of_ops_without_a_shape_function() -> None:
    a = torch.randn(4, 5)
    mine, theirs = torch.empty(0), torch.empty(0, device="cuda")
    torch.nanmedian(a, 1, out=(mine, torch.empty(0, dtype=torch.long)))
    torch.nanmedian(a.cuda(), 1, out=(theirs, torch.empty(0, dtype=torch.long, device="cuda")))
    assert equal(mine, theirs)
    mine, theirs = torch.full((7,), 1.0), torch.full((7,), 1.0, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.diag(a, out=mine)
        torch.diag(a.cuda(), out=theirs)
    assert equal(mine, theirs)


def test_out_of_the_wrong_type_raises() -> None:
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(
            torch.ones(2, device="cuda"), 0.5, out=torch.empty(2, dtype=torch.int32, device="cuda")
        )


def test_resize_set_and_storage() -> None:
    x = torch.ones(4, device="cuda")
    x.resize_(8)
    assert x.shape == (8,)
    assert x[:4].tolist() == [1, 1, 1, 1]
    z = torch.empty(0, device="cuda").set_(x)
    assert z.data_ptr() == x.data_ptr()
    assert x.untyped_storage().size() == 32
    assert torch.UntypedStorage(16, device="cuda").nbytes() == 16
    y = torch.zeros(2, device="cuda")
    y.data = torch.ones(3, device="cuda")
    assert y.tolist() == [1, 1, 1]


def test_bad_arguments_are_exceptions_and_the_device_lives_on() -> None:
    a = torch.ones(2, 3, device="cuda")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        a @ a
    with pytest.raises(RuntimeError, match="must match the size"):
        a + torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError):
        a.index_add_(0, torch.tensor([0], device="cuda"), torch.ones(1, 4, device="cuda"))
    with pytest.raises(RuntimeError):
        a.masked_fill_(torch.ones(5, dtype=torch.bool, device="cuda"), 1.0)
    with pytest.raises(IndexError):
        a.sum(dim=7)
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.cholesky(-torch.eye(3, device="cuda"))
    assert a.sum().item() == 6


def test_index_out_of_range_breaks_the_context_as_on_cuda() -> None:
    program = """
        import torch
        x = torch.ones(4, device="cuda")
        i = torch.tensor([0, 1], device="cuda")
        x.index_select(0, i)
        x.index_select(0, i + 9)
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            assert "CUDA error: device-side assert triggered" in str(error), error
            assert isinstance(error, torch.AcceleratorError), type(error)
        else:
            raise SystemExit("no error")
        try:
            torch.ones(1, device="cuda")
        except RuntimeError as error:
            assert "device-side assert" in str(error), error
        else:
            raise SystemExit("the context is not broken")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# -- memory ----------------------------------------------------------------------------------------------------------


def test_memory_is_accounted() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    x = torch.empty(1 << 20, device="cuda")
    assert torch.cuda.memory_allocated() == before + (4 << 20)
    y = torch.empty(1, device="cuda")
    assert torch.cuda.memory_allocated() == before + (4 << 20) + 512
    del x
    assert torch.cuda.memory_allocated() == before + 512
    assert torch.cuda.max_memory_allocated() >= before + (4 << 20) + 512
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == before + 512
    del y
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
    assert "Allocated memory" in torch.cuda.memory_summary()
    assert torch.cuda.memory_stats()["allocation.all.current"] >= 0
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total == torch.cuda.get_device_properties(0).total_memory


def test_freed_memory_is_held_until_empty_cache() -> None:
    """As by torch's own allocators; the driver's pool holds it, so nothing asks the server in each step."""
    cuda = ctypes.CDLL("libcuda.so.1")
    pool = ctypes.c_void_p()
    assert cuda.cuDeviceGetDefaultMemPool(ctypes.byref(pool), 0) == 0

    def held() -> int:
        reserved, used = ctypes.c_uint64(), ctypes.c_uint64()
        assert cuda.cuMemPoolGetAttribute(pool, 5, ctypes.byref(reserved)) == 0
        assert cuda.cuMemPoolGetAttribute(pool, 7, ctypes.byref(used)) == 0
        return reserved.value - used.value

    free = torch.cuda.mem_get_info()[0]
    for _ in range(3):  # that the GPU has room is known from the second time on
        blocks = [torch.empty(20 << 20, dtype=torch.uint8, device="cuda") for _ in range(16)]
        del blocks
    torch.cuda.synchronize()
    assert held() > 200 << 20
    assert torch.cuda.mem_get_info()[0] >= free
    torch.cuda.empty_cache()
    assert held() == 0


def test_out_of_memory_is_raised_at_the_call() -> None:
    before = torch.cuda.memory_allocated()
    with pytest.raises(
        torch.cuda.OutOfMemoryError,
        match="CUDA out of memory. Tried to allocate 1024.00 GiB. GPU 0",
    ):
        torch.empty(1 << 38, device="cuda")
    assert torch.cuda.memory_allocated() == before
    assert torch.ones(2, device="cuda").sum().item() == 2


def test_memory_fraction_limits() -> None:
    torch.cuda.set_per_process_memory_fraction(1e-5)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(64 << 20, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_pinned_memory() -> None:
    x = torch.randn(1000).pin_memory()
    assert x.is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert not torch.ones(2).is_pinned()
    y = x.to("cuda", non_blocking=True)
    back = torch.empty(1000, pin_memory=True)
    back.copy_(y, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(x, back)


def test_pinned_blocks_are_not_reused_before_their_copies_are_done() -> None:
    ones = [
        torch.ones(1 << 16, pin_memory=True).mul_(i).to("cuda", non_blocking=True)
        for i in range(20)
    ]
    assert [t[-1].item() for t in ones] == list(range(20))


# -- streams and events ----------------------------------------------------------------------------------------------


def test_streams_and_events() -> None:
    stream = torch.cuda.Stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        b = torch.ones(200, 200, device="cuda") @ torch.ones(200, 200, device="cuda")
        end.record(stream)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.current_stream().wait_stream(stream)
    assert b.sum().item() == 200**3
    b.record_stream(torch.cuda.current_stream())
    end.synchronize()
    assert end.query() and stream.query()
    assert start.elapsed_time(end) > 0
    assert stream.cuda_stream != 0 and torch.cuda.default_stream().cuda_stream == 0
    assert torch.cuda.ExternalStream(stream.cuda_stream).cuda_stream == stream.cuda_stream
    assert torch.cuda.Stream(priority=-1).priority == -1
    assert "cuda_stream" in repr(stream) and "Event" in repr(start)


def test_work_on_many_streams_is_ordered_by_events() -> None:
    streams = [torch.cuda.Stream() for _ in range(4)]
    x = torch.zeros(1 << 14, device="cuda")
    for turn in range(40):
        stream = streams[turn % 4]
        stream.wait_stream(torch.cuda.current_stream() if turn == 0 else streams[(turn - 1) % 4])
        with torch.cuda.stream(stream):
            x.mul_(2).add_(1).remainder_(1000)
    torch.cuda.synchronize()
    expected = 0
    for _ in range(40):
        expected = (expected * 2 + 1) % 1000
    assert x.unique().tolist() == [expected]


def test_freed_memory_of_a_recorded_stream_is_not_reused_early() -> None:
    side = torch.cuda.Stream()
    results = []
    for i in range(30):
        x = torch.full((1 << 14,), float(i), device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x.sqrt().square().sum()
        x.record_stream(side)
        y.record_stream(torch.cuda.current_stream())
        del x
        torch.full((1 << 14,), -1.0, device="cuda")
        results.append(y)
    torch.cuda.synchronize()
    for i, y in enumerate(results):
        assert y.item() == pytest.approx(i * (1 << 14), rel=1e-5)


# -- random numbers --------------------------------------------------------------------------------------------------


def test_random_numbers_follow_the_generator() -> None:
    torch.manual_seed(5)
    a = torch.randn(4, device="cuda")
    torch.cuda.manual_seed_all(5)
    assert torch.equal(a, torch.randn(4, device="cuda"))
    state = torch.cuda.get_rng_state()
    assert state.shape == (16,)
    c = torch.randn(4, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(c, torch.randn(4, device="cuda"))
    g = torch.Generator(device="cuda").manual_seed(3)
    d = torch.rand(3, device="cuda", generator=g)
    assert torch.equal(d, torch.rand(3, device="cuda", generator=g.manual_seed(3)))
    with torch.random.fork_rng(devices=[0]):
        torch.randn(1, device="cuda")
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device="cuda", generator=torch.Generator())


def test_random_numbers_follow_the_documented_mix() -> None:
    from mix import mix_seed

    torch.manual_seed(11)
    on_device = [torch.randn(7, device="cuda") for _ in range(3)]
    for i, t in enumerate(on_device):
        torch.manual_seed(mix_seed(11, 4 * i))
        assert equal(torch.randn(7), t)


def test_dropout_draws_anew_each_time() -> None:
    ones = torch.ones(1000, device="cuda")
    torch.manual_seed(1)
    a, b = F.dropout(ones), F.dropout(ones)
    torch.manual_seed(1)
    assert torch.equal(a, F.dropout(ones))
    assert not torch.equal(a, b)
    assert 300 < (a == 0).sum().item() < 700


# -- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"foreach": True}, {"fused": True}, {"foreach": False}, {"capturable": True}]
)
def test_adamw_equals_the_cpu(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    mine = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 2))
    theirs = copy.deepcopy(mine).cuda()
    reference = {k: v for k, v in options.items() if k != "capturable"}
    for model, given in ((mine, reference), (theirs, options)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **given)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            x = torch.randn(4, 8, generator=generator).to(next(model.parameters()).device)
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    for p, q in zip(mine.state_dict().values(), theirs.state_dict().values(), strict=True):
        if "capturable" in options:
            assert torch.allclose(
                p, q.cpu(), atol=1e-5
            )  # keeps its step count on the device: other arithmetic
        else:
            assert equal(p, q)


@pytest.mark.parametrize(
    "name", ["SGD", "Adam", "RMSprop", "Adagrad", "Adadelta", "NAdam", "RAdam", "Adamax"]
)
def test_optimizer_steps(name: str) -> None:
    model = nn.Linear(4, 4).cuda()
    before = model.weight.detach().clone()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight)


def test_autograd() -> None:
    x = torch.randn(4, 5, device="cuda", requires_grad=True)
    (x.sin() * x).sum().backward()
    c = x.detach().cpu().requires_grad_()
    (c.sin() * c).sum().backward()
    assert equal(c.grad, x.grad)
    (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    g.sum().backward()


LAYERS = {
    "conv2d": (lambda: nn.Conv2d(3, 8, 3), (2, 3, 8, 8)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3), (2, 3, 9)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2), (1, 1, 4, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3), (2, 3, 5, 5)),
    "batch norm": (lambda: nn.BatchNorm2d(3), (2, 3, 4, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3, 3)),
    "lstm": (lambda: nn.LSTM(4, 5, 2), (6, 2, 4)),
    "lstm, both ways, projected": (
        lambda: nn.LSTM(4, 5, bidirectional=True, proj_size=3),
        (6, 2, 4),
    ),
    "lstm without bias": (lambda: nn.LSTM(4, 5, bias=False, batch_first=True), (6, 2, 4)),
    "lstm cell": (lambda: nn.LSTMCell(4, 5), (2, 4)),
    "gru": (lambda: nn.GRU(4, 5, 2, bidirectional=True), (6, 2, 4)),
    "gru cell": (lambda: nn.GRUCell(4, 5), (2, 4)),
    "rnn": (lambda: nn.RNN(4, 5), (6, 2, 4)),
    "transformer": (lambda: nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0), (5, 2, 16)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_the_cpu_forward_and_backward(name: str) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    mine = make()
    theirs = copy.deepcopy(mine).cuda()
    x = torch.randn(shape)
    a, b = x.clone().requires_grad_(), x.cuda().requires_grad_()
    u, v = mine(a), theirs(b)
    u, v = (u[0], v[0]) if isinstance(u, tuple) else (u, v)
    assert equal(u, v)
    u.sin().sum().backward()
    v.sin().sum().backward()
    assert equal(a.grad, b.grad)
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert equal(p.grad, q.grad)
    with torch.inference_mode():
        w = theirs(x.cuda())
        assert (w[0] if isinstance(w, tuple) else w).is_cuda


def test_packed_sequences() -> None:
    torch.manual_seed(0)
    mine = nn.LSTM(4, 5)
    theirs = copy.deepcopy(mine).cuda()
    x = torch.randn(6, 3, 4)
    lengths = torch.tensor([6, 4, 1])
    out = []
    for model, data in ((mine, x), (theirs, x.cuda())):
        packed, _ = model(nn.utils.rnn.pack_padded_sequence(data, lengths))
        padded, _ = nn.utils.rnn.pad_packed_sequence(packed)
        padded.sin().sum().backward()
        out.append(padded)
    assert equal(out[0], out[1])
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert equal(p.grad, q.grad)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_attention_equals_the_cpu(causal: bool, mask: str | None) -> None:
    if causal and mask:
        pytest.skip("torch does not take both")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 16, 8) for _ in range(3))
    m = None if mask is None else torch.rand(16, 16) > 0.3
    if mask == "float":
        m = torch.randn(16, 16)
    results = []
    for device in ("cpu", "cuda"):
        inputs = [t.to(device).detach().requires_grad_() for t in (q, k, v)]
        y = F.scaled_dot_product_attention(
            *inputs, attn_mask=None if m is None else m.to(device), is_causal=causal
        )
        y.sin().sum().backward()
        results.append([y, *[t.grad for t in inputs]])
    for a, b in zip(*results, strict=True):
        assert equal(a, b)


class Asked(Tensor):
    """A wrapper as DTensor is: each op passes it, and one that it does not know is an error."""

    inner: Tensor
    ops: list[str] = []

    @staticmethod
    def __new__(cls, inner: Tensor) -> Asked:
        made: Asked = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Asked.ops.append(str(op))
        if "sdp_choice" in str(op):
            raise NotImplementedError(f"{op} does not have a sharding strategy registered")
        args, kwargs = torch.utils._pytree.tree_map_only(
            Asked, lambda t: t.inner, (args, kwargs or {})
        )
        return torch.utils._pytree.tree_map_only(Tensor, Asked, op(*args, **kwargs))


@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_a_wrapped_tensor(masked: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 16, 8, device="cuda", requires_grad=True) for _ in range(3))
    mask = torch.randn(16, 16, device="cuda") if masked else None
    Asked.ops.clear()
    y = F.scaled_dot_product_attention(
        *(Asked(t.detach()) for t in (q, k, v)),
        attn_mask=None if mask is None else Asked(mask),
        is_causal=not masked,
    )
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not masked)
    assert isinstance(y, Asked)
    flash = "aten._scaled_dot_product_flash_attention.default"
    assert (flash in Asked.ops) is not masked
    torch.testing.assert_close(y.inner, wanted)


def test_flash_attention_by_its_name() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 16, 8, device="cuda", requires_grad=True) for _ in range(3))
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]
    assert torch.equal(found, wanted)
    for a, b in zip(
        *(torch.autograd.grad(y.sin().sum(), (q, k, v)) for y in (found, wanted)), strict=True
    ):
        assert torch.equal(a, b)


def test_autocast_and_grad_scaler() -> None:
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(3):
        with torch.autocast("cuda"):
            y = model(torch.randn(4, 8, device="cuda"))
            loss = F.mse_loss(y, torch.zeros_like(y))
        assert y.dtype == torch.float16
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() > 0
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert model(torch.randn(4, 8, device="cuda")).dtype == torch.bfloat16


def test_functional_transforms() -> None:
    from torch.utils.checkpoint import checkpoint

    model = nn.Linear(4, 4).cuda()
    x = torch.randn(2, 4, device="cuda", requires_grad=True)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert torch.func.vmap(model)(x).is_cuda
    parameters = dict(model.named_parameters())
    grads = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(parameters)
    assert grads["weight"].is_cuda


def test_compile_with_the_eager_backend() -> None:
    model = torch.compile(nn.Linear(3, 3).cuda(), backend="eager")
    model(torch.randn(2, 3, device="cuda")).sum().backward()


# -- around ----------------------------------------------------------------------------------------------------------


def test_save_load_and_pickle() -> None:
    model = nn.Linear(3, 3).cuda()
    file = io.BytesIO()
    torch.save({"m": model.state_dict(), "t": torch.ones(2, device="cuda")}, file)
    file.seek(0)
    assert torch.load(file)["t"].is_cuda
    file.seek(0)
    assert torch.load(file, map_location="cpu")["t"].device.type == "cpu"
    assert equal(model.weight.cpu(), copy.deepcopy(model).weight)
    assert pickle.loads(pickle.dumps(torch.ones(2, device="cuda"))).is_cuda
    model.load_state_dict({k: v.cpu() for k, v in model.state_dict().items()})


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader(workers: int) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.arange(32))
    torch.ones(1, device="cuda")  # the workers are forked from a process that has used the device
    seen = []
    for a, b in torch.utils.data.DataLoader(
        data, batch_size=8, pin_memory=True, num_workers=workers
    ):
        assert a.is_pinned()
        assert a.cuda(non_blocking=True).is_cuda
        seen += b.tolist()
    assert seen == list(range(32))


def test_forked_child_may_not_use_the_device() -> None:
    program = """
        import os, torch
        torch.ones(1, device="cuda")
        child = os.fork()
        if child == 0:
            try:
                torch.ones(1, device="cuda")
            except RuntimeError as error:
                os._exit(0 if "forked subprocess" in str(error) else 2)
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.ones(2, device="cuda").sum().item() == 2
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_legacy_tensor_types() -> None:
    x = torch.cuda.FloatTensor(2, 3)
    assert x.is_cuda and x.shape == (2, 3)
    assert x.type() == "torch.cuda.FloatTensor"
    assert isinstance(x, torch.cuda.FloatTensor)
    assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2]
    assert x.new(2).is_cuda
    torch.set_default_device("cuda")
    try:
        assert torch.ones(1).is_cuda
    finally:
        torch.set_default_device("cpu")


@pytest.mark.parametrize(
    "name",
    ["Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"],
)
def test_type_by_a_legacy_class(name: str) -> None:
    kind = getattr(torch.cuda, f"{name}Tensor")
    x = torch.ones(2, 3).type(kind)
    assert x.is_cuda and x.dtype == kind.dtype and isinstance(x, kind)
    assert x.type() == f"torch.cuda.{name}Tensor" == f"{kind.__module__}.{kind.__name__}"
    assert torch.ones(2, 3).type(x.type()).is_cuda
    back = x.type(getattr(torch, f"{name}Tensor"))
    assert not back.is_cuda and not isinstance(back, kind)
    assert pickle.loads(pickle.dumps(kind)) is kind
    assert kind(x).data_ptr() == x.data_ptr()
    with pytest.raises(TypeError, match=f"expected torch.cuda.{name}Tensor"):
        kind(back)


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_default_tensor_type() -> None:
    for kind in ("torch.cuda.DoubleTensor", torch.cuda.DoubleTensor):
        torch.set_default_tensor_type(kind)
        try:
            made = [torch.zeros(2), torch.Tensor(2, 3), torch.Tensor([1, 2]), torch.tensor([1.0])]
            made += [nn.Linear(2, 2).weight, nn.Parameter(torch.Tensor(3))]
            assert {t.type() for t in made} == {"torch.cuda.DoubleTensor"}
            assert torch.ones(2, device="cpu").type() == "torch.DoubleTensor"
        finally:
            torch.set_default_tensor_type("torch.FloatTensor")
        assert {torch.zeros(2).type(), torch.Tensor(2).type()} == {"torch.FloatTensor"}
    with pytest.raises(TypeError, match="only floating-point types"):
        torch.set_default_tensor_type(torch.cuda.LongTensor)


def test_what_is_missing_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match="conditional node of a CUDA graph is not supported"):
        torch.cuda.CUDAGraph().begin_capture_to_if_node(torch.ones(1, device="cuda"))
    with pytest.raises(RuntimeError, match="not supported behind devproxy"):
        torch.cuda.Event(interprocess=True)
    assert not torch.backends.cudnn.is_available()
    assert torch.backends.cuda.is_built()


def test_profiler_and_snapshot_do_not_fail() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = torch.ones(2, device="cuda") + 1
    assert len(profile.key_averages()) > 0
    # Tests before this one may have left memory.
    segments = [
        (s["address"], s["address"] + s["total_size"]) for s in torch.cuda.memory_snapshot()
    ]
    assert any(begin <= found.data_ptr() < end for begin, end in segments)


def test_thread_count_travels_to_the_device() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(300, 300), torch.randn(300, 300)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert equal((a @ b).logsumexp(0).sum(), (a.cuda() @ b.cuda()).logsumexp(0).sum())


def test_many_threads_use_the_device_at_once() -> None:
    import threading

    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            stream = torch.cuda.Stream()
            g = torch.Generator().manual_seed(seed)
            with torch.cuda.stream(stream):
                for _ in range(20):
                    a = torch.randn(20, 20, generator=g)
                    assert torch.equal((a.cuda() @ a.cuda()).cpu(), a @ a)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_another_process_that_ends_takes_nothing_along() -> None:
    """Its executor module goes; what the module put into the server's libtorch must not go with it.

    Under --chaos the module's code is really unmapped (no dispatch thread keeps it), so it is there that this fails
    where the executor can be unloaded.
    """
    torch.ones(2, device="cuda").add_(1)
    torch.cuda.synchronize()
    code = "import torch; assert torch.ones(3, device='cuda').sum().item() == 3"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    time.sleep(1.5)  # the server takes the other client's connection down meanwhile
    for n in range(1, 30):
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.ones(n, 2 * n, device="cuda").fill_(2.0)
            assert (x.t() @ torch.ones(n, n, device="cuda")).shape == (2 * n, n)
    torch.cuda.synchronize()


TYPED = {
    "sum": lambda x, **given: x.sum(1, **given),
    "nansum": lambda x, **given: x.nansum(1, **given),
    "prod": lambda x, **given: x.prod(1, **given),
    "cumsum": lambda x, **given: x.cumsum(1, **given),
    "full_like": lambda x, **given: torch.full_like(x, 3, **given),
    "rand_like": lambda x, **given: torch.randint_like(x, 1, 2, **given),
}


@pytest.mark.parametrize("name", TYPED)
def test_the_type_that_an_op_is_told_to_give_is_part_of_its_signature(name: str) -> None:
    """Results are remembered by signature: one of the same shapes with another dtype= is another."""
    x = torch.arange(6).reshape(2, 3)
    for given in ({}, {"dtype": torch.float32}, {"dtype": torch.float64}, {}):
        mine, theirs = TYPED[name](x, **given), TYPED[name](x.cuda(), **given)
        assert theirs.dtype == mine.dtype
        assert equal(mine, theirs)


def test_types_that_a_kernel_refuses_are_an_exception_at_the_call() -> None:
    """mm's shape function does not look at types, its kernel does: on the device that would be too late."""
    single = torch.randn(3, 3, device="cuda")
    double = torch.randn(3, 3, device="cuda", dtype=torch.float64)
    for op in (torch.mm, torch.matmul, lambda a, b: torch.addmm(a, a, b)):
        with pytest.raises(RuntimeError, match="same dtype"):
            op(single, double)
    assert (single + double).dtype == torch.float64  # where the op converts, it converts
    torch.cuda.synchronize()
    assert single.isfinite().all()


def test_a_script_may_end_with_its_backward_pass() -> None:
    """torch's backward thread drops what it has of Python when Python may be ending: a race, so several times."""
    script = """
import torch
torch.nn.Linear(64, 64).cuda()(torch.ones(4, 64, device="cuda")).sum().backward()
"""
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr


# -- new memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_deterministic_algorithms_fill_new_memory(dtype: torch.dtype) -> None:
    """As on the CPU, and as torch documents it for CUDA (torch.utils.deterministic.fill_uninitialized_memory)."""
    del_me = torch.ones(1000, device="cuda").to(dtype)
    del del_me  # what its memory has is what a new tensor would have
    torch.use_deterministic_algorithms(True)
    try:
        grown = torch.zeros(3, dtype=dtype, device="cuda")
        made = [
            torch.empty(5, dtype=dtype, device="cuda"),
            torch.empty_like(grown),
            torch.empty_strided((2, 3), (3, 1), dtype=dtype, device="cuda"),
            grown.resize_(7),
        ]
        wanted = [
            torch.empty(5, dtype=dtype),
            torch.empty(3, dtype=dtype),
            torch.empty_strided((2, 3), (3, 1), dtype=dtype),
            torch.zeros(3, dtype=dtype).resize_(7),
        ]
        for tensor, want in zip(made, wanted, strict=True):
            assert torch.equal(tensor.cpu().view(torch.uint8), want.view(torch.uint8))
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        assert torch.empty(5, dtype=dtype, device="cuda").shape == (5,)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(False)


def test_the_plugin_imports_nothing_of_torch_by_itself() -> None:
    """`import torch` takes as long as without devproxy only if it imports the same modules."""
    program = "import sys, torch; print(*sorted(sys.modules))"
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DEVPROXY_", "LD_")) and name != "PYTHONPATH"
    }
    loaded = []
    for env in (plain, dict(os.environ)):
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
        )
        names = set(done.stdout.split())
        assert ("_devproxy_torch" in names) == bool(loaded)
        loaded.append({name for name in names if name.partition(".")[0] == "torch"})
    assert len(loaded[0]) > 500
    assert loaded[1] == loaded[0]
