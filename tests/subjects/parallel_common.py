# SPDX-License-Identifier: Apache-2.0
"""What the ways of tests/subjects/parallel.py share: a small net, its data, a plain step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, BATCH = 32, 8
Step = Callable[[int], Tensor]


def data(step: int, rank: int, part: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
    return torch.randn(BATCH, WIDTH, generator=generator).cuda()


def net(norm: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(WIDTH, 2 * WIDTH)]
    if norm:
        layers.append(nn.BatchNorm1d(2 * WIDTH))
    return nn.Sequential(*layers, nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).cuda()  # fmt: skip


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def simple(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(number: int) -> Tensor:
        loss = model(data(number, dist.get_rank())).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
