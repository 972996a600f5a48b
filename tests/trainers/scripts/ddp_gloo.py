# SPDX-License-Identifier: Apache-2.0
"""torchrun, two ranks on the CPU with gloo: DistributedDataParallel, a DistributedSampler, rank 0 saves."""

import argparse

import report
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--epochs", type=int, default=6)
    o = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(10)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 5))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(11)
    data = TensorDataset(
        torch.rand(320, 20, generator=generator), torch.randint(5, (320,), generator=generator)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    step = 0
    for epoch in range(o.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            step += 1
            if rank == 0:
                report.step(step, f"loss {loss.item():.6f}")
        if rank == 0:
            torch.save(model.module.state_dict(), f"{o.out}-ddp-{epoch}.pt")
        dist.barrier()
    if rank == 0:
        report.digest(model=model.module.state_dict(), optimizer=optimizer.state_dict()["state"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
