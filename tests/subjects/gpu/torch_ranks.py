# SPDX-License-Identifier: Apache-2.0
"""torch.distributed on 'nccl', with as many ranks as asked for, a GPU each: collectives, and a DDP training.

    python torch_ranks.py --json ranks.jsonl --ranks 2      natively, and under devproxy-run --gpus 2

A case is the hash of what all ranks have. What must be the native ones is under "same". The ranks of a number are started
once, and do all cases.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch_cases
from torch import nn

Facts = dict[str, Any]
STEPS = 10


def collectives(rank: int, ranks: int, small: bool) -> Any:
    """Each kind in several types, of sizes that NCCL treats differently; sends around the ring; a group of its own."""
    found = []
    for count in (1, 1000, 1 << (14 if small else 20)):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            g = torch.Generator().manual_seed(count + rank)
            given = (torch.randn(count, generator=g) * 100).to(dtype).cuda()
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
                if op == dist.ReduceOp.AVG and not dtype.is_floating_point:
                    continue
                sums = given.clone()
                dist.all_reduce(sums, op)
                found.append(sums)
            wide = torch.empty(count * ranks, dtype=dtype, device="cuda")
            dist.all_gather_into_tensor(wide, given)
            found.append(wide)
            part = torch.empty(count, dtype=dtype, device="cuda")
            dist.reduce_scatter_tensor(part, wide)
            found.append(part)
            swapped = torch.empty_like(wide)
            dist.all_to_all_single(swapped, wide + rank)
            found.append(swapped)
            told = given.clone()
            dist.broadcast(told, ranks - 1)
            found.append(told)
            if ranks > 1:
                got = torch.empty_like(given)
                ways = [
                    dist.P2POp(dist.isend, given, (rank + 1) % ranks),
                    dist.P2POp(dist.irecv, got, (rank - 1) % ranks),
                ]
                for work in dist.batch_isend_irecv(ways):
                    work.wait()
                found.append(got)
    alone = dist.new_group([0])
    if rank == 0:
        one = torch.ones(7, device="cuda")
        dist.all_reduce(one, group=alone)
        found.append(one)
    dist.barrier()
    return found


def ddp(rank: int, ranks: int, small: bool) -> Any:
    """Parameters and losses after some steps, with buckets that are reduced beside the backward pass."""
    torch.manual_seed(3)
    width = 64 if small else 1024
    layers = [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)]
    model = nn.Sequential(
        *layers, *(nn.Linear(width, width) for _ in range(6)), nn.Linear(width, 8)
    ).cuda()
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[rank], bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-3)
    losses = []
    for step in range(STEPS):
        g = torch.Generator().manual_seed(100 * step + rank)
        x, y = (
            torch.randn(32, width, generator=g).cuda(),
            torch.randint(8, (32,), generator=g).cuda(),
        )
        loss = nn.functional.cross_entropy(wrapped(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [losses, list(model.parameters())]


CASES = {"collectives": collectives, "ddp": ddp}


def be_rank(rank: int, ranks: int, meet: str, small: bool) -> None:
    torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("nccl", init_method=f"file://{meet}", rank=rank, world_size=ranks)
    version = ".".join(map(str, torch.cuda.nccl.version()))
    for name, case in CASES.items():
        begin = time.perf_counter()
        digest = torch_cases.digest(case(rank, ranks, small))
        print("DIGEST", name, digest, round(time.perf_counter() - begin, 3), version, flush=True)
    dist.destroy_process_group()


@functools.cache
def run_ranks(ranks: int, small: bool) -> list[str]:
    """What each said."""
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, os.path.abspath(__file__), "--ranks", str(ranks), "--meet", f"{folder}/meet"]  # fmt: skip
        env = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        started = [
            subprocess.Popen([*line, "--rank", str(rank), *(["--small"] if small else [])], env=env,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for rank in range(ranks)
        ]  # fmt: skip
        try:
            return [process.communicate()[0] for process in started]
        finally:
            for process in started:
                process.kill()


def run_case(case: str, ranks: int, small: bool) -> Facts:
    said = run_ranks(ranks, small)
    start = f"DIGEST {case} "
    words = [next((t.removeprefix(start).split() for t in text.splitlines() if t.startswith(start)), None) for text in said]  # fmt: skip
    for rank, (found, text) in enumerate(zip(words, said, strict=True)):
        if found is None:
            last = " | ".join(text.strip().splitlines()[-4:])
            raise RuntimeError(f"rank {rank} of {ranks} ended without a result: {last[-300:]}")
    whole = hashlib.blake2b(" ".join(w[0] for w in words if w).encode(), digest_size=12)
    shown = {"ranks": ranks, "longest_s": max(float(w[1]) for w in words if w), "nccl": (words[0] or ["", "", ""])[2]}  # fmt: skip
    return {"same": {"result": whole.hexdigest()}, "shown": shown}


def main() -> None:
    if "--rank" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--meet")
        for name in ("--rank", "--ranks"):
            parser.add_argument(name, type=int)
        parser.add_argument("--small", action="store_true")
        o = parser.parse_args()
        return be_rank(o.rank, o.ranks, o.meet, o.small)
    options = torch_cases.parse(__doc__ or "", spoil="", ranks=1)

    def one(name: str, ranks: int) -> Facts:
        found = run_case(name, ranks, options.small)
        if options.spoil == f"{name}_{ranks}":
            found["same"]["spoilt"] = options.spoil
        return found

    counts = sorted({1, options.ranks})
    torch_cases.run(
        options,
        {f"{name}_{n}": functools.partial(one, name, n) for n in counts for name in CASES},
    )


if __name__ == "__main__":
    main()
