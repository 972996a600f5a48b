# SPDX-License-Identifier: Apache-2.0
"""One side of the step-time comparison: trains a model, a few steps whenever it is told to.

    python tests/bench/steps.py MODEL cuda|cpu        reads a number of steps per line, answers with seconds per step

Run once in a plain process (cpu) and once under devproxy-run (cuda); the driver lets them take turns.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch"))

import torch
from torch import nn

import models


def trainer(name: str, device: str) -> Any:
    """A function that trains `steps` steps and returns seconds per step."""
    torch.manual_seed(0)
    model = models.MODELS[name]().to(device)
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer
    if name == "resnet":
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    batches = [models.batch(name, i) for i in range(8)]
    done = 0

    def train(steps: int) -> float:
        nonlocal done
        start = time.perf_counter()
        for _ in range(steps):
            x, y = (t.to(device) for t in batches[done % len(batches)])
            done += 1
            optimizer.zero_grad(set_to_none=True)
            out = model(x)
            loss = nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))
            loss.backward()
            if name not in ("resnet", "mlp"):
                nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps

    return train


def main() -> None:
    """Answers until its input ends."""
    torch.set_num_threads(1)
    train = trainer(sys.argv[1], sys.argv[2])
    train(2)
    print("ready", flush=True)
    for line in sys.stdin:
        print(f"{train(int(line)):.9f}", flush=True)


if __name__ == "__main__":
    main()
