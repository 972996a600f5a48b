# SPDX-License-Identifier: Apache-2.0
"""What else torch does on 'cuda', chapter by chapter: facts, generators, streams, memory, graphs, torch.compile, a fault.

    python torch_chapters.py --json chapters.jsonl --only memory,oom      natively, and under devproxy-run

Of a chapter's answers those under "same" must be the native ones; those under "shown" are only shown beside them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import threading
import time
from typing import Any

import torch
import torch.nn.functional as F
import torch_cases
from torch import nn
from torch_models import MLP, SUBJECTS, Training, settings

MIB, GIB = 1 << 20, 1 << 30
Facts = dict[str, Any]


def raised(work: Any) -> str:
    """What it raised, or nothing."""
    try:
        work()
        torch.cuda.synchronize()
    except Exception as error:
        return torch_cases.words(error)
    return ""


def facts(small: bool) -> Facts:
    """What a program asks before it decides anything."""
    properties = torch.cuda.get_device_properties(0)
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    same: Facts = {
        "version": [torch.__version__, torch.version.cuda],
        "name": torch.cuda.get_device_name(),
        "count": torch.cuda.device_count(),
        "capability": torch.cuda.get_device_capability(),
        "multiprocessors": properties.multi_processor_count,
        "cudnn": [cudnn.is_available(), cudnn.version()],
        "bf16": torch.cuda.is_bf16_supported(),
        "tf32": [cuda.matmul.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision()],
        "sdp": [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()],
        "arch_list": torch.cuda.get_arch_list(),
        "linalg": str(cuda.preferred_linalg_library()),
        "blas": str(cuda.preferred_blas_library()),
    }  # fmt: skip
    if not small:
        q = torch.zeros(2, 4, 64, 64, device="cuda", dtype=torch.float16)
        with contextlib.suppress(Exception):
            chosen = torch._fused_sdp_choice(q, q, q)
            same["sdp_choice"] = int(chosen)
    config = torch.__config__.show().splitlines()
    shown = {
        "total_memory": properties.total_memory,
        "uuid": str(getattr(properties, "uuid", "")),
        "config": [line.strip() for line in config if "CUDA" in line or "cuDNN" in line][:10],
        "gpu": str(properties)[:300],
    }
    return {"same": same, "shown": shown}


def first(small: bool) -> Facts:
    """The first words: what each kind of library is called for the first time, and how long that takes."""
    shown: Facts = {}
    same: Facts = {}

    def lap(name: str, work: Any) -> None:
        begin = time.perf_counter()
        got = work()
        torch.cuda.synchronize()
        shown[f"{name}_s"] = round(time.perf_counter() - begin, 3)
        same[name] = torch_cases.digest(got)

    n = 64 if small else 1024
    g = torch.Generator().manual_seed(1)
    a, b = torch.randn(n, n, generator=g), torch.randn(n, n, generator=g)
    lap("copy", lambda: [a.cuda(), b.cuda()])
    x, y = a.cuda(), b.cuda()
    lap("add", lambda: x + y)
    lap("reduce", lambda: [x.sum(), x.var(1), x.softmax(1), x.cumsum(0), x.sort(1).values])
    lap("matmul", lambda: x @ y)
    lap("matmul_bf16", lambda: x.bfloat16() @ y.bfloat16())
    lap("conv", lambda: F.conv2d(x.view(4, 16, -1, n // 8)[..., : n // 8], y[:16, :16].reshape(16, 16, 1, 1).expand(16, 16, 3, 3)))  # fmt: skip
    lap("linalg", lambda: torch.linalg.solve(x[:32, :32], y[:32, :32]))
    lap("fft", lambda: torch.view_as_real(torch.fft.rfft(x)))
    lap("random", lambda: torch.randn(1000, device="cuda", generator=torch.Generator("cuda").manual_seed(5)))  # fmt: skip
    return {"same": same, "shown": shown}


def generators(small: bool) -> Facts:
    """States of generators, read, set, copied, forked, in every kind of random op."""
    torch.cuda.manual_seed(11)
    draws = [torch.rand(100, device="cuda"), torch.randn(100, device="cuda")]
    state = torch.cuda.get_rng_state()
    draws += [F.dropout(torch.ones(1000, device="cuda"), 0.3), torch.randperm(100, device="cuda")]
    torch.cuda.set_rng_state(state)
    again = F.dropout(torch.ones(1000, device="cuda"), 0.3)
    own = torch.Generator("cuda").manual_seed(3)
    drawn = torch.rand(10, device="cuda", generator=own)
    copy = torch.Generator("cuda")
    copy.set_state(own.get_state())
    with torch.random.fork_rng(devices=[0]):
        forked = torch.rand(10, device="cuda")
    after = torch.rand(10, device="cuda")
    same = {
        "draws": torch_cases.digest(draws),
        "set": torch.equal(again, draws[2]),
        "own": torch_cases.digest(drawn),
        "copied": torch.equal(torch.rand(9, device="cuda", generator=own), torch.rand(9, device="cuda", generator=copy)),
        "forked": torch_cases.digest([forked, after]),
        "state": torch_cases.digest([state, own.get_state()]),
        "seed": [torch.cuda.initial_seed(), own.initial_seed()],
    }  # fmt: skip
    return {"same": same}


def streams(small: bool) -> Facts:
    """Streams, events, threads, copies from pinned memory: the order of things."""
    n = 1 << (12 if small else 22)
    host = torch.arange(n, dtype=torch.float32).pin_memory()
    side, done = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    begun = torch.cuda.Event(enable_timing=True)
    begun.record()
    x = torch.ones(n, device="cuda")
    for _ in range(50):
        x = x * 1.0001 + 1
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2 + host.to("cuda", non_blocking=True)
        done.record()
    done.synchronize()
    back = torch.empty(n, pin_memory=True)
    with torch.cuda.stream(side):
        back.copy_(y, non_blocking=True)
    side.synchronize()
    found: dict[int, str] = {}

    def work(number: int) -> None:
        own = torch.cuda.Stream()
        with torch.cuda.stream(own):
            z = torch.full((257, 257), 1.0 + number / 8, device="cuda")
            for _ in range(20):
                z = (z @ z.t()).tanh()
        own.synchronize()
        found[number] = torch_cases.digest(z)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same = {
        "side": torch_cases.digest(back),
        "threads": [found[n] for n in sorted(found)],
        "time_is_positive": begun.elapsed_time(done) > 0,
        "query": done.query(),
        "priorities": torch.cuda.Stream.priority_range(),
    }
    return {"same": same, "shown": {"elapsed_ms": round(begun.elapsed_time(done), 3)}}


def memory(small: bool) -> Facts:
    """What is allocated and what is free, as torch counts it."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, free_before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()
    held, counted = [], []
    for size in (1, 512, 513, MIB, 10 * MIB + 1, (64 if small else 1024) * MIB):
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        counted.append(torch.cuda.memory_allocated() - before)
    free = torch.cuda.mem_get_info()
    held.clear()
    gone = torch.cuda.memory_allocated() - before
    reserved = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    stats = torch.cuda.memory_stats()
    same = {
        "allocated": counted,
        "after": gone,
        "peak": torch.cuda.max_memory_allocated() - before,
        "summary": bool(torch.cuda.memory_summary()),
    }
    shown = {
        "mem_get_info, before": free_before,
        "mem_get_info, with 1 GiB": free,
        "mem_get_info, after": torch.cuda.mem_get_info(),
        "reserved, freed but not emptied": reserved,
        "reserved, after": torch.cuda.memory_reserved(),
        "ooms": stats.get("num_ooms"),
    }
    return {"same": same, "shown": shown}


def oom(small: bool) -> Facts:
    """The GPU is full: which call says so, in which words, and that all goes on."""
    piece, held = (64 * MIB if small else GIB), []
    huge = raised(lambda: torch.empty(1 << 46, dtype=torch.uint8, device="cuda"))
    caught = where = ""
    kind = False
    for _ in range(1000):
        where = "torch.empty"
        try:
            held.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
        except torch.cuda.OutOfMemoryError as error:
            caught, kind = str(error)[:200], True
            break
    count = len(held)
    full = torch.cuda.mem_get_info()
    # What a kernel needs for itself (a sort's own room) where there is none.
    n = piece // 16
    left = raised(lambda: torch.zeros(n, device="cuda").sort())
    held.clear()
    gc.collect()
    torch.cuda.empty_cache()
    x = torch.ones(1000, 100, device="cuda")
    same = {
        "huge": huge.split(":")[0],
        "is OutOfMemoryError": kind,
        "call": where if kind else "none of 1000",
        "says": caught.startswith("CUDA out of memory"),
        "afterwards": (x @ x.t()).sum().item(),
    }
    shown = {"pieces": count, "piece": piece, "free when full": full, "message": caught, "huge": huge, "a sort in a full GPU": left}  # fmt: skip
    return {"same": same, "shown": shown}


def graph(small: bool) -> Facts:
    """A forward pass captured and replayed, a whole training step, dropout, shared pools, make_graphed_callables."""
    torch_cases.seed(5)
    model = MLP(64, 2).cuda()
    static = torch.zeros(8, 64, device="cuda")
    inputs = [torch.randn(8, 64).cuda() for _ in range(6)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            model(static)
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured), torch.no_grad():
        out = model(static)
    forward = []
    for x in inputs:
        static.copy_(x)
        captured.replay()
        forward.append(out.clone())
    with torch.no_grad():
        eager = [model(x) for x in inputs]
    same: Facts = {
        "forward": torch_cases.digest(forward),
        "as eager": all(torch.equal(a, b) for a, b in zip(forward, eager, strict=True)),
    }
    noise, second = torch.ones(1000, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(second, pool=captured.pool()):
        dropped = F.dropout(noise, 0.4)
    torch.cuda.manual_seed(21)
    drops = []
    for _ in range(3):
        second.replay()
        drops.append(dropped.clone())
    same["dropout"] = torch_cases.digest(drops)
    same["draws differ"] = not torch.equal(drops[0], drops[1])
    same["state after"] = torch_cases.digest(torch.cuda.get_rng_state())
    return {"same": same}


def graph_training(small: bool) -> Facts:
    torch_cases.seed(6)
    model = MLP(64, 2).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=True)
    x, want = torch.zeros(8, 64, device="cuda"), torch.zeros(8, dtype=torch.long, device="cuda")
    batches = [(torch.randn(8, 64).cuda(), torch.randint(0, 10, (8,)).cuda()) for _ in range(10)]

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), want)
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        loss = step()
    losses = []
    for a, b in batches:
        x.copy_(a)
        want.copy_(b)
        captured.replay()
        losses.append(loss.item().hex())
    same = {"losses": losses, "parameters": torch_cases.digest(list(model.parameters()))}
    return {"same": same}


def graph_callables(small: bool) -> Facts:
    torch_cases.seed(8)
    model = MLP(64, 2).cuda()
    sample = torch.randn(8, 64, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(model, (sample,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for n in range(5):
        optimizer.zero_grad(set_to_none=True)
        loss = graphed(torch.full((8, 64), n / 5, device="cuda", requires_grad=True)).square().mean()  # fmt: skip
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    same = {"losses": losses, "parameters": torch_cases.digest(list(model.parameters()))}
    return {"same": same}


def inductor_runs(small: bool) -> bool:
    """Its kernels need a GPU; a rehearsal over devproxy's software GPU has none."""
    return not small or torch.cuda.get_device_name().startswith("NVIDIA")


def compiled(mode: str | None, small: bool) -> Facts:
    """A small model by torch.compile: Triton's kernels beside ATen's."""
    torch_cases.seed(9)
    model = nn.Sequential(MLP(64, 2), nn.LogSoftmax(-1)).cuda()
    begin = time.perf_counter()
    backend = "inductor" if inductor_runs(small) else "aot_eager"
    fast = torch.compile(model, backend=backend, mode=None if small else mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for n in range(6):
        optimizer.zero_grad(set_to_none=True)
        x = torch.linspace(-1, 1 + n, 8 * 64, device="cuda").view(8, 64)
        loss = -fast(x)[:, n % 10].mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    same = {"losses": losses, "parameters": torch_cases.digest(list(model.parameters()))}
    shown = {"s": round(time.perf_counter() - begin, 2), "backend": backend}
    counters = getattr(torch._dynamo.utils, "counters", {})
    shown["graph_breaks"] = len(counters.get("graph_break", {}))
    return {"same": same, "shown": shown}


def compiled_conv(small: bool) -> Facts:
    """The convolution net by torch.compile: cuDNN's kernels and Triton's in one step."""
    way = {"sgd", "bf16", "channels_last"}
    with settings(way):
        training = Training(SUBJECTS["resnet"], way, small, 4)
        training.model.compile(backend="inductor" if inductor_runs(small) else "aot_eager")
        losses = [training.step() for _ in range(3)]
        return {"same": {"result": training.result(losses)}}


def checks(small: bool) -> Facts:
    """Errors that are found before anything runs: same type, same words."""
    x = torch.ones(3, 4, device="cuda")
    tried = {
        "shapes": lambda: x @ x,
        "devices": lambda: x + torch.ones(3, 4),
        "index": lambda: x[7],
        "singular": lambda: torch.linalg.inv(torch.zeros(3, 3, device="cuda")),
        "cholesky": lambda: torch.linalg.cholesky(-torch.eye(3, device="cuda")),
        "deterministic": deterministic,
    }
    return {"same": {name: raised(work) for name, work in tried.items()}}


def check_types(small: bool) -> Facts:
    """One that only the op itself finds: a chapter of its own, since it may come late and spoil what follows."""
    x = torch.ones(3, 4, device="cuda")
    return {"same": {"said": raised(lambda: x @ x.double().t())}}


def deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        torch.ones(5, device="cuda").put_(torch.tensor([0], device="cuda"), torch.ones(1, device="cuda"))  # fmt: skip
        torch.ones(100, device="cuda").histc(10)
    finally:
        torch.use_deterministic_algorithms(False)


def fault(small: bool) -> Facts:
    """An index outside of its tensor: a kernel's own assertion, which spoils the context."""
    table, index = torch.zeros(10, device="cuda"), torch.tensor([99], device="cuda")
    said = raised(lambda: table[index].sum().item())
    later = raised(lambda: torch.ones(1, device="cuda").sum().item())
    if small:  # on the host it is an exception of the call
        return {"same": {"raised": bool(said)}, "shown": {"said": said, "later": later}}
    same = {"type": said.split(":")[0], "later": later.split(":")[0]}
    return {"same": same, "shown": {"said": said, "later": later, "error": "expected"}}


CHAPTERS = {
    "first": first, "facts": facts, "generators": generators, "streams": streams, "checks": checks,
    "memory": memory, "oom": oom,
    "graph": graph, "graph_training": graph_training, "graph_callables": graph_callables,
    "compile": functools.partial(compiled, None), "compile_conv": compiled_conv,
    "compile_reduce_overhead": functools.partial(compiled, "reduce-overhead"),
    "check_types": check_types, "fault": fault,
}  # fmt: skip


def main() -> None:
    begin = time.perf_counter()
    options = torch_cases.parse(__doc__ or "", spoil="")
    torch.cuda.init()
    begun = round(time.perf_counter() - begin, 2)

    def one(name: str) -> Facts:
        torch_cases.seed(options.seed)
        found = CHAPTERS[name](options.small)
        if name == "first":
            found["shown"]["cuda_init_s"] = begun
            found["shown"]["pid"] = os.getpid()
        if options.spoil == name:
            found["same"]["spoilt"] = options.spoil
        return found

    torch_cases.run(options, {name: functools.partial(one, name) for name in CHAPTERS})


if __name__ == "__main__":
    main()
