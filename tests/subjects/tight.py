# SPDX-License-Identifier: Apache-2.0
"""Replicas whose parameters and optimizer states are most of their memory: several fit on one GPU when these are kept once.

python tests/subjects/tight.py RANKS FOLDER [SETS]

With SETS, rank r is a replica of those with the same r % SETS only, as where each of SETS ranks holds a part of the model.

Prints the digest of all losses, parameters and states of each rank. After GATED steps each rank waits for FOLDER/go, and at
the end, with TIGHT_HOLD, until FOLDER/hold is gone.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

STEPS, GATED, WIDTH, LAYERS = 8, 3, 2048, 3  # parameters: 4 bytes each, 48 MiB


def train(number: int, ranks: int, folder: Path, sets: int) -> str:
    torch.set_num_threads(1)
    torch.cuda.set_device(number)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("nccl", store=store, rank=number, world_size=ranks)
    own = number % sets
    groups = [dist.new_group(list(range(one, ranks, sets))) for one in range(sets)]
    torch.manual_seed(7 + own)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    hashed = hashlib.sha256()
    for step in range(STEPS):
        if step == GATED:
            torch.cuda.synchronize()
            (folder / f"at-gate-{number}").touch()
            while not (folder / "go").exists():
                time.sleep(0.01)
        g = torch.Generator().manual_seed(1000 * number + step)
        loss = model(torch.randn(4, WIDTH, generator=g).cuda()).square().mean()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, dist.ReduceOp.AVG, group=groups[own])
        # What the parts of the model exchange.
        dist.all_reduce(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        hashed.update(repr(float(loss.detach())).encode())
    for p in model.parameters():
        for t in (p.detach(), *optimizer.state[p].values()):
            hashed.update(t.cpu().numpy().tobytes())
    (folder / f"ended-{number}").touch()
    while os.environ.get("TIGHT_HOLD") and (folder / "hold").exists():
        time.sleep(0.01)
    dist.destroy_process_group()
    return hashed.hexdigest()[:16]


def main() -> None:
    ranks, folder = int(sys.argv[1]), Path(sys.argv[2])
    sets = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    pids = []
    for number in range(ranks):
        pid = os.fork()
        if pid == 0:
            (folder / f"digest-{number}").write_text(train(number, ranks, folder, sets))
            os._exit(0)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * ranks
    print(*((folder / f"digest-{number}").read_text() for number in range(ranks)), flush=True)


if __name__ == "__main__":
    main()
