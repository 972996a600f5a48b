# SPDX-License-Identifier: Apache-2.0
"""Trains a small model for a few steps, on cuda or cpu, and saves every loss, parameter and buffer.

    python tests/torch/models.py --model gpt --device cuda --out a.pt      under devproxy-run
    python tests/torch/models.py --model gpt --device cpu --out b.pt       in a plain process

With --device cpu random ops are seeded as the software GPU seeds them (mix.py), so that both are bitwise equal.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mix import CudaRandomNumbers

SEED = 1


class ResidualBlock(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        self.down: nn.Module = nn.Identity()
        if stride != 1 or inner != outer:
            self.down = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)), inplace=True)))
        return F.relu(y + self.down(x), inplace=True)


class ResNet18(nn.Module):
    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks: list[nn.Module] = []
        width = 64
        for outer, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [ResidualBlock(width, outer, stride), ResidualBlock(outer, outer)]
            width = outer
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, fused: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.heads, self.fused = heads, fused

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).split(width, 2)
        q, k, v = (
            t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in parts
        )
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5
            visible = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            y = self.dropout(scores.masked_fill(~visible, float("-inf")).softmax(-1)) @ v
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


class GPT(nn.Module):
    def __init__(
        self,
        dropout: float,
        fused: bool,
        vocabulary: int = 512,
        length: int = 64,
        width: int = 128,
        depth: int = 4,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4, dropout, fused) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device)))
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y))


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(100, 64)
        self.lstm = nn.LSTM(64, 128, 2, batch_first=True)
        self.head = nn.Linear(128, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(x))[0])


class GRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(100, 64)
        self.gru = nn.GRU(64, 64, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(128, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.tokens(x))[0])


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


MODELS: dict[str, Any] = {
    "resnet": ResNet18,
    "gpt": lambda: GPT(dropout=0.0, fused=False),
    "gpt-17m": lambda: GPT(dropout=0.0, fused=False, vocabulary=2048, width=512, depth=5),
    "gpt-dropout": lambda: GPT(dropout=0.1, fused=False),
    "gpt-sdpa": lambda: GPT(dropout=0.0, fused=True),
    "lstm": LSTM,
    "gru": GRU,
    "mlp": MLP,
}


def batch(name: str, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, made on the CPU by a generator of their own."""
    g = torch.Generator().manual_seed(100 + step)
    if name == "resnet":
        return torch.randn(4, 3, 64, 64, generator=g), torch.randint(0, 10, (4,), generator=g)
    if name == "mlp":
        return torch.randn(1, 64, generator=g), torch.randint(0, 10, (1,), generator=g)
    vocabulary, length = (512, 65) if name.startswith("gpt") else (100, 33)
    rows = 2 if name == "gpt-17m" else 8
    tokens = torch.randint(0, vocabulary, (rows, length), generator=g)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(name: str, device: str, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = MODELS[name]().to(device)
    parameters = list(model.parameters())
    if name == "resnet":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            parameters, lr=0.05, momentum=0.9, weight_decay=1e-4
        )
    else:
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    torch.manual_seed(SEED)
    reference = (
        CudaRandomNumbers(SEED)
        if device == "cpu" and "dropout" in name
        else contextlib.nullcontext()
    )
    losses, times = [], []
    with reference:
        for step in range(steps):
            start = time.perf_counter()
            x, y = (t.to(device) for t in batch(name, step))
            optimizer.zero_grad(set_to_none=True)
            out = model(x)
            loss = F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))
            loss.backward()
            if name != "resnet":
                nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            losses.append(loss.detach())
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    state = {key: value.cpu() for key, value in model.state_dict().items()}
    moments = {
        f"optimizer.{i}.{key}": value.cpu()
        for i, p in enumerate(parameters)
        for key, value in optimizer.state[p].items()
        if isinstance(value, Tensor)
    }
    return {"losses": torch.stack(losses).cpu(), "state": {**state, **moments}, "times_s": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    names = list(MODELS) if options.model == "all" else [options.model]
    results = {name: train(name, options.device, options.steps) for name in names}
    for name, result in results.items():
        fast = sorted(result["times_s"])[len(result["times_s"]) // 2]
        print(
            f"{name}: loss {result['losses'][-1].item():.6f}, {fast * 1e3:.2f} ms/step", flush=True
        )
    if options.out:
        torch.save(results, options.out)


if __name__ == "__main__":
    main()
