# SPDX-License-Identifier: Apache-2.0
"""The software GPU's random numbers on device='cpu'.

A random op on 'cuda' draws from a CPU generator seeded with mix_seed(seed, offset), where (seed, offset) is the CUDA
generator's state; each random op adds 4 to the offset. `CudaRandomNumbers` seeds the default CPU generator in the same
way before each random op, so that a plain CPU run is the bitwise reference of a run on the software GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

OFFSET_PER_OP = 4
_MASK = (1 << 64) - 1


def mix_seed(seed: int, offset: int) -> int:
    """splitmix64 of the pair, as devproxy/torch/block.h has it."""
    z = (seed + 0x9E3779B97F4A7C15 * (offset + 1)) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


class CudaRandomNumbers(TorchDispatchMode):
    """Within it, random ops on CPU tensors give what the software GPU gives after the same torch.manual_seed.

    seed: the seed in force when the mode is entered. A torch.manual_seed inside is noticed.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.offset = seed, 0
        self._last = torch.default_generator.initial_seed()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_random(func) and (kwargs or {}).get("generator") is None:
            if torch.default_generator.initial_seed() != self._last:
                self.seed, self.offset = torch.default_generator.initial_seed(), 0
            self._last = mix_seed(self.seed, self.offset)
            torch.default_generator.manual_seed(self._last)
            self.offset += OFFSET_PER_OP
        return func(*args, **(kwargs or {}))
