# SPDX-License-Identifier: Apache-2.0
"""Models in plain torch, trained for some steps on 'cuda': digests of losses, parameters and optimizer, bit for bit.

    python torch_models.py --json models.jsonl [--times 2]      natively, and under devproxy-run

A case is MODEL/WAY: how it is trained (optimizer, autocast, memory format, the attention kernel). torch_cost.py and
torch_train.py take their models from here.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_cases  # isort: skip

STEPS = 20


class MLP(nn.Module):
    def __init__(self, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.head(self.norm(x))


class Bottleneck(nn.Module):
    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        outer = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, outer, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip
        self.down: nn.Module = nn.Identity()
        if stride != 1 or inner != outer:
            self.down = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.down(x), inplace=True)


class ResNet(nn.Module):
    """ResNet-50 with (3, 4, 6, 3) blocks."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:  # fmt: skip
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        made: list[nn.Module] = []
        inner = width
        for number, count in enumerate(blocks):
            for n in range(count):
                stride = 2 if n == 0 and number else 1
                made.append(Bottleneck(inner, width << number, stride))
                inner = 4 * (width << number)
        self.blocks, self.head = nn.Sequential(*made), nn.Linear(inner, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Layer(nn.Module):
    """Of a transformer; causal: GPT-2's, normalised before; else BERT's, normalised behind."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal, self.rate = heads, causal, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for t in self.qkv(x).split(width, 2)
        )
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, dropout_p=self.rate if self.training else 0.0
        )
        return self.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width)))

    def forward(self, x: Tensor) -> Tensor:
        if self.causal:
            x = x + self.attention(self.norm1(x))
            return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Transformer(nn.Module):
    """GPT-2 small, or BERT base, with 12 layers of width 768."""

    def __init__(self, causal: bool, layers: int, width: int, heads: int, vocabulary: int, length: int, dropout: float = 0.0) -> None:  # fmt: skip
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads, dropout, causal) for _ in range(layers))
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device)))
        for layer in self.layers:
            y = layer(y)
        return self.head(self.norm(y))


class LSTM(nn.Module):
    def __init__(self, vocabulary: int = 100, width: int = 128, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, dropout=dropout)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(x))[0])


class UNet(nn.Module):
    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()

        def block(inner: int, outer: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(inner, outer, 3, padding=1), nn.GroupNorm(4, outer), nn.SiLU(),
                nn.Conv2d(outer, outer, 3, padding=1), nn.GroupNorm(4, outer), nn.SiLU(),
            )  # fmt: skip

        sizes = [width << n for n in range(depth + 1)]
        self.first = block(3, width)
        self.down = nn.ModuleList(block(a, b) for a, b in zip(sizes, sizes[1:], strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(sizes, sizes[1:], strict=False))  # fmt: skip
        self.merge = nn.ModuleList(block(2 * a, a) for a in sizes[:-1])
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = [self.first(x)]
        for down in self.down:
            kept.append(down(F.avg_pool2d(kept[-1], 2)))
        y = kept.pop()
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            y = merge(torch.cat([up(y), kept.pop()], 1))
        return self.head(y)


@dataclass(frozen=True)
class Subject:
    """A model and what it is fed: make(small), batch(small, generator) -> inputs and targets on the CPU."""

    make: Callable[[bool], nn.Module]
    batch: Callable[[bool, torch.Generator], tuple[Tensor, Tensor]]


def images(batch: int, side: int, classes: int) -> Callable[[bool, torch.Generator], tuple[Tensor, Tensor]]:  # fmt: skip
    def make(small: bool, g: torch.Generator) -> tuple[Tensor, Tensor]:
        n, s = (2, 32) if small else (batch, side)
        return torch.randn(n, 3, s, s, generator=g), torch.randint(0, classes, (n,), generator=g)

    return make


def texts(batch: int, length: int, vocabulary: int) -> Callable[[bool, torch.Generator], tuple[Tensor, Tensor]]:  # fmt: skip
    def make(small: bool, g: torch.Generator) -> tuple[Tensor, Tensor]:
        n, long = (2, 16) if small else (batch, length)
        drawn = torch.randint(0, min(vocabulary, 100), (n, long + 1), generator=g)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    return make


def rows(batch: int, width: int) -> Callable[[bool, torch.Generator], tuple[Tensor, Tensor]]:
    return lambda small, g: (torch.randn(batch, width, generator=g), torch.randint(0, 10, (batch,), generator=g))  # fmt: skip


def pictures(small: bool, g: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(2 if small else 4, 3, 16 if small else 64, 16 if small else 64, generator=g)
    return x, torch.randn(x.shape, generator=g)


def transformer(causal: bool, dropout: float, small: bool, layers: int = 4, width: int = 256, heads: int = 4, vocabulary: int = 1000, length: int = 128) -> nn.Module:  # fmt: skip
    if small:
        layers, width, heads, vocabulary, length = 2, 32, 2, 100, 16
    return Transformer(causal, layers, width, heads, vocabulary, length, dropout)


SUBJECTS = {
    "mlp": Subject(lambda small: MLP(), rows(32, 256)),
    "resnet": Subject(
        lambda small: ResNet((1, 1), 8, 10) if small else ResNet((2, 2, 2, 2), 32, 10),
        images(8, 64, 10),
    ),
    "bert": Subject(functools.partial(transformer, False, 0.0), texts(8, 128, 1000)),
    "gpt2": Subject(functools.partial(transformer, True, 0.0), texts(8, 128, 1000)),
    "gpt2_dropout": Subject(functools.partial(transformer, True, 0.1), texts(8, 128, 1000)),
    "lstm": Subject(lambda small: LSTM(), texts(16, 64, 100)),
    "lstm_dropout": Subject(lambda small: LSTM(dropout=0.2), texts(16, 64, 100)),
    "unet": Subject(lambda small: UNet(8, 2) if small else UNet(), pictures),
}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-4, foreach=False),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False, fused=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
}
ATTENTION = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Words of a way: an optimizer; bf16, fp16 (with a GradScaler): autocast; channels_last; clip; tf32; benchmark (cuDNN tries
# algorithms); an attention kernel. Without one of these attention takes what torch chooses.
WAYS = (
    "mlp/sgd", "resnet/sgd", "bert/adamw", "gpt2/adamw", "lstm/adamw", "unet/adamw",
    "mlp/adamw_fused", "mlp/adamw_foreach", "mlp/sgd_foreach", "mlp/adamw+tf32",
    "resnet/sgd+channels_last", "resnet/sgd+bf16+channels_last", "resnet/sgd+fp16", "resnet/sgd+tf32",
    "bert/adamw_fused+bf16", "gpt2/adamw_fused+bf16+clip", "gpt2/adamw_foreach+fp16+clip",
    "gpt2_dropout/adamw", "gpt2_dropout/adamw_fused+bf16",
    "gpt2/adamw+math", "gpt2/adamw+bf16+flash", "gpt2/adamw+efficient", "gpt2/adamw+bf16+cudnn",
    "gpt2_dropout/adamw+bf16+flash",
    "lstm_dropout/adamw", "lstm/adamw_fused+fp16", "unet/adamw_fused+bf16+channels_last",
    "resnet/sgd+benchmark",
)  # fmt: skip


@contextlib.contextmanager
def settings(way: set[str]) -> Iterator[None]:
    """torch's own defaults otherwise, put back at the end."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.benchmark, cudnn.deterministic, matmul.allow_tf32)
    cudnn.benchmark, cudnn.deterministic = "benchmark" in way, "benchmark" not in way
    matmul.allow_tf32 = "tf32" in way
    chosen = [ATTENTION[w] for w in way & set(ATTENTION)]
    try:
        with sdpa_kernel(chosen) if chosen else contextlib.nullcontext():
            yield
    finally:
        cudnn.benchmark, cudnn.deterministic, matmul.allow_tf32 = before


class Training:
    """One model and its optimizer, a step at a time."""

    def __init__(self, subject: Subject, way: set[str], small: bool, number: int, batches: int = 4) -> None:  # fmt: skip
        torch_cases.seed(number)
        self.way = way
        self.model = subject.make(small).cuda().train()
        self.format = torch.channels_last if "channels_last" in way else torch.contiguous_format
        if "channels_last" in way:
            self.model = self.model.to(memory_format=self.format)
        self.parameters = list(self.model.parameters())
        [name] = way & set(OPTIMIZERS)
        self.optimizer = OPTIMIZERS[name](self.parameters)
        self.half = next((HALVES[w] for w in way & set(HALVES)), None)
        self.scaler = torch.amp.GradScaler("cuda", enabled="fp16" in way)
        g = torch.Generator().manual_seed(number + 100)
        self.batches = [tuple(self.placed(t) for t in subject.batch(small, g)) for _ in range(batches)]  # fmt: skip
        self.number = 0

    def placed(self, t: Tensor) -> Tensor:
        t = t.cuda()
        return t.contiguous(memory_format=self.format) if t.dim() == 4 else t

    def step(self) -> Tensor:
        x, want = self.batches[self.number % len(self.batches)]
        self.number += 1
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", self.half, enabled=self.half is not None):
            out = self.model(x)
            if want.dtype.is_floating_point:
                loss = F.mse_loss(out.float(), want)
            else:
                loss = F.cross_entropy(out.reshape(-1, out.shape[-1]), want.reshape(-1))
        self.scaler.scale(loss).backward()
        if "clip" in self.way:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def result(self, losses: list[Tensor]) -> dict[str, Any]:
        moments = [self.optimizer.state[p] for p in self.parameters]
        return {
            "losses": [loss.item().hex() for loss in losses],
            "parameters": torch_cases.digest([p.data for p in self.parameters]),
            "buffers": torch_cases.digest(list(self.model.buffers())),
            "optimizer": torch_cases.digest(moments),
            "scale": self.scaler.get_scale() if "fp16" in self.way else 0.0,
            "random": torch_cases.digest(torch.cuda.get_rng_state()),
        }


def train(name: str, options: argparse.Namespace) -> dict[str, Any]:
    subject, _, words = name.partition("/")
    way = set(words.split("+"))
    found: list[dict[str, Any]] = []
    with settings(way):
        for _ in range(options.times):
            training = Training(SUBJECTS[subject], way, options.small, options.seed)
            losses = [training.step() for _ in range(3 if options.small else STEPS)]
            found.append(training.result(losses))
    facts = {"result": found[0]}
    return facts | ({"unsteady": True} if any(one != found[0] for one in found) else {})


def main() -> None:
    options = torch_cases.parse(__doc__ or "")
    torch_cases.run(options, {name: functools.partial(train, name, options) for name in WAYS})


if __name__ == "__main__":
    main()
