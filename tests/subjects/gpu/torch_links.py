# SPDX-License-Identifier: Apache-2.0
"""What ties a collective to the work around it: one rank late, a backlog in front, on the caller's stream and on the group's own.

    python torch_links.py 2 [small]         ranks, as many as GPUs of the job; small: for a CPU

Each rank computes what it sends on the GPU, or copies it there, and looks at what it got by an operator, by another one on
the result's memory, and by item(). DDP in C++ takes the group's own stream (async_op=True) and waits by a future, torch.distributed
in Python takes the caller's. Last the steps of DDP's constructor. A line for each kind, with what was wrong first, then PASS or FAIL.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

SMALL = "small" in sys.argv
ROUNDS = 8 if SMALL else 20
LENGTHS = (1, 3, 5000, 300_000)


def given(k: int, rank: int, n: int, kind: str) -> Tensor:
    """Computed on the GPU, or on the host and copied: a few bytes, or staged."""
    if kind == "copied":
        return (torch.arange(n) % 97 * (k + 1) + rank).cuda()
    return torch.arange(n, device="cuda") % 97 * (k + 1) + rank


def done(work: Any, how: str) -> None:
    if how == "future":
        work.get_future().wait()
    elif how == "async":
        work.wait()


def all_reduce(kind: str, k: int, rank: int, ranks: int, n: int, how: str) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
    t = given(k, rank, n, kind)
    done(dist.all_reduce(t, async_op=how != "sync"), how)
    return [(t * 1, sum((given(k, r, n, kind) for r in range(1, ranks)), given(k, 0, n, kind)))]


def all_gather(kind: str, k: int, rank: int, ranks: int, n: int, how: str) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
    mine = given(k, rank, n, kind)
    outs = [torch.empty_like(mine) for _ in range(ranks)]
    done(dist.all_gather(outs, mine, async_op=how != "sync"), how)
    read = torch.tensor([out[n // 2].item() for out in outs]).cuda()
    want = torch.stack([given(k, r, n, kind) for r in range(ranks)])
    return [(torch.stack(outs), want), (read, want[:, n // 2].clone())]


def broadcast(kind: str, k: int, rank: int, ranks: int, n: int, how: str) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
    t = given(k, 0, n, kind) if rank == 0 else torch.full((n,), -7, device="cuda")
    done(dist.broadcast(t, 0, async_op=how != "sync"), how)
    return [(t + 0, given(k, 0, n, kind))]


CASES = {"all_reduce": all_reduce, "all_gather": all_gather, "broadcast": broadcast}


def backlog(heavy: Tensor, rank: int, ranks: int, k: int) -> Tensor:
    """Another rank is late in each round, and has more in front."""
    if k % ranks == rank:
        time.sleep(0.004)
        for _ in range(3):
            heavy = heavy @ heavy * 1e-4
        torch.ones(300_000).cuda()
    return heavy


def links(rank: int, ranks: int) -> list[str]:
    wrong = []
    width = 128 if SMALL else 1024
    heavy = torch.ones(width, width, device="cuda")
    for name, case in CASES.items():
        for kind in ("computed", "copied"):
            for how in ("sync", "async", "future"):
                pairs = []
                for k in range(ROUNDS):
                    heavy = backlog(heavy, rank, ranks, k)
                    n = LENGTHS[k % len(LENGTHS)]
                    pairs += [(k, n, got, want) for got, want in case(kind, k, rank, ranks, n, how)]  # fmt: skip
                bad = [(k, n, got, want) for k, n, got, want in pairs if not torch.equal(got, want)]
                title = f"{name}, {kind}, {how}"
                if bad:
                    k, n, got, want = bad[0]
                    at = int(torch.nonzero((got != want).flatten())[0])
                    wrong.append(f"{title}: {len(bad)} of {len(pairs)}, first in round {k} of {n} elements: {got.flatten()[at].item()} at {at}, not {want.flatten()[at].item()}")  # fmt: skip
    return wrong


def ddp(rank: int) -> list[str]:
    """The constructor compares and broadcasts parameters; a step reduces gradients. All ranks have the same data, so each must
    have what it computes alone."""
    wrong = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 300)).cuda()
        alone = [p.detach().clone() for p in model.parameters()]
        x = torch.randn(32, 512).cuda()
        grads = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        try:
            wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[rank], bucket_cap_mb=1)
        except RuntimeError as error:
            return [*wrong, f"DDP's constructor, seed {seed}: {error}"]
        wrapped(x).square().mean().backward()
        for i, p in enumerate(model.parameters()):
            if not torch.equal(p.detach(), alone[i]):
                wrong.append(f"DDP, seed {seed}: parameter {i} behind the constructor")
            if p.grad is None or not torch.equal(p.grad, grads[i]):
                wrong.append(f"DDP, seed {seed}: gradient {i}")
    return wrong


def be_rank(rank: int, ranks: int, meet: str) -> int:
    torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("nccl", init_method=f"file://{meet}", rank=rank, world_size=ranks)
    begin = time.perf_counter()
    wrong = links(rank, ranks) + ddp(rank)
    for line in wrong:
        print(f"wrong: rank {rank}: {line}", flush=True)
    print(f"rank {rank}: {time.perf_counter() - begin:.1f} s", flush=True)
    if not wrong:  # else the others may wait for what does not come
        dist.destroy_process_group()
    return len(wrong)


def main() -> int:
    if sys.argv[1] == "rank":
        return min(be_rank(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]), 100)
    ranks = int(sys.argv[1])
    env = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen([sys.executable, os.path.abspath(__file__), "rank", str(r), str(ranks), f"{folder}/meet", *sys.argv[2:]], env=env)
            for r in range(ranks)
        ]  # fmt: skip
        while all(one.poll() is None for one in started):
            time.sleep(0.05)
        patience = time.monotonic() + (30 if not any(one.poll() for one in started) else 5)
        while any(one.poll() is None for one in started) and time.monotonic() < patience:
            time.sleep(0.05)
        for one in started:
            one.kill()
        codes = [one.wait() for one in started]
    print("PASS" if codes == [0] * ranks else "FAIL", flush=True)
    return int(codes != [0] * ranks)


if __name__ == "__main__":
    sys.exit(main())
