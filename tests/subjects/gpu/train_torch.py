# SPDX-License-Identifier: Apache-2.0
"""A training program on PyTorch's unmodified CUDA wheel: element-wise layers, a softmax and AdamW, no product of matrices.

A subject like those of tests/subjects: it prints each step's loss and a digest of its weights at the end, equal bit for
bit in every right run.
"""

from __future__ import annotations

import os
import statistics
import time

import torch
from common import Digest, Steps, check, options, seed


def main() -> None:
    o = options(__doc__ or "", steps=200, rows=512, ballast_mib=0)
    seed(7)
    torch.use_deterministic_algorithms(True, warn_only=True)
    table = torch.nn.Parameter(torch.randn(64, 32).cuda())
    scale, norm = torch.nn.Parameter(torch.randn(32).cuda()), torch.nn.LayerNorm(32).cuda()
    weights = [table, scale, *norm.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    index = (torch.arange(o.rows) * 29 % 64).cuda()
    want = index % 32
    ballast = None  # device memory that an image has to carry
    if o.ballast_mib:
        ballast = torch.full((o.ballast_mib << 18,), 0x5A5A1234, dtype=torch.int32, device="cuda")
    digest, took, losses = Digest(), [], []
    steps = Steps(o)
    for _ in steps:
        began = time.perf_counter()
        x = torch.nn.functional.gelu(norm(table[index] * scale))
        loss = torch.nn.functional.cross_entropy(x, want)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        took.append(time.perf_counter() - began)
        steps.say(f"loss {losses[-1].hex()}")
    digest.add("losses", losses)
    digest.add("weights", [w.data for w in weights])
    digest.add("rng", torch.cuda.get_rng_state())
    if ballast is not None:
        digest.add("ballast", ballast[-1024:])
    if o.steps >= 50 and "DEVPROXY_TEST_NO_KERNELS" not in os.environ:
        check(losses[-1] < losses[0], f"the loss went from {losses[0]} to {losses[-1]}")
    print(f"median step {statistics.median(took) * 1e6:.1f} us", flush=True)
    digest.finish()


if __name__ == "__main__":
    main()
