# SPDX-License-Identifier: Apache-2.0
"""torch.compile of a CPU function, with its pool of compiling processes; the shapes change, so it compiles on the way."""

import os

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")

import torch
from common import Digest, Steps, options, seed


def main() -> None:
    o = options(__doc__, steps=12)
    seed(11)

    @torch.compile(dynamic=False)
    def layer(x, w):
        return torch.nn.functional.gelu(x @ w).softmax(-1) * 2

    w = torch.randn(32, 32)
    results = []
    steps = Steps(o)
    for step in steps:
        x = torch.randn(4 + step // 3, 32)
        y = layer(x, w)
        # fused code rounds in another order than eager code
        torch.testing.assert_close(y, torch.nn.functional.gelu(x @ w).softmax(-1) * 2)
        results.append(y)
        steps.say(f"sum {float(y.sum()):.6f}")
    digest = Digest()
    digest.add("results", results)
    digest.add_random_states()
    digest.finish()


if __name__ == "__main__":
    main()
