# SPDX-License-Identifier: Apache-2.0
"""Every generator of random numbers: random, numpy old and new, torch CPU and device, generators of one's own, hash seed."""

import random

import numpy
import torch
from common import Digest, Steps, device, options, seed


def main() -> None:
    o = options(__doc__)
    seed(3)
    where = device()
    mine = torch.Generator().manual_seed(7)
    on_device = torch.Generator(where).manual_seed(8)
    modern = numpy.random.default_rng(9)
    drawn = []
    mask = torch.ones(1000, device=where)
    hash_of_text = hash("seeded by the interpreter at its start")
    steps = Steps(o)
    for _ in steps:
        drawn.append(
            [
                random.random(),
                float(numpy.random.rand()),
                float(modern.normal()),
                torch.randn(3),
                torch.rand(3, generator=mine),
                torch.randn(3, device=where),
                torch.rand(3, device=where, generator=on_device),
                torch.randperm(7, device=where),
                torch.nn.functional.dropout(mask, 0.5).sum(),
            ]
        )
        if hash("seeded by the interpreter at its start") != hash_of_text:
            raise SystemExit("the interpreter has another hash seed: it is another process")
        steps.say(f"{drawn[-1][0]:.12f} {float(drawn[-1][5][0]):.8f}")
    digest = Digest()
    digest.add("drawn", drawn)
    digest.add("mine", mine.get_state())
    digest.add("device", on_device.get_state())
    digest.add("modern", str(modern.bit_generator.state))
    digest.add_random_states()
    digest.finish()


if __name__ == "__main__":
    main()
