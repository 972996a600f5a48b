# SPDX-License-Identifier: Apache-2.0
"""A small GPT: AdamW, dropout, gradient clipping, a schedule, a shuffling DataLoader with 0 or more workers."""

import sys

import torch
import torch.nn.functional as F
from common import Digest, Steps, device, options, seed
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Text(Dataset):
    """Numbered pieces of a text that only the number decides; the number is given back too."""

    def __init__(self, count: int, length: int) -> None:
        self.count, self.length = count, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int):
        g = torch.Generator().manual_seed(i)
        piece = torch.randint(0, 256, (self.length + 1,), generator=g)
        # The workers' own generators are in it too: they have to come back with their processes.
        return i, piece, torch.rand(())


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (
            t.view(shape).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(y, 0.1, self.training)
        return x + F.dropout(self.mlp(self.norm2(x)), 0.1, self.training)


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, x):
        y = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y))


def main() -> None:
    o = options(
        __doc__, workers=0, batch=4, width=64, layers=2, length=32, samples=64, save="", host_mib=0
    )
    seed(1)
    where = device()
    ballast = torch.arange(o.host_mib << 17) if o.host_mib else None  # host memory, for timings
    model = GPT(o.width, o.layers, o.length).to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=o.steps)
    loader = DataLoader(
        Text(o.samples, o.length),
        batch_size=o.batch,
        shuffle=True,
        num_workers=o.workers,
        drop_last=True,
        pin_memory=where.type == "cuda",
        persistent_workers=o.workers > 0,
    )
    losses, order = [], []
    batches = iter(loader)
    steps = Steps(o)
    for _ in steps:
        try:
            numbers, text, noise = next(batches)
        except StopIteration:
            batches = iter(loader)
            numbers, text, noise = next(batches)
        order.append((numbers.tolist(), noise.tolist()))
        text = text.to(where, non_blocking=True)
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        steps.say(f"loss {losses[-1]:.6f} samples {','.join(map(str, order[-1][0]))}")
    if ballast is not None and int(ballast[-1]) != len(ballast) - 1:
        sys.exit("the host memory has changed")
    if o.save:  # for the comparison of sizes
        torch.save((model.state_dict(), optimizer.state_dict()), o.save)
    digest = Digest()
    digest.add("model", model.state_dict())
    digest.add("optimizer", optimizer.state_dict())
    digest.add("schedule", schedule.state_dict())
    digest.add("losses", losses)
    digest.add("order", order)
    digest.add_random_states()
    digest.finish()


if __name__ == "__main__":
    main()
