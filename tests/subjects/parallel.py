# SPDX-License-Identifier: Apache-2.0
"""Training on several ranks in the ways that people do it, over 'nccl' under torchrun. --way says which. Rank 0 speaks.

launcher.py does the same without torchrun.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from typing import Any

import common
import parallel_more
import torch
import torch.distributed as dist
from parallel_common import WIDTH, Step, adam, data, net, simple
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F


def ddp() -> tuple[nn.Module, Step]:
    """Gradient accumulation under no_sync, BatchNorm's buffers, an evaluation on rank 0 between epochs."""
    model = nn.parallel.DistributedDataParallel(
        net(norm=True), device_ids=[torch.cuda.current_device()]
    )
    optimizer = adam(model)

    def step(number: int) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device="cuda")
        for part in range(3):
            with model.no_sync() if part < 2 else contextlib.nullcontext():
                loss = model(data(number, dist.get_rank(), part)).square().mean()
                loss.backward()
                total += loss.detach()
        optimizer.step()
        if number % 7 == 0 and dist.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                total += model.module(data(number, 99)).square().mean()
            model.train()
        return total

    return model, step


def join() -> tuple[nn.Module, Step]:
    """Ranks with unequal numbers of batches."""
    model = nn.parallel.DistributedDataParallel(net(), device_ids=[torch.cuda.current_device()])
    optimizer = adam(model)

    def step(number: int) -> Tensor:
        loss = torch.zeros((), device="cuda")
        with model.join():
            for part in range(1 + (dist.get_rank() + number) % 2):
                loss = model(data(number, dist.get_rank(), part)).square().mean()
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
        return loss.detach()

    return model, step


def fsdp2() -> tuple[nn.Module, Step]:
    from torch.distributed.fsdp import fully_shard

    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model, simple(model, adam(model))


def hsdp() -> tuple[nn.Module, Step]:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(
        "cuda", (2, dist.get_world_size() // 2), mesh_dim_names=("copy", "shard")
    )
    model = net()
    fully_shard(model, mesh=mesh)
    return model, simple(model, adam(model))


def zero1() -> tuple[nn.Module, Step]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(net(), device_ids=[torch.cuda.current_device()])
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    return model, simple(model, optimizer)


def tensor() -> tuple[nn.Module, Step]:
    """torch's own tensor parallel layers."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
    ).cuda()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = adam(model)

    def step(number: int) -> Tensor:
        loss = model(data(number, 0)).square().mean()  # the same batch at every rank
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


class _Copy(torch.autograd.Function):
    """Megatron's f: nothing forward, the sum over the ranks backward."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Sum(torch.autograd.Function):
    """Megatron's g: the sum over the ranks forward, nothing backward."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad


def megatron() -> tuple[nn.Module, Step]:
    """A tensor parallel layer written by hand."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            part = 2 * WIDTH // dist.get_world_size()
            self.up, self.down = nn.Linear(WIDTH, part), nn.Linear(part, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = _Sum.apply(self.down(F.gelu(self.up(_Copy.apply(x)))))
            return x + out

    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(Layer(), Layer()).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(number: int) -> Tensor:
        loss = model(data(number, 0)).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


def pipeline() -> tuple[nn.Module, Step]:
    """1F1B, a stage on each rank."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # batch_isend_irecv: the first call of a group is every rank's
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()).cuda()
    stage = PipelineStage(model, rank, ranks, torch.device("cuda", torch.cuda.current_device()))
    schedule = Schedule1F1B(
        stage, n_microbatches=4, loss_fn=lambda out, target: F.mse_loss(out, target)
    )
    optimizer = adam(model)

    def step(number: int) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(data(number, 0))
        elif rank == ranks - 1:
            schedule.step(target=data(number, 1), losses=losses)
        else:
            schedule.step()
        optimizer.step()
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device="cuda")

    return model, step


def custom() -> tuple[nn.Module, Step]:
    """No optimizer: an exchange of averages and a hand-written update, with sends to the next rank."""
    model = net()
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def step(number: int) -> Tensor:
        loss = model(data(number, rank)).square().mean()
        loss.backward()
        work = []
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                work.append(dist.all_reduce(p.grad, dist.ReduceOp.AVG, async_op=True))
            for one in work:
                one.wait()
            for p in model.parameters():
                assert p.grad is not None
                p -= 0.1 * p.grad
                p.grad = None
            received = torch.empty_like(loss)
            ops = [dist.P2POp(dist.isend, loss.detach(), (rank + 1) % ranks),
                   dist.P2POp(dist.irecv, received, (rank - 1) % ranks)]  # fmt: skip
            for one in dist.batch_isend_irecv(ops):
                one.wait()
        return received

    return model, step


WAYS = {
    f.__name__: f
    for f in (
        ddp,
        join,
        fsdp2,
        hsdp,
        zero1,
        tensor,
        megatron,
        pipeline,
        custom,
        *parallel_more.WAYS,
    )
}


MORE: dict[str, Any] = {"way": "ddp", "timeout_s": 0.0}


def main() -> None:
    options = common.options(__doc__ or "", **MORE) if os.environ["RANK"] == "0" else quiet()
    # timeout_s: of the process group; 0 leaves it as it is
    limit = {"timeout": datetime.timedelta(seconds=options.timeout_s)} if options.timeout_s else {}
    train(options, int(os.environ["LOCAL_RANK"]), **limit)


def train(options: Any, local_rank: int, **world: Any) -> None:
    """world: what init_process_group cannot find in the environment."""
    common.seed(1)
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    torch.cuda.init()  # else a DeviceMesh sets the device $LOCAL_RANK, and ranks may outnumber the GPUs
    dist.init_process_group("nccl", **world)
    model, one_step = WAYS[options.way]()
    digest = common.Digest()
    marks: list[str] = []  # of the losses so far: where two runs part
    numbers: Any = common.Steps(options) if dist.get_rank() == 0 else range(1, options.steps + 1)
    for number in numbers:
        loss = one_step(number)
        digest.add("loss", loss)
        marks.append(digest.hash.hexdigest()[:4])
        if dist.get_rank() == 0:
            numbers.say(f"loss {loss.item():.6f}")
    for name, value in model.state_dict().items():
        digest.add(name, value.to_local() if hasattr(value, "to_local") else value)
    print(f"marks of rank {dist.get_rank()}: {' '.join(marks)}\n", end="", flush=True)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, digest.hash.hexdigest())
    if dist.get_rank() == 0:
        digest.add("ranks", everyone)
        digest.finish()
    dist.destroy_process_group()


def quiet() -> Any:
    """The same options, and no word."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        return common.options("", **MORE)


if __name__ == "__main__":
    main()
