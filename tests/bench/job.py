# SPDX-License-Identifier: Apache-2.0
"""The job that tests.bench.checkpoints looks at: a GPT with AdamW or a ResNet-18 with SGD, and ballast for timings.

    python tests/bench/job.py --model gpt|resnet [--width N ...] [--device-mib N] [--host-mib N] [--late 1]

Prints one line per step, as tests/subjects do. zero_grad comes first in a step, as in PyTorch's own examples; with
--late 1 after the forward, as some write it. --save FILE trains no further than one step and writes torch.save of model
and optimizer.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "subjects"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch"))

import gpt
import torch
import torch.nn.functional as F
from common import Steps, device, options, seed
from torch.utils.data import DataLoader

import models


def batches(o: Any, where: Any) -> Any:
    """Without end: pairs of inputs and targets on the device."""
    if o.model == "resnet":
        while True:
            x, y = torch.randn(o.batch, 3, 32, 32), torch.randint(0, 10, (o.batch,))
            yield x.to(where), y.to(where)
    loader = DataLoader(
        gpt.Text(o.samples, o.length),
        batch_size=o.batch,
        shuffle=True,
        num_workers=o.workers,
        drop_last=True,
        pin_memory=where.type == "cuda",
        persistent_workers=o.workers > 0,
    )
    while True:
        for _, text, _ in loader:
            text = text.to(where, non_blocking=True)
            yield text[:, :-1], text[:, 1:]


def main() -> None:
    """Trains until it is ended from outside, or has done its steps."""
    o = options(
        __doc__ or "", 1_000_000, model="gpt", workers=0, batch=4, width=64, layers=2, length=32, samples=256,
        save="", late=0, host_mib=0, device_mib=0,
    )  # fmt: skip
    seed(1)
    where = device()
    # Noise: what does not shrink is the store's worst case, and what weights look like.
    ballast = [torch.randn(o.host_mib << 18), torch.randn(o.device_mib << 18).to(where)]
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    if o.model == "resnet":
        model = models.ResNet18().to(where)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    else:
        model = gpt.GPT(o.width, o.layers, o.length).to(where)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    steps = Steps(o)
    source = batches(o, where)
    for _ in steps:
        x, y = next(source)
        if not o.late:
            optimizer.zero_grad(set_to_none=True)
        out = model(x)
        loss = F.cross_entropy(out.flatten(0, -2), y.flatten())
        if o.late:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        steps.say(f"loss {loss.item():.6f}")
        if o.save:
            torch.save((model.state_dict(), optimizer.state_dict()), o.save)
            return
    del ballast


if __name__ == "__main__":
    main()
