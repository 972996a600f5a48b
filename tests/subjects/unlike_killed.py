# SPDX-License-Identifier: Apache-2.0
"""Three replicas without a communicator. One is killed between two steps, the others go on and print their digests.

python tests/subjects/unlike_killed.py GATE

Before that each rank makes GATE-RANK, and waits for GATE. They take their steps together, as a communicator would make them.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

RANKS, STEPS = 3, 14


def wait_for_others(steps: memoryview, number: int, step: int) -> None:
    """steps: by rank, the step that it is at."""
    steps[number] = step
    while min(steps) < step:
        time.sleep(0.001)


def rank_main(number: int, gate: Path, steps: memoryview) -> None:
    torch.set_num_threads(1)
    torch.cuda.set_device(number)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    data = torch.randn(8, 64).cuda()
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        model(data).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
        wait_for_others(steps, number, step)
        if step == 8:
            Path(f"{gate}-{number}").touch()
            while not gate.exists():
                time.sleep(0.01)
            if number == 1:
                steps[number] = STEPS
                os.kill(os.getpid(), signal.SIGKILL)
    hashed = hashlib.sha256()
    for p in model.parameters():
        hashed.update(p.detach().cpu().numpy().tobytes())
    os.write(1, f"{hashed.hexdigest()}\n".encode())


def main() -> None:
    pids = []
    steps = memoryview(mmap.mmap(-1, mmap.PAGESIZE))[:RANKS]
    for number in range(RANKS):
        pid = os.fork()
        if pid == 0:
            rank_main(number, Path(sys.argv[1]), steps)
            os._exit(0)
        pids.append(pid)
    ends = [os.waitpid(pid, 0)[1] for pid in pids]
    sys.exit(ends != [0, signal.SIGKILL, 0])


if __name__ == "__main__":
    main()
