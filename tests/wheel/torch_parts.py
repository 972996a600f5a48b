# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's CUDA wheel does without a math library, part by part; a call of one of those is refused by name.

    python torch_parts.py [--values] [--only PART,...]

One JSON line per part: {"part", "ok", "error"}. With --values the device executes kernels, and results are compared with
the CPU's. Without (--device record) only copies are compared: the point is that every call is accepted. Imports nothing
but torch. Exit code 0 only if every part is ok.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable

import torch
from torch import nn

VALUES = False
PARTS: dict[str, Callable[[], None]] = {}


def part(function: Callable[[], None]) -> Callable[[], None]:
    PARTS[function.__name__] = function
    return function


def same(device: torch.Tensor, host: torch.Tensor, **tolerance: float) -> None:
    """Compared where kernels are executed; shape and type always."""
    assert device.is_cuda
    assert device.shape == host.shape, (device.shape, host.shape)
    assert device.dtype == host.dtype
    back = device.cpu()
    if VALUES:
        torch.testing.assert_close(back, host, **tolerance)


def both(function: Callable[..., torch.Tensor], *arguments: object, **tolerance: float) -> None:
    """The function on the CPU and on the device."""
    moved = [a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments]
    same(function(*moved), function(*arguments), **tolerance)


def refused(function: Callable[[], object], words: str) -> None:
    try:
        function()
        torch.cuda.synchronize()
    except RuntimeError as error:
        assert words in str(error), str(error)
        return
    raise AssertionError(f"not refused; {words} was expected")


# -- the device, streams, events ------------------------------------------------------------------------------------------


@part
def properties() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() >= 1
    torch.cuda.init()
    facts = torch.cuda.get_device_properties(0)
    assert facts.name == torch.cuda.get_device_name(0)
    assert (facts.major, facts.minor) == torch.cuda.get_device_capability(0)
    assert facts.multi_processor_count > 0
    assert facts.total_memory > 0
    assert facts.warp_size == 32
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
    assert torch.cuda.is_bf16_supported()
    assert torch.cuda.get_arch_list()
    assert torch.cuda.current_device() == 0
    assert torch.cuda.is_initialized()
    assert torch.cuda.get_device_properties(0).uuid is not None


@part
def streams() -> None:
    low, high = torch.cuda.Stream.priority_range()
    assert high <= low
    one, other = torch.cuda.Stream(), torch.cuda.Stream(priority=high)
    assert one != other
    x = torch.ones(1 << 16)
    with torch.cuda.stream(one):
        y = x.cuda(non_blocking=True)
        z = y + 1
    other.wait_stream(one)
    with torch.cuda.stream(other):
        w = z * 2
    y.record_stream(other)
    torch.cuda.current_stream().wait_stream(other)
    same(w, (x + 1) * 2)
    one.synchronize()
    assert one.query()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.synchronize()


@part
def events() -> None:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    x = torch.zeros(1 << 20, device="cuda")
    for _ in range(10):
        x += 1
    end.record()
    end.synchronize()
    assert end.query()
    assert begin.elapsed_time(end) >= 0
    stream = torch.cuda.Stream()
    stream.wait_event(end)
    with torch.cuda.stream(stream):
        again = stream.record_event()
    again.wait()
    again.synchronize()
    same(x, torch.full((1 << 20,), 10.0))


# -- memory ------------------------------------------------------------------------------------------------------------


@part
def copies() -> None:
    generator = torch.Generator().manual_seed(1)
    for dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
    ):
        for count in (0, 1, 3, 1000, (1 << 20) + 7):
            x = torch.randint(0, 2, (count,), generator=generator).to(dtype)
            assert torch.equal(x.cuda().cpu(), x)
    x = torch.randn(1 << 20, generator=generator)
    y = x.cuda()
    z = torch.empty_like(y)
    z.copy_(y)  # on the device, a copy and no kernel
    assert torch.equal(z.cpu(), x)
    w = torch.empty(1 << 19)
    w.copy_(y[: 1 << 19])
    assert torch.equal(w, x[: 1 << 19])
    part_of = y[123:456789]
    assert torch.equal(part_of.cpu(), x[123:456789])
    assert y[5].item() == x[5].item()
    assert y[:7].tolist() == x[:7].tolist()
    if VALUES:  # it asks the device how many of the values are finite
        assert "tensor(" in repr(y)
    same(y.view(1024, 1024).t().contiguous(), x.view(1024, 1024).t().contiguous())
    same(y.to(torch.float16), x.to(torch.float16))


@part
def pinned_memory() -> None:
    x = torch.randn(1 << 18).pin_memory()
    assert x.is_pinned()
    assert not torch.randn(4).is_pinned()
    y = x.to("cuda", non_blocking=True)
    back = torch.empty(1 << 18, pin_memory=True)
    back.copy_(y, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(back, x)
    del x, y
    # One buffer out and in again, in order.
    buffer = torch.zeros(1 << 16, pin_memory=True)
    there = torch.empty(1 << 16, device="cuda")
    for n in range(1, 20):
        buffer.fill_(n)
        there.copy_(buffer, non_blocking=True)
        buffer2 = torch.empty(1 << 16, pin_memory=True)
        buffer2.copy_(there, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        assert bool((buffer2 == n).all())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(64.0)), batch_size=16, pin_memory=True)  # fmt: skip
    for (batch,) in loader:
        assert batch.is_pinned()
        assert torch.equal(batch.cuda(non_blocking=True).cpu(), batch)


@part
def allocator() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    x = [torch.empty(1 << n, device="cuda") for n in range(20)]
    assert torch.cuda.memory_allocated() > before
    assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated()
    del x
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.memory_stats()["num_alloc_retries"] == 0
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pass
    else:
        raise AssertionError("an allocation of 1 PiB")
    assert torch.equal(torch.zeros(8).cuda().cpu(), torch.zeros(8))
    assert "Allocated memory" in torch.cuda.memory_summary()


@part
def random_numbers() -> None:
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    x = torch.randn(1000, device="cuda")
    torch.cuda.set_rng_state(state)
    y = torch.randn(1000, device="cuda")
    z = torch.rand(1000, device="cuda") + torch.randint(0, 9, (1000,), device="cuda")
    w = torch.empty(1000, device="cuda").bernoulli_(0.3)
    p = torch.randperm(100, device="cuda")
    if VALUES:
        assert torch.equal(x, y)
        assert abs(x.mean().item()) < 0.2
        assert bool((z >= 0).all())
        assert 0.1 < w.mean().item() < 0.5
        assert torch.equal(p.sort().values.cpu(), torch.arange(100))


# -- kernels -------------------------------------------------------------------------------------------------------------


@part
def elementwise() -> None:
    x, y = torch.randn(257, 129), torch.randn(257, 129)
    both(torch.add, x, y)
    both(lambda a, b: a * b - a / (b.abs() + 1), x, y)
    both(lambda a: a.exp().log1p().sqrt().sin(), x)
    both(torch.where, x > 0, x, y)
    both(lambda a: a.clamp(-1, 1), x)
    both(lambda a: a.to(torch.bfloat16) + 1, x)
    both(lambda a: (a * 100).to(torch.int32) // 7, x)
    both(lambda a, b: a[:, :1] + b[:1], x, y)  # broadcast
    both(lambda a: torch.cat([a, a * 2], 1), x)
    both(lambda a: torch.stack([a, a]), x)
    both(torch.nn.functional.gelu, x)
    both(torch.nn.functional.silu, x)
    both(lambda a: a.tril(), x)
    both(lambda a: a.flip(0).roll(3, 1), x)
    both(lambda a: torch.arange(1000, device=a.device), x)
    both(lambda a: torch.linspace(0, 1, 100, device=a.device), x)
    both(lambda a: torch.view_as_complex(torch.stack([a, a], -1)).abs(), x)


@part
def reductions() -> None:
    x = torch.randn(513, 1025)
    both(torch.sum, x, rtol=1e-3, atol=1e-2)
    both(lambda a: a.mean(0), x)
    both(lambda a: a.sum(1), x, rtol=1e-3, atol=1e-3)
    both(lambda a: a.amax(1), x)
    both(lambda a: a.argmax(1), x)
    both(lambda a: a.max(0).values, x)
    both(lambda a: a.std(1), x)
    both(lambda a: a.norm(), x)
    both(lambda a: (a > 0).any(1), x)
    both(lambda a: a.cumsum(1), x, rtol=1e-3, atol=1e-3)
    both(lambda a: a.sort(1).values, x)
    both(lambda a: a.topk(5, 1).values, x)
    both(lambda a: a.logsumexp(1), x)
    both(lambda a: a.prod(1), x[:, :8])


@part
def indexing() -> None:
    x, index = torch.randn(100, 64), torch.randint(0, 100, (37,))
    both(lambda a, i: a[i], x, index)
    both(lambda a, i: a.index_select(0, i), x, index)
    both(lambda a, i: a.gather(0, i[:, None].expand(-1, 64)), x, index)
    both(lambda a, i: a.index_add(0, i, a[: len(i)]), x, index)
    both(lambda a, i: a.scatter_add(0, i[:, None].expand(-1, 64), a), x, index)
    both(lambda a, i: a.index_fill(0, i, 1.0), x, index)
    both(lambda a: a.masked_fill(a > 0, 0.0), x)
    if VALUES:  # its result's shape comes from the device
        both(lambda a: (a > 0).nonzero(), x)
        both(lambda a: a[a > 0], x)


def gradients(build: Callable[[], nn.Module], *arguments: torch.Tensor, **tolerance: float) -> None:
    """Forward and backward on the CPU and on the device."""
    torch.manual_seed(0)
    host = build()
    device = build().cuda()
    device.load_state_dict(host.state_dict())
    for model, move in ((host, False), (device, True)):
        out = model(*(a.cuda() if move else a for a in arguments))
        (
            out.float() * torch.arange(out.numel(), device=out.device).view(out.shape)
        ).mean().backward()
    for mine, theirs in zip(device.parameters(), host.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        same(mine.grad, theirs.grad, **tolerance)


@part
def softmax() -> None:
    x = torch.randn(33, 1000)
    both(lambda a: torch.softmax(a, 1), x)
    both(lambda a: torch.log_softmax(a, 1), x)
    both(lambda a: torch.softmax(a, 0), x)
    both(lambda a: torch.softmax(a, 1), torch.randn(8, 5000))  # another kernel for wide rows
    target = torch.randint(0, 1000, (33,))
    both(lambda a, t: torch.nn.functional.cross_entropy(a, t), x, target)
    y = x.cuda().requires_grad_()
    torch.nn.functional.cross_entropy(y, target.cuda()).backward()
    host = x.clone().requires_grad_()
    torch.nn.functional.cross_entropy(host, target).backward()
    assert y.grad is not None and host.grad is not None
    same(y.grad, host.grad)


@part
def embedding() -> None:
    words = torch.randint(0, 50, (16, 12))
    gradients(lambda: nn.Embedding(50, 32), words)
    gradients(lambda: nn.EmbeddingBag(50, 32, mode="sum"), words)


@part
def normalization() -> None:
    x = torch.randn(64, 256)
    gradients(lambda: nn.LayerNorm(256), x, rtol=1e-3, atol=1e-3)
    gradients(lambda: nn.RMSNorm(256), x, rtol=1e-3, atol=1e-3)
    with torch.backends.cudnn.flags(enabled=False):
        gradients(lambda: nn.BatchNorm1d(256), x, rtol=1e-2, atol=1e-2)
    dropped = torch.nn.functional.dropout(torch.ones(1000, device="cuda"), 0.5)
    if VALUES:
        assert 300 < int((dropped > 0).sum()) < 700


@part
def optimizers() -> None:
    for options in (
        {"foreach": True},
        {"fused": True},
        {"foreach": False},
        {"foreach": True, "amsgrad": True},
    ):
        torch.manual_seed(0)
        host = [torch.randn(n, requires_grad=True) for n in (3, 1000, 70_000)]
        device = [p.detach().cuda().requires_grad_() for p in host]
        for parameters in (host, device):
            keywords = dict(options)
            if parameters is host:
                keywords = {"amsgrad": options.get("amsgrad", False)}
            optimizer = torch.optim.AdamW(parameters, lr=0.1, **keywords)
            for _ in range(3):
                optimizer.zero_grad()
                for p in parameters:
                    p.grad = (p.detach() * 0.5).clone()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
        for mine, theirs in zip(device, host, strict=True):
            same(mine.detach(), theirs.detach(), rtol=1e-3, atol=1e-4)
    weights = [torch.randn(100, device="cuda", requires_grad=True)]
    sgd = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    weights[0].grad = torch.ones_like(weights[0])
    sgd.step()
    torch.cuda.synchronize()


class WithoutMatmul(nn.Module):
    """A model whose training calls no math library."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 128)
        self.norm = nn.LayerNorm(128)
        self.scale = nn.Parameter(torch.ones(128))
        self.head = nn.Embedding(64, 128)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.gelu(self.norm(self.words(words)) * self.scale)
        return (x[:, :, None, :] * self.head.weight).sum(-1)


@part
def training() -> None:
    losses = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = WithoutMatmul().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        words = torch.randint(0, 64, (8, 16)).to(device)
        found = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
    if VALUES:
        torch.testing.assert_close(
            torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-3, atol=1e-3
        )
        assert losses[1][-1] < losses[1][0]


@part
def mixed_precision() -> None:
    x = torch.randn(1000, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = torch.nn.functional.softplus(x).mean()
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(loss).backward()
    optimizer = torch.optim.AdamW([x])
    scaler.step(optimizer)
    scaler.update()
    torch.cuda.synchronize()


@part
def graphs() -> None:
    x = torch.linspace(-1, 1, 1000).cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = (x * 2).exp()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (x * 2).exp()
    for n in range(3):
        x.copy_(torch.full((1000,), float(n)))
        graph.replay()
        same(y, torch.full((1000,), float(n) * 2).exp())
    torch.cuda.synchronize()


@part
def inductor() -> None:
    """Kernels that Triton compiles here, without a GPU if need be, and launches by its own launcher."""
    x, y = torch.randn(64, 64), torch.randn(64, 64)
    compiled = torch.compile(lambda a, b: (a * b + a).relu().sum(1))
    same(compiled(x.cuda(), y.cuda()), (x * y + x).relu().sum(1), rtol=1e-3, atol=1e-3)
    torch.cuda.synchronize()


# -- what is refused, by name ---------------------------------------------------------------------------------------------


@part
def refuse_matmul() -> None:
    x = torch.randn(64, 64, device="cuda")
    refused(lambda: x @ x, "CUBLAS_STATUS_NOT_SUPPORTED")
    refused(lambda: nn.Linear(64, 64).cuda()(x), "CUBLAS")
    refused(lambda: torch.bmm(x[None], x[None]), "CUBLAS_STATUS_NOT_SUPPORTED")
    assert torch.equal(torch.ones(4).cuda().cpu(), torch.ones(4))  # the process goes on


@part
def refuse_convolution() -> None:
    assert torch.backends.cudnn.is_available()
    assert torch.backends.cudnn.version() >= 90000
    x = torch.randn(1, 3, 16, 16, device="cuda")
    refused(lambda: nn.Conv2d(3, 4, 3).cuda()(x), "devproxy does not carry cuDNN")


@part
def refuse_fft() -> None:
    refused(lambda: torch.fft.fft(torch.randn(64, device="cuda")), "CUFFT_NOT_SUPPORTED")


@part
def refuse_linalg() -> None:
    refused(lambda: torch.linalg.cholesky(torch.eye(8, device="cuda")), "cusolverDnCreate")


@part
def refuse_sparse() -> None:
    x = torch.eye(8).to_sparse_csr().cuda()
    refused(lambda: x @ torch.ones(8, 8, device="cuda"), "devproxy does not carry cuSPARSE")


def main() -> int:
    global VALUES
    parser = argparse.ArgumentParser()
    parser.add_argument("--values", action="store_true", help="the device executes kernels")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    VALUES = options.values
    wanted = options.only.split(",") if options.only else list(PARTS)
    bad = 0
    for name in wanted:
        row: dict[str, object] = {"part": name, "ok": True}
        try:
            PARTS[name]()
        except Exception as error:
            bad += 1
            row |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
            traceback.print_exc()
        print(json.dumps(row), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
