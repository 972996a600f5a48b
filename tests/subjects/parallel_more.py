# SPDX-License-Identifier: Apache-2.0
"""More ways for tests/subjects/parallel.py: several kinds of parallelism at once, graphs, compiled code, evaluations."""

from __future__ import annotations

import gate
import torch
import torch.distributed as dist
from parallel_common import BATCH, WIDTH, Step, adam, data, net
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

EPOCH = 10  # steps
EVALUATION = 20  # batches
WARM_UP = 11  # torch's notes on CUDA graphs: DDP needs as many steps before a capture


def interleaved() -> tuple[nn.Module, Step]:
    """Interleaved 1F1B: rank r has the stages r and ranks + r."""
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

    rank, ranks = dist.get_rank(), dist.get_world_size()
    here = torch.device("cuda", torch.cuda.current_device())
    parts, stages = [], []
    for number in (rank, ranks + rank):
        torch.manual_seed(number)
        parts.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()).cuda())
        stages.append(PipelineStage(parts[-1], number, 2 * ranks, here))
    schedule = ScheduleInterleaved1F1B(
        stages, n_microbatches=4, loss_fn=lambda out, target: F.mse_loss(out, target)
    )
    model = nn.ModuleList(parts)
    optimizer = adam(model)

    def step(number: int) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        inputs = (data(number, 0),) if rank == 0 else ()
        if rank == ranks - 1:
            schedule.step(*inputs, target=data(number, 1), losses=losses)
        else:
            schedule.step(*inputs)
        optimizer.step()
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device="cuda")

    return model, step


def threed() -> tuple[nn.Module, Step]:
    """Data x pipeline x tensor: 2 x 2 x 2 for eight ranks, 1 x 2 x 2 for four. FSDP2 over the data dimension."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    shape = (dist.get_world_size() // 4, 2, 2)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("dp", "pp", "tp"))
    copy, place = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
    here = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(place)
    model = nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
    ).cuda()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    stage = PipelineStage(model, place, 2, here, group=mesh["pp"].get_group())
    schedule = Schedule1F1B(
        stage, n_microbatches=4, loss_fn=lambda out, target: F.mse_loss(out, target)
    )
    optimizer = adam(model)

    def step(number: int) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        if place == 0:
            schedule.step(data(number, copy))
        else:
            schedule.step(target=data(number, copy, 1), losses=losses)
        optimizer.step()
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device="cuda")

    return model, step


def compiled() -> tuple[nn.Module, Step]:
    """torch.compile over DDP. The software GPU runs no code of Inductor's, so Inductor compiles what is on the host alone:
    here the augmentation of the batch."""
    ddp = nn.parallel.DistributedDataParallel(net(), device_ids=[torch.cuda.current_device()])
    model = torch.compile(ddp, backend="aot_eager")
    optimizer = adam(ddp)

    @torch.compile(dynamic=False)
    def augment(batch: Tensor, noise: Tensor) -> Tensor:
        return (batch + 0.1 * noise).clamp(-2, 2) * 1.5

    @torch.compile(backend="aot_eager")
    def loss_of(out: Tensor, target: Tensor) -> Tensor:
        return F.smooth_l1_loss(out, target) + 1e-3 * out.square().mean()

    def step(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        batch, noise = torch.randn(2, BATCH, WIDTH, generator=generator)
        batch = augment(batch, noise).cuda()
        loss = loss_of(model(batch), batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return ddp, step


def graphs() -> tuple[nn.Module, Step]:
    """The whole step under DDP in one CUDA graph, its collectives too, as torch's notes on CUDA graphs do it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model = nn.parallel.DistributedDataParallel(net(), device_ids=[torch.cuda.current_device()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)
    batch = data(0, dist.get_rank())
    total = torch.zeros((), device="cuda")

    def train() -> Tensor:
        loss = F.dropout(model(batch), 0.1).square().mean()
        loss.backward()
        optimizer.step()
        total.copy_(loss.detach())
        dist.all_reduce(total)
        return loss

    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            optimizer.zero_grad(set_to_none=True)
            train()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train()

    def step(number: int) -> Tensor:
        batch.copy_(data(number, dist.get_rank()))
        graph.replay()
        # The graph holds addresses: the optimizer, whose state they are of, must live as long.
        steps = [state["step"] for state in optimizer.state.values()]
        return loss.detach() + total + torch.stack(steps).sum()

    return model, step


def evaluate() -> tuple[nn.Module, Step]:
    """Between epochs rank 0 evaluates for some seconds. The others wait in a barrier, or in the next step's all_reduce."""
    model = nn.parallel.DistributedDataParallel(net(), device_ids=[torch.cuda.current_device()])
    optimizer = adam(model)

    def evaluation(number: int) -> Tensor:
        errors = []
        model.eval()
        with torch.no_grad():
            for part in range(EVALUATION):
                errors.append(model.module(data(number, 99, part)).square().mean())
                gate.pause(0.15)
        model.train()
        return torch.stack(errors).mean()

    def step(number: int) -> Tensor:
        loss = model(data(number, dist.get_rank())).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        result = loss.detach()
        if number % EPOCH == 0:
            if dist.get_rank() == 0:
                result = result + evaluation(number)
            if number % (2 * EPOCH) == 0:
                dist.barrier()
        return result

    return model, step


WAYS = (interleaved, threed, compiled, graphs, evaluate)
