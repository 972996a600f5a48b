# SPDX-License-Identifier: Apache-2.0
"""Data-parallel ranks that train a GPT, and stop where somebody counts launches.

python tests/subjects/counted.py RANKS FOLDER

Each rank says at-STAGE-RANK and waits for go-STAGE: behind some steps (warm), behind a forward and a backward (backward-K),
behind the optimizer's step (step-K).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT
from torch.nn import functional as F

WARM, COUNTED, LENGTH = 8, 3, 32  # steps; of a text


def rank_main(number: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.cuda.set_device(number)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("nccl", store=store, rank=number, world_size=ranks)
    torch.manual_seed(5)
    model = GPT(64, 2, LENGTH).cuda()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    torch.cuda.manual_seed(number)  # of the dropouts

    def stand(stage: str) -> None:
        torch.cuda.synchronize()
        (folder / f"at-{stage}-{number}").touch()
        while not (folder / f"go-{stage}").exists():
            time.sleep(0.005)

    for step in range(WARM + COUNTED):
        if step == WARM:
            stand("warm")
        g = torch.Generator().manual_seed(1000 * number + step)
        text = torch.randint(0, 256, (4, LENGTH + 1), generator=g).cuda()
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for p in parameters:
            dist.all_reduce(p.grad, dist.ReduceOp.AVG)
        if step >= WARM:
            stand(f"backward-{step - WARM}")
        optimizer.step()
        if step >= WARM:
            stand(f"step-{step - WARM}")
    dist.destroy_process_group()


def main() -> None:
    ranks, folder = int(sys.argv[1]), Path(sys.argv[2])
    pids = []
    for number in range(ranks):
        pid = os.fork()
        if pid == 0:
            rank_main(number, ranks, folder)
            os._exit(0)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * ranks


if __name__ == "__main__":
    main()
