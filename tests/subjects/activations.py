# SPDX-License-Identifier: Apache-2.0
"""Data-parallel ranks most of whose memory are the activations of a step, which do not fit beside those of another rank.

python tests/subjects/activations.py RANKS FOLDER [--layers N] [--meets] [--steps N]

--meets: the ranks also meet in the middle of each forward, so that all of them need their activations at the same time.
Prints the digest of all losses and parameters of each rank. Before GATED the ranks wait for FOLDER/go, if they are told to.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

GATED, ROWS, WIDTH = 2, 2048, 1024  # one activation: 8 MiB


def train(number: int, options: argparse.Namespace) -> str:
    folder: Path = options.folder
    torch.set_num_threads(1)
    torch.cuda.set_device(number)
    store = dist.FileStore(str(folder / "store"), options.ranks)
    dist.init_process_group("nccl", store=store, rank=number, world_size=options.ranks)
    torch.manual_seed(7)
    scales = [torch.nn.Parameter(torch.randn(WIDTH).cuda()) for _ in range(options.layers)]
    optimizer = torch.optim.SGD(scales, lr=1e-3, momentum=0.9)
    hashed = hashlib.sha256()
    for step in range(options.steps):
        if options.gated and step == GATED:
            torch.cuda.synchronize()
            (folder / f"at-gate-{number}").touch()
            while not (folder / "go").exists():
                time.sleep(0.01)
        optimizer.zero_grad()
        g = torch.Generator().manual_seed(1000 * number + step)
        x = torch.randn(ROWS, WIDTH, generator=g).cuda()
        for at, scale in enumerate(scales):
            x = torch.sin(
                x * scale
            )  # the product is kept for the backward, and x for the next one's
            if options.meets and at == options.layers // 2:
                mean = x.detach().mean()
                dist.all_reduce(mean)
                x = x - mean
        loss = x.square().mean()
        del x
        loss.backward()
        for p in scales:
            dist.all_reduce(p.grad, dist.ReduceOp.AVG)
        optimizer.step()
        hashed.update(repr(float(loss.detach())).encode())
    for p in scales:
        hashed.update(p.detach().cpu().numpy().tobytes())
    (folder / f"peak-{number}").write_text(str(torch.cuda.max_memory_allocated()))
    dist.destroy_process_group()
    return hashed.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--meets", action="store_true")
    parser.add_argument("--gated", action="store_true")
    parser.add_argument("--rank", type=int)
    options = parser.parse_args()
    if options.rank is not None:
        (options.folder / f"digest-{options.rank}").write_text(train(options.rank, options))
        return
    line = [sys.executable, *sys.argv, "--rank"]
    ranks = [subprocess.Popen([*line, str(number)]) for number in range(options.ranks)]
    if sum(rank.wait() != 0 for rank in ranks):
        sys.exit("a rank failed")
    texts = [(options.folder / f"digest-{number}").read_text() for number in range(options.ranks)]
    print(*texts, flush=True)


if __name__ == "__main__":
    main()
