# SPDX-License-Identifier: Apache-2.0
"""The unmodified PyTorch CUDA wheel, chapter by chapter: what each computes, as a digest, or why it did not.

    chapter <name> digest <blake2b>
    chapter <name> error <one line>

Run natively and through the proxy by scripts/gpu_check.py, which compares. A chapter that fails does not keep the next
from running; DONE is the last line. With names of chapters as arguments only these are run.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
from common import Digest

CHAPTERS: dict[str, Callable[[Digest], None]] = {}


def chapter(run: Callable[[Digest], None]) -> Callable[[Digest], None]:
    CHAPTERS[run.__name__] = run
    return run


def some(*shape: int, seed: int = 1) -> Any:
    """Equal in every run: drawn on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


@chapter
def init(d: Digest) -> None:
    assert torch.cuda.is_available()
    d.add("count", torch.cuda.device_count())
    d.add("one", torch.ones(3, device="cuda") + 1)


@chapter
def properties(d: Digest) -> None:
    p = torch.cuda.get_device_properties(0)
    d.add("name", [p.name, p.major, p.minor, p.total_memory, p.multi_processor_count, str(p.uuid)])
    d.add("rest", [p.warp_size, p.max_threads_per_multi_processor, p.regs_per_multiprocessor])
    d.add("capability", list(torch.cuda.get_device_capability()))
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
    d.add("total", total)


@chapter
def streams(d: Digest) -> None:
    a, b = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    x, y = some(1 << 16), some(1 << 16, seed=2)
    torch.cuda.synchronize()
    with torch.cuda.stream(a):
        for _ in range(20):
            x = x * 1.01 + 0.5
    b.wait_stream(a)
    with torch.cuda.stream(b):
        y = y + x
        x.record_stream(b)
    torch.cuda.current_stream().wait_stream(b)
    d.add("y", y)
    assert a.query() and b.query()


@chapter
def events(d: Digest) -> None:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    x = some(1 << 20).cumsum(0)
    end.record()
    end.synchronize()
    assert 0 <= begin.elapsed_time(end) < 60_000
    assert begin.query() and end.query()
    d.add("x", x)


@chapter
def copies(d: Digest) -> None:
    for dtype in (torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64):
        x = torch.arange(5000).to(dtype)
        assert torch.equal(x.cuda().cpu(), x), dtype
        d.add(str(dtype), x.cuda().to(torch.float32))
    x = some(300, 70)
    d.add("transposed", x.t().contiguous())
    d.add("strided", x[::3, 5:50:2].clone())
    d.add("across", torch.empty_like(x).copy_(x, non_blocking=True))
    d.add("item", x[7, 9].item())
    d.add("list", x[0, :5].tolist())


@chapter
def pinned(d: Digest) -> None:
    x = torch.arange(1 << 18, dtype=torch.float32).pin_memory()
    assert x.is_pinned()
    y = x.to("cuda", non_blocking=True) * 2
    out = torch.empty(1 << 18, pin_memory=True)
    out.copy_(y, non_blocking=True)
    torch.cuda.synchronize()
    d.add("out", out)


@chapter
def allocator(d: Digest) -> None:
    base = torch.cuda.memory_allocated()
    blocks = [torch.full((n * 1000,), n, device="cuda") for n in range(1, 200)]
    assert torch.cuda.memory_allocated() > base
    d.add("sums", torch.stack([b.sum() for b in blocks]))
    del blocks
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == base
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        d.add("too much", "refused")


@chapter
def elementwise(d: Digest) -> None:
    x, y = some(100_003), some(100_003, seed=2)
    for name in ("add", "mul", "div", "atan2", "maximum", "fmod", "pow", "hypot"):
        d.add(name, getattr(torch, name)(x.abs() if name == "pow" else x, y))
    for name in (
        "exp",
        "tanh",
        "sigmoid",
        "erf",
        "sin",
        "sqrt",
        "log1p",
        "round",
        "sign",
        "lgamma",
    ):
        d.add(name, getattr(torch, name)(x.abs() if name in ("sqrt", "log1p") else x))
    d.add("gelu", torch.nn.functional.gelu(x))
    d.add("where", torch.where(x > y, x, y * 2))
    d.add("half", (x.half() * y.half()).float())
    d.add("broadcast", some(64, 1, 33) + some(1, 50, 33, seed=3))


@chapter
def reductions(d: Digest) -> None:
    x = some(129, 1025)
    for name in ("sum", "mean", "std", "amax", "argmin", "prod", "norm"):
        d.add(name, getattr(torch, name)(x, dim=1))
        d.add(f"{name} of columns", getattr(torch, name)(x, dim=0))
    d.add("all", x.sum())
    d.add("cumsum", x.cumsum(1))
    d.add("sort", list(x.sort(dim=1)))
    d.add("topk", list(x.topk(7, dim=1)))
    d.add("logsumexp", x.logsumexp(0))


@chapter
def indexing(d: Digest) -> None:
    x, i = some(500, 40), torch.arange(499, -1, -3).cuda()
    d.add("select", x.index_select(0, i))
    d.add("gather", x.gather(0, i[:, None].expand(-1, 40)))
    d.add("mask", x[x > 0.5])
    d.add("nonzero", (x > 1).nonzero())
    d.add("unique", (x * 3).int().unique())
    d.add("cat", torch.cat([x, x * 2]).roll(13, 0))


@chapter
def random_numbers(d: Digest) -> None:
    torch.cuda.manual_seed(11)
    d.add("normal", torch.randn(1000, device="cuda"))
    d.add("uniform", torch.rand(3, 77, device="cuda"))
    d.add("permuted", torch.randperm(5000, device="cuda"))
    d.add("dropout", torch.nn.functional.dropout(torch.ones(4096, device="cuda"), 0.3))
    d.add("state", torch.cuda.get_rng_state())


@chapter
def softmax(d: Digest) -> None:
    x = some(65, 3001).requires_grad_()
    y = torch.nn.functional.log_softmax(x, 1)
    loss = torch.nn.functional.nll_loss(y, torch.arange(65).cuda() * 7)
    loss.backward()
    d.add("y", y)
    d.add("slope", x.grad)
    d.add("softmax", some(4, 8, 100).softmax(1))


@chapter
def normalisation(d: Digest) -> None:
    x = some(32, 200).requires_grad_()
    layer = torch.nn.LayerNorm(200).cuda()
    y = layer(x)
    (y * some(32, 200, seed=5)).sum().backward()
    d.add("layer", [y, x.grad, layer.weight.grad, layer.bias.grad])


@chapter
def embedding(d: Digest) -> None:
    table = torch.nn.Embedding(1000, 48).cuda()
    with torch.no_grad():
        table.weight.copy_(some(1000, 48))
    index = (torch.arange(4000) * 37 % 1000).reshape(40, 100).cuda()
    out = table(index)
    (out * some(40, 100, 48, seed=3)).sum().backward()
    d.add("out", out)
    d.add("slope", table.weight.grad)


@chapter
def adamw(d: Digest) -> None:
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        weights = [torch.nn.Parameter(some(n * 111, seed=n)) for n in range(1, 9)]
        optimizer = torch.optim.AdamW(weights, lr=1e-2, **options)
        for step in range(10):
            optimizer.zero_grad()
            sum(((w * (step + 1)).tanh() ** 2).sum() for w in weights).backward()
            optimizer.step()
        d.add(str(options), [w.data for w in weights])


@chapter
def training(d: Digest) -> None:
    """A whole small model of element-wise layers only: no product of matrices."""
    table = torch.nn.Parameter(some(64, 32))
    scale, norm = torch.nn.Parameter(some(32, seed=2)), torch.nn.LayerNorm(32).cuda()
    optimizer = torch.optim.AdamW([table, scale, *norm.parameters()], lr=1e-2)
    index = (torch.arange(512) * 29 % 64).cuda()
    for _ in range(30):
        x = torch.nn.functional.gelu(norm(table[index] * scale))
        loss = torch.nn.functional.cross_entropy(x, index % 32)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        d.add("loss", loss.item())
    d.add("table", table.data)


@chapter
def two_threads(d: Digest) -> None:
    results: dict[int, Any] = {}

    def work(n: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            x = some(10_000, seed=n)
            for _ in range(50):
                x = (x * 1.001).sin()
            results[n] = x.cpu()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    d.add("results", [results[n] for n in range(4)])


@chapter
def cuda_graph(d: Digest) -> None:
    x, y = some(4096), torch.zeros(4096, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y.copy_(x.tanh() * 2)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.copy_(x.tanh() * 2)
        y.add_(1)
    for n in range(5):
        x.add_(n)
        graph.replay()
    d.add("y", y)


@chapter
def matmul(d: Digest) -> None:
    """Needs cuBLAS: through the proxy it is refused by name, and the process lives on."""
    d.add("product", some(64, 64) @ some(64, 64, seed=2))


@chapter
def after_a_refusal(d: Digest) -> None:
    d.add("x", some(1000).exp().sum())


def main(names: list[str]) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    print(f"torch {torch.__version__} cuda {torch.version.cuda}", flush=True)
    for name, run in CHAPTERS.items():
        if names and name not in names:
            continue
        digest = Digest()
        print(f"chapter {name} begins", file=sys.stderr, flush=True)
        try:
            run(digest)
            torch.cuda.synchronize()
            print(f"chapter {name} digest {digest.hash.hexdigest()}", flush=True)
        except Exception as error:
            traceback.print_exc()
            line = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"chapter {name} error {line[:500]}", flush=True)
    with open("/proc/self/maps") as maps:
        found = {line.split()[-1] for line in maps if "libcuda" in line}
    print("mapped:", *sorted(found))
    print("DONE", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
