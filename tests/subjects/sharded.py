# SPDX-License-Identifier: Apache-2.0
"""Programs for unlike.py whose ranks hold parts of a model, and some of them the same part."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

if TYPE_CHECKING:
    from unlike import Rank

WIDTH = 256


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)).cuda()


def data(step: int, number: int) -> Tensor:
    g = torch.Generator().manual_seed(1000 * number + step)
    return torch.randn(8, WIDTH, generator=g).cuda()


def train(r: Rank, model: nn.Module, update: Callable[[], object]) -> list[Tensor]:
    losses = []
    for step in range(r.steps):
        loss = model(data(step, r.number)).square().mean()
        for p in r.parameters:
            p.grad = None
        loss.backward()
        update()
        losses.append(loss.detach())
    return losses


def hsdp(r: Rank) -> list[Tensor]:
    """Two copies of a model, each sharded over half of the ranks."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cuda", (2, r.all // 2), mesh_dim_names=("copy", "shard"))
    model = net()
    fully_shard(model, mesh=mesh)
    r.parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(r.parameters, lr=1e-3)
    r.keep.append(optimizer)
    return train(r, model, optimizer.step)


def compiled(r: Rank) -> list[Tensor]:
    """All ranks have the same. The model and the step are kernels of Inductor's."""
    model = torch.compile(net())
    model = nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
    r.parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(r.parameters, lr=1e-3)
    r.keep.append(optimizer)
    return train(r, model, torch.compile(optimizer.step))


def compiled_rates(r: Rank) -> list[Tensor]:
    """In the last step each rank has a rate of its own, a constant in its kernel. The kernels have one name, and read and
    write alike."""
    model = nn.parallel.DistributedDataParallel(net(), device_ids=[torch.cuda.current_device()])
    r.parameters = list(model.parameters())
    rates = iter([0.1] * (r.steps - 1) + [0.1 * (1 + r.number)])

    @torch.compile(dynamic=False)
    @torch.no_grad()
    def step(rate: float) -> None:
        for p in r.parameters:
            assert p.grad is not None
            p.sub_(p.grad * rate)

    return train(r, model, lambda: step(next(rates)))


def zero1(r: Rank) -> list[Tensor]:
    """Each half of the ranks shards the optimizer's states over itself; all have all parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    half = r.all // 2
    groups = [dist.new_group(list(range(k * half, (k + 1) * half))) for k in range(2)]
    model = nn.parallel.DistributedDataParallel(net(), device_ids=[torch.cuda.current_device()])
    r.parameters = list(model.parameters())
    optimizer = ZeroRedundancyOptimizer(
        r.parameters, torch.optim.AdamW, process_group=groups[r.number // half], lr=1e-3
    )
    r.keep.append(optimizer.optim)
    return train(r, model, optimizer.step)


def threed(r: Rank) -> list[Tensor]:
    """Data x pipeline x tensor, two of each: two ranks hold the same."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cuda", (r.all // 4, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    copy, place = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
    torch.manual_seed(place)
    model = net()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    r.parameters = list(model.parameters())
    here = torch.device("cuda", torch.cuda.current_device())
    stage = PipelineStage(model, place, 2, here, group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(r.parameters, lr=1e-3)
    r.keep.append(optimizer)
    losses: list[Tensor] = []
    for step in range(r.steps):
        optimizer.zero_grad(set_to_none=True)
        if place == 0:
            schedule.step(data(step, copy))
        else:
            of_step: list[Tensor] = []
            schedule.step(target=data(step, 10 + copy), losses=of_step)
            losses += [loss.detach() for loss in of_step]
        for p in r.parameters:
            grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            dist.all_reduce(grad, dist.ReduceOp.AVG, group=mesh["dp"].get_group())
        optimizer.step()
    return losses


PROGRAMS: dict[str, Callable[[Rank], list[Tensor]]] = {
    f.__name__: f for f in (hsdp, compiled, compiled_rates, zero1, threed)
}
