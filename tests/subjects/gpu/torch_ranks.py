# SPDX-License-Identifier: Apache-2.0
"""torch.distributed on 'nccl', with as many ranks as asked for, a GPU each: collectives, and a DDP training.

    python torch_ranks.py --json ranks.jsonl --ranks 2      natively, and under devproxy-run --gpus 2

A case is the hash of what all ranks have. What must be the native ones is under "same". The ranks of a number are started
once, and do all cases.

    python torch_ranks.py --job 2 --steps 60            the DDP training as a subject like those of tests/subjects
    python torch_ranks.py --reference 2 --steps 60      what it must be equal to where ranks share a GPU, natively

The reference is one process without torch.distributed: it computes the ranks one behind the other on one GPU, and averages
their gradients as DDP does. NCCL takes no two ranks on one GPU, so the job itself has no native run there.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import gate
import torch
import torch.distributed as dist
import torch_cases
from torch import nn

Facts = dict[str, Any]
STEPS = 10
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


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


class Training:
    """A rank's: the model that all have, on data of its own. alone: its gradients are not averaged here."""

    def __init__(self, rank: int, width: int, alone: bool = False) -> None:
        torch.manual_seed(3)
        self.rank, self.width = rank, width
        layers = [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)]
        self.model = nn.Sequential(
            *layers, *(nn.Linear(width, width) for _ in range(6)), nn.Linear(width, 8)
        ).cuda()
        self.wrapped: nn.Module = self.model
        if not alone:
            self.wrapped = nn.parallel.DistributedDataParallel(self.model, device_ids=[rank], bucket_cap_mb=1)  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.losses: list[torch.Tensor] = []

    def backward(self, step: int) -> None:
        g = torch.Generator().manual_seed(100 * step + self.rank)
        x, y = (
            torch.randn(32, self.width, generator=g).cuda(),
            torch.randint(8, (32,), generator=g).cuda(),
        )
        loss = nn.functional.cross_entropy(self.wrapped(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.losses.append(loss.detach())

    def digests(self) -> str:
        losses, weights = self.losses, list(self.model.parameters())
        return f"losses {torch_cases.digest(losses)} parameters {torch_cases.digest(weights)}"


def ddp(rank: int, ranks: int, small: bool) -> Any:
    """Parameters and losses after some steps, with buckets that are reduced beside the backward pass."""
    training = Training(rank, 64 if small else 1024)
    for step in range(STEPS):
        training.backward(step)
        training.optimizer.step()
    return [training.losses, list(training.model.parameters())]


CASES = {"collectives": collectives, "ddp": ddp}


def be_rank(o: argparse.Namespace) -> None:
    torch.cuda.set_device(o.rank)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("nccl", init_method=f"file://{o.meet}", rank=o.rank, world_size=o.ranks)
    if o.steps:
        train(o)
    else:
        version = ".".join(map(str, torch.cuda.nccl.version()))
        for name, case in CASES.items():
            begin = time.perf_counter()
            digest = torch_cases.digest(case(o.rank, o.ranks, o.small))
            print("DIGEST", name, digest, round(time.perf_counter() - begin, 3), version, flush=True)  # fmt: skip
    dist.destroy_process_group()


# -- the job and its reference ----------------------------------------------------------------------------------------


def width_of(small: bool) -> int:
    """So that DDP has several buckets, and an image some 60 MB for two ranks."""
    return 64 if small else 512


def train(o: argparse.Namespace) -> None:
    """One rank of the job. Rank 0 says the steps. All ranks stand at the gate, not rank 0 alone with the others waiting for it."""
    training, took = Training(o.rank, width_of(o.small)), []
    common.NONCE = o.nonce
    steps: Any = common.Steps(o) if o.rank == 0 else range(1, o.steps + 1)
    for step in steps:
        if o.rank:
            gate.before(step, o.steps, 0.0)
        begin = time.perf_counter()
        training.backward(step)
        training.optimizer.step()
        loss = training.losses[-1].item()
        took.append(time.perf_counter() - begin)
        if o.rank == 0:
            steps.say(f"loss {loss.hex()}")
    if o.rank == 0:
        print(f"median step {statistics.median(took) * 1e6:.1f} us", flush=True)
    Path(o.meet).with_name(f"end-{o.rank}").write_text(training.digests())


def tree(values: list[torch.Tensor]) -> torch.Tensor:
    """The sum over the ranks in the order that hal/comm.h promises."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    return tree(values[:half]) + tree(values[half:])


def reference(o: argparse.Namespace) -> list[str]:
    """What the ranks of a job must have at the end."""
    torch.use_deterministic_algorithms(True)
    every = [Training(rank, width_of(bool(o.small)), alone=True) for rank in range(o.reference)]
    steps, took = common.Steps(o), []
    for step in steps:
        begin = time.perf_counter()
        for one in every:
            one.backward(step)
        for copies in zip(*(one.model.parameters() for one in every), strict=True):
            # DDP's reducer multiplies each rank's gradient before the buckets are summed.
            mean = tree([p.grad * (1 / len(every)) for p in copies if p.grad is not None])
            for p in copies:
                p.grad = mean.clone()
        for one in every:
            one.optimizer.step()
        losses = [one.losses[-1].item() for one in every]
        took.append(time.perf_counter() - begin)
        steps.say(f"loss {losses[0].hex()}")
    print(f"median step {statistics.median(took) * 1e6:.1f} us", flush=True)
    return [one.digests() for one in every]


def whole_job() -> None:
    """--job or --reference: common.py's words, with a line for each rank before the digest."""
    o = common.options(__doc__ or "", steps=60, job=0, reference=0, small=0)
    if o.reference:
        os.environ.update(CUBLAS)
        ends = reference(o)
    else:
        folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=os.getcwd()))
        more = ["--steps", str(o.steps), "--seconds-per-step", str(o.seconds_per_step), "--nonce", common.NONCE]  # fmt: skip
        ranks = [subprocess.Popen(rank_line(rank, o.job, folder, bool(o.small), *more), env=os.environ | CUBLAS) for rank in range(o.job)]  # fmt: skip
        codes = [process.wait() for process in ranks]
        common.check(codes == [0] * o.job, f"exit codes of the ranks: {codes}")
        ends = [(folder / f"end-{rank}").read_text() for rank in range(o.job)]
    digest = common.Digest()
    for rank, end in enumerate(ends):
        print(f"rank {rank}: {end}", flush=True)
        digest.add(f"rank {rank}", end)
    digest.finish()


def rank_line(rank: int, ranks: int, folder: Path | str, small: bool, *more: str) -> list[str]:
    line = [sys.executable, os.path.abspath(__file__), "--rank", str(rank), "--ranks", str(ranks), "--meet", f"{folder}/meet"]  # fmt: skip
    return [*line, *(["--small"] if small else []), *more]


# -- the cases --------------------------------------------------------------------------------------------------------


@functools.cache
def run_ranks(ranks: int, small: bool) -> list[str]:
    """What each said."""
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(rank_line(rank, ranks, folder, small), env=os.environ | CUBLAS,
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
        for name, kind in (("--meet", str), ("--nonce", str), ("--rank", int), ("--ranks", int), ("--steps", int), ("--seconds-per-step", float)):  # fmt: skip
            parser.add_argument(name, type=kind, default=0)
        parser.add_argument("--small", action="store_true")
        return be_rank(parser.parse_args())
    if "--job" in sys.argv or "--reference" in sys.argv:
        return whole_job()
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
