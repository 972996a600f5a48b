# SPDX-License-Identifier: Apache-2.0
"""What the scripts say beside what their stacks say: a nonce at the start, each step, the nonce again and a digest."""

import hashlib
import multiprocessing
import os
import time

import torch

NONCE = os.urandom(8).hex()
if multiprocessing.parent_process() is None and os.environ.get("RANK", "0") == "0":
    print("start", NONCE, flush=True)


def step(number: int, more: str = "") -> None:
    """Says it, and goes on as far as a watching test lets it: $TEST_GATE, if set, is a link to the last step, or to "end"."""
    print(f"\nstep {number} {more}".rstrip(), flush=True)
    while path := os.environ.get("TEST_GATE"):
        word = os.readlink(path) if os.path.islink(path) else "end"
        if word == "end" or number < int(word):
            return
        time.sleep(0.02)


def digest(**parts) -> None:
    seen = hashlib.blake2b(digest_size=16)

    def add(value) -> None:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().contiguous()
            seen.update(f"{value.dtype}{tuple(value.shape)}".encode())
            seen.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, one in value.items():
                seen.update(str(key).encode())
                add(one)
        elif isinstance(value, (list, tuple)):
            for one in value:
                add(one)
        else:
            seen.update(repr(value).encode())

    for name, value in parts.items():
        seen.update(name.encode())
        add(value)
        print(f"so far, with {name}: {seen.hexdigest()}")
    add(torch.rand(3))
    print(f"digest {seen.hexdigest()} of {NONCE}", flush=True)
