# SPDX-License-Identifier: Apache-2.0
"""A job that holds 32 MiB from step to step, and in each step 32 MiB of large buffers and 10 MiB of small ones more."""

import torch
from common import Digest, Steps, options

MIB = 1 << 20

parsed = options(__doc__)
state = torch.zeros(32 * MIB // 4).cuda()
for step in (steps := Steps(parsed)):
    large = [torch.full((MIB,), float(step), device="cuda") for _ in range(8)]
    small = [torch.full((MIB // 16,), float(step), device="cuda") for _ in range(40)]
    state[step] = sum(x.sum() for x in large) + sum(x.sum() for x in small)
    torch.cuda.synchronize()
    del large, small
    steps.say()
digest = Digest()
digest.add("state", state)
digest.finish()
