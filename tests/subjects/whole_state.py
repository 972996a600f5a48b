# SPDX-License-Identifier: Apache-2.0
"""gpt.py's training, and at the end everything that it has become in one file: --save, for a comparison tensor by tensor."""

import random

import numpy
import torch
import torch.nn.functional as F
from common import Digest, Steps, device, options, seed
from gpt import GPT, Text
from torch import nn
from torch.utils.data import DataLoader


def main() -> None:
    o = options(__doc__, save="state.pt", batch=4, width=64, layers=2, length=32, samples=64)
    seed(1)
    where = device()
    model = GPT(o.width, o.layers, o.length).to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=o.steps)
    loader = DataLoader(
        Text(o.samples, o.length),
        batch_size=o.batch,
        shuffle=True,
        drop_last=True,
        pin_memory=where.type == "cuda",
    )
    losses, norms, order, drawn = [], [], [], []
    batches = iter(loader)
    steps = Steps(o)
    for _ in steps:
        try:
            numbers, text, noise = next(batches)
        except StopIteration:
            batches = iter(loader)
            numbers, text, noise = next(batches)
        order.append(numbers)
        text = text.to(where, non_blocking=True)
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))  # stays on the device
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        drawn.append(
            (random.random(), float(numpy.random.rand()), noise, torch.rand(3, device=where))
        )
        steps.say(f"samples {','.join(map(str, numbers.tolist()))}")
    torch.save(
        {
            "model": model.state_dict(),
            "gradients": [p.grad for p in model.parameters()],
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
            "losses": losses,
            "norms": norms,
            "order": order,
            "drawn": drawn,
            "random": random.getstate(),
            "numpy": numpy.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if where.type == "cuda" else [],
        },
        o.save,
    )
    digest = Digest()
    digest.add("losses", losses)
    digest.finish()


if __name__ == "__main__":
    main()
