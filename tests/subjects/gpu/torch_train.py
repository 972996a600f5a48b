# SPDX-License-Identifier: Apache-2.0
"""A GPT-2-like model in training, with dropout, fused AdamW and bfloat16 autocast: a subject like those of tests/subjects.

It prints each step's loss and a digest of weights, moments and random state at the end, equal bit for bit in every right
run, whatever has happened to the job meanwhile.
"""

from __future__ import annotations

import statistics
import time

import torch
from common import Digest, Steps, options, seed
from torch_models import Subject, Training, settings, texts, transformer


def main() -> None:
    o = options(__doc__ or "", steps=200, layers=12, width=768, batch=4, length=256, ballast_mib=0, small=0)  # fmt: skip
    seed(7)
    heads = max(1, o.width // 64)
    subject = Subject(
        lambda small: transformer(True, 0.1, small, o.layers, o.width, heads, 50257, o.length),
        texts(o.batch, o.length, 50257),
    )
    way = {"adamw_fused", "bf16", "clip"}
    ballast = None  # device memory that an image has to carry
    if o.ballast_mib:
        ballast = torch.full((o.ballast_mib << 18,), 0x5A5A1234, dtype=torch.int32, device="cuda")
    digest, took, losses = Digest(), [], []
    with settings(way):
        training = Training(subject, way, bool(o.small), 7)
        steps = Steps(o)
        for _ in steps:
            began = time.perf_counter()
            losses.append(training.step().item())
            took.append(time.perf_counter() - began)
            steps.say(f"loss {losses[-1].hex()}")
    digest.add("losses", losses)
    digest.add("end", training.result([]))
    if ballast is not None:
        digest.add("ballast", ballast[-1024:])
    print(f"median step {statistics.median(took) * 1e6:.1f} us", flush=True)
    digest.finish()


if __name__ == "__main__":
    main()
