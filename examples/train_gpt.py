"""Trains a small byte-level GPT on the sources of Python's standard library. Plain PyTorch; nothing of devproxy.

python examples/train_gpt.py --steps 60 [--device cpu]
"""

import argparse
import hashlib
import os
import statistics
import sysconfig
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Text(Dataset):
    """Windows of the corpus: item i is `block` bytes and the same shifted by one."""

    def __init__(self, block, limit=2_000_000):
        folder = sysconfig.get_paths()["stdlib"]
        data = b""
        for name in sorted(n for n in os.listdir(folder) if n.endswith(".py")):
            with open(os.path.join(folder, name), "rb") as f:
                data += f.read()
            if len(data) >= limit:
                break
        self.data = torch.frombuffer(bytearray(data[:limit]), dtype=torch.uint8)
        self.block = block

    def __len__(self):
        return (len(self.data) - 1) // self.block

    def __getitem__(self, i):
        piece = self.data[i * self.block : (i + 1) * self.block + 1].long()
        return piece[:-1], piece[1:]


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.drop = heads, nn.Dropout(dropout)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(w, 2)
        q, k, v = (y.view(b, t, self.heads, w // self.heads).transpose(1, 2) for y in (q, k, v))
        score = q @ k.transpose(-2, -1) * (w // self.heads) ** -0.5
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        score = score.masked_fill(~mask, float("-inf")).softmax(-1)
        y = (self.drop(score) @ v).transpose(1, 2).reshape(b, t, w)
        x = x + self.drop(self.out(y))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, block, width, heads, layers, dropout):
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(block, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, ids):
        x = self.token(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--block", type=int, default=128, help="bytes of context")
    p.add_argument("--width", type=int, default=128)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--workers", type=int, default=0, help="DataLoader worker processes")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--every", type=int, default=10, help="print each so many steps")
    args = p.parse_args()

    torch.manual_seed(args.seed)
    text = Text(args.block)
    pin = args.device == "cuda"
    loader = DataLoader(
        text, args.batch, shuffle=True, drop_last=True, num_workers=args.workers, pin_memory=pin
    )
    model = GPT(args.block, args.width, 4, args.layers, dropout=0.1)
    if args.device == "cuda":
        model = model.cuda()
        print(f"device {torch.cuda.get_device_name()}, torch {torch.__version__}")
    params = sum(w.numel() for w in model.parameters())
    print(f"{params:,} parameters, {len(text.data):,} bytes of text", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    step, times = 0, []
    while step < args.steps:
        for ids, targets in loader:
            began = time.perf_counter()
            ids = ids.to(args.device, non_blocking=True)
            targets = targets.to(args.device, non_blocking=True)
            loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            value = loss.item()
            times.append((time.perf_counter() - began) * 1e3)
            step += 1
            if step % args.every == 0 or step == args.steps:
                print(
                    f"step {step:4d}  loss {value:.6f}  {statistics.median(times[-args.every :]):.1f} ms/step",
                    flush=True,
                )
            if step == args.steps:
                break
    digest = hashlib.sha256()
    for w in model.parameters():
        digest.update(w.detach().cpu().numpy().tobytes())
    print(f"median {statistics.median(times):.1f} ms/step; parameters {digest.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
