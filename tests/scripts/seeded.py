# SPDX-License-Identifier: Apache-2.0
"""Runs an unmodified script that draws its random numbers without a seed: seeded.py [--pause-ms N] SCRIPT|-m MODULE ARG...

Each generator that a script may draw from without asking for one of its own begins at a seed. torch's loader workers take
theirs from torch's own generator, so they follow. A rank of torchrun has its number added, so that ranks draw different numbers.
--pause-ms N: each step of an optimizer takes so much longer. An image of a script that ends within a second can then be taken."""

from __future__ import annotations

import os
import random
import runpy
import sys
import time

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


def main() -> None:
    words = sys.argv[1:]
    if words[0] == "--pause-ms":
        pause_s, words = int(words[1]) / 1000, words[2:]
        register_optimizer_step_post_hook(lambda *_: time.sleep(pause_s))
    seed = 20210 + int(os.environ.get("RANK", "0"))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # and each GPU's, when it is first used
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
