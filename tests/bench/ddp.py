# SPDX-License-Identifier: Apache-2.0
"""Ranks that train a model under DDP, a few steps whenever they are told to.

python tests/bench/ddp.py MODEL RANKS FOLDER [cpu] [wait=SECONDS]

On 'cuda' over 'nccl', or on 'cpu' over 'gloo'. Reads a number of steps per line, answers with seconds per step. wait: before
each step each rank sleeps so long, as for a slow loader, and reads the loss after it, so that nothing hides the wait.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def rank_main(name: str, rank: int, ranks: int, folder: str, told: int, answers: int) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch"))
    import torch
    import torch.distributed as dist
    from torch import nn

    import models

    torch.set_num_threads(1)
    torch.manual_seed(0)
    on_cpu = "cpu" in sys.argv
    wait_s = sum(float(word.removeprefix("wait=")) for word in sys.argv if word.startswith("wait="))
    device = torch.device("cpu") if on_cpu else torch.device("cuda", rank)
    if not on_cpu:
        torch.cuda.set_device(rank)
    store = dist.FileStore(os.path.join(folder, "store"), ranks)
    backend = "gloo" if on_cpu else "nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    model = nn.parallel.DistributedDataParallel(models.MODELS[name]().to(device))
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    if name == "resnet":
        optimizer = torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
    batches = [models.batch(name, 8 * rank + i) for i in range(8)]
    with os.fdopen(told) as lines, os.fdopen(answers, "w") as out:
        for line in lines:
            start = time.perf_counter()
            for i in range(int(line)):
                time.sleep(wait_s)
                x, y = (t.to(device) for t in batches[i % len(batches)])
                optimizer.zero_grad(set_to_none=True)
                seen = model(x)
                loss = nn.functional.cross_entropy(seen.reshape(-1, seen.shape[-1]), y.reshape(-1))
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                if wait_s:
                    loss.item()
            if not on_cpu:
                torch.cuda.synchronize()
            out.write(f"{(time.perf_counter() - start) / int(line)}\n")
            out.flush()
    dist.destroy_process_group()


def main() -> None:
    """Answers until its input ends: the slowest rank's time."""
    name, ranks, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    pids, tell, hear = [], [], []
    for rank in range(ranks):
        told, teller = os.pipe()
        heard, answers = os.pipe()
        pid = os.fork()
        if pid == 0:
            for other in [teller, heard, *tell]:
                os.close(other)
            rank_main(name, rank, ranks, folder, told, answers)
            os._exit(0)
        os.close(told)
        os.close(answers)
        pids.append(pid)
        tell.append(teller)
        hear.append(os.fdopen(heard))
    for line in sys.stdin:
        for pipe in tell:
            os.write(pipe, line.encode())
        print(max(float(pipe.readline()) for pipe in hear), flush=True)
    for pipe in tell:
        os.close(pipe)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * ranks


if __name__ == "__main__":
    main()
