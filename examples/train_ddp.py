# SPDX-License-Identifier: Apache-2.0
"""An ordinary data-parallel training script: nothing here knows of devproxy.

torchrun --nproc-per-node 4 examples/train_ddp.py trains a small GPT by DistributedDataParallel on 'nccl' and prints, at
its end, a digest of the parameters, equal on every rank and in every run.
"""

from __future__ import annotations

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCABULARY, CONTEXT, WIDTH, LAYERS = 256, 64, 64, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", torch.triu(torch.full((CONTEXT, CONTEXT), float("-inf")), 1))

    def forward(self, tokens: Tensor) -> Tensor:
        n = tokens.shape[1]
        x = self.tokens(tokens) + self.places(torch.arange(n, device=tokens.device))
        for block in self.blocks:
            x = block(x, self.mask[:n, :n])
        logits: Tensor = self.head(x)
        return logits


class Text(Dataset[Tensor]):
    """This file, cut into overlapping pieces."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            self.bytes = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self.bytes) - CONTEXT - 1) // 8

    def __getitem__(self, i: int) -> Tensor:
        return self.bytes[8 * i : 8 * i + CONTEXT + 1]


def digest(model: nn.Module) -> str:
    h = hashlib.sha256()
    for value in model.state_dict().values():
        h.update(value.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4, help="of each rank")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=5)
    options = parser.parse_args()

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed)

    text = Text(__file__)
    sampler: DistributedSampler[Tensor] = DistributedSampler(text, world, rank, seed=options.seed)
    loader = DataLoader(
        text, batch_size=options.batch, sampler=sampler, drop_last=True, pin_memory=True
    )
    model = DistributedDataParallel(GPT().to(device), device_ids=[device.index])
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    step, epoch = 0, 0
    while step < options.steps:
        sampler.set_epoch(epoch)
        for batch in loader:
            if step == options.steps:
                break
            batch = batch.to(device, non_blocking=True)
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % options.log_every == 0:
                mean = loss.detach().clone()
                dist.all_reduce(mean, dist.ReduceOp.AVG)
                if rank == 0:
                    print(f"step {step} loss {mean.item():.6f}", flush=True)
        epoch += 1

    mine = digest(model.module)
    every: list[str | None] = [None] * world
    dist.all_gather_object(every, mine)
    if rank == 0:
        same = "equal on all ranks" if len(set(every)) == 1 else f"NOT EQUAL: {every}"
        print(f"parameters {mine} {same}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
