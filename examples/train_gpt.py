# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT, byte by byte, on the sources of Python's standard library. Plain PyTorch.

python examples/train_gpt.py --steps 60
"""

import argparse
import hashlib
import os
import sysconfig
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

CONTEXT = 128
TEXT_BYTES = 4 << 20


def read_text() -> torch.Tensor:
    """The first 4 MiB of the standard library's modules, in the order of their names."""
    folder = sysconfig.get_paths()["stdlib"]
    text = bytearray()
    for name in sorted(os.listdir(folder)):
        if name.endswith(".py"):
            with open(os.path.join(folder, name), "rb") as file:
                text += file.read()
    return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8)


class Pieces(Dataset):
    """Pieces of text from places that only the seed decides; the target is the next byte."""

    def __init__(self, text: torch.Tensor, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.text = text
        self.places = torch.randint(0, len(text) - CONTEXT - 1, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = int(self.places[i])
        piece = self.text[start : start + CONTEXT + 1].long()
        return piece[:-1], piece[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (
            t.view(shape).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(y, self.dropout, self.training)
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


class GPT(nn.Module):
    def __init__(
        self, width: int = 128, layers: int = 4, heads: int = 4, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.apply(self.initialise)

    @staticmethod
    def initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bytes(x) + self.places(torch.arange(x.shape[1], device=x.device))
        y = F.dropout(y, self.dropout, self.training)
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0, help="processes of the DataLoader")
    parser.add_argument("--every", type=int, default=10, help="steps between two lines of output")
    options = parser.parse_args()

    run = os.urandom(4).hex()  # tells this process from every other one
    torch.manual_seed(1337)
    device = torch.device(options.device)
    pieces = Pieces(read_text(), options.steps * options.batch)
    loader = DataLoader(
        pieces,
        batch_size=options.batch,
        num_workers=options.workers,
        pin_memory=device.type == "cuda",
    )
    model = GPT().to(device) if device.type == "cpu" else GPT().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    size = sum(p.numel() for p in model.parameters())
    print(
        f"run {run}: {size / 1e6:.2f} M parameters on {name}, {len(pieces.text) / 2**20:.1f} MiB of text",
        flush=True,
    )

    losses: list[torch.Tensor] = []
    start = last = time.perf_counter()
    printed = 0
    for step, (x, y) in enumerate(loader, 1):
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if step % options.every == 0 or step == options.steps:
            value, now = loss.item(), time.perf_counter()
            each = (now - last) / (step - printed)
            print(
                f"run {run}  step {step:4d}  loss {value:.6f}  {each * 1e3:.1f} ms/step", flush=True
            )
            last, printed = now, step
    total = time.perf_counter() - start
    mean = torch.stack(losses[-10:]).mean().item()
    print(
        f"{options.steps} steps in {total:.1f} s ({total / options.steps * 1e3:.1f} ms/step), last losses {mean:.4f}"
    )
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    print(f"parameters sha256 {digest.hexdigest()[:32]}")
    if device.type == "cuda":
        print(f"device memory: {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB at most")


if __name__ == "__main__":
    main()
