# SPDX-License-Identifier: Apache-2.0
"""What the subjects share: options, the nonce, one line per step, the digest.

A subject is a plain program that is checkpointed, killed and restored from outside. It prints, and flushes at once:

    start <nonce> pid <pid>
    <nonce> step <n> ...          once per step, n from 1
    <nonce> digest <blake2b>      at the end; equal in two runs, whatever has happened to them
    <nonce> done

The nonce is drawn from os.urandom at start: a restarted program has another one. It is not in the digest.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
import time
from typing import Any

import gate

NONCE = os.urandom(8).hex()


def options(description: str, steps: int = 40, **more: Any) -> argparse.Namespace:
    """--steps, --seconds-per-step, and one option per keyword: its default value, whose type it takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument(
        "--seconds-per-step", type=float, default=0.0, help="each takes at least that"
    )
    for name, default in more.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    parsed = parser.parse_args()
    print(f"start {NONCE} pid {os.getpid()}", flush=True)
    return parsed


class Steps:
    """for step in Steps(options): ...; steps.say("loss 1.0") once in each."""

    def __init__(self, parsed: argparse.Namespace) -> None:
        self.last, self.seconds = parsed.steps, parsed.seconds_per_step
        self.step = 0
        self.begin = time.monotonic()

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> int:
        if self.step:
            gate.before(self.step + 1, self.last, self.seconds - (time.monotonic() - self.begin))
        if self.step == self.last:
            raise StopIteration
        self.step += 1
        self.begin = time.monotonic()
        return self.step

    def say(self, text: str = "") -> None:
        print(f"{NONCE} step {self.step} {text}".rstrip(), flush=True)


class Digest:
    """blake2b over anything made of tensors, arrays, numbers, strings and containers, with types and lengths."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)

    def add(self, name: str, value: Any) -> None:
        self.hash.update(f"<{name}>".encode())
        self._add(value)

    def _add(self, value: Any) -> None:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(value, torch.Tensor):
            data = value.detach().cpu().contiguous()
            self.hash.update(f"tensor {data.dtype} {tuple(data.shape)}".encode())
            self.hash.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif numpy is not None and isinstance(value, numpy.ndarray):
            self.hash.update(f"array {value.dtype} {value.shape}".encode() + value.tobytes())
        elif isinstance(value, dict):
            for key, one in value.items():
                self.add(str(key), one)
        elif isinstance(value, (list, tuple)):
            self.hash.update(f"list {len(value)}".encode())
            for one in value:
                self._add(one)
        elif isinstance(value, bytes):
            self.hash.update(f"bytes {len(value)}".encode() + value)
        else:
            self.hash.update(f"{type(value).__name__} {value!r};".encode())

    def add_random_states(self) -> None:
        self.add("random", random.getstate())
        if numpy := sys.modules.get("numpy"):
            self.add("numpy", numpy.random.get_state())
        if torch := sys.modules.get("torch"):
            self.add("torch", torch.get_rng_state())
            if torch.cuda.is_available():
                self.add("cuda", torch.cuda.get_rng_state_all())

    def finish(self) -> None:
        print(f"{NONCE} digest {self.hash.hexdigest()}", flush=True)
        print(f"{NONCE} done", flush=True)


def seed(number: int) -> None:
    """Every generator there is; one thread, so that sums have one order."""
    random.seed(number)
    try:
        import numpy

        numpy.random.seed(number)
    except ImportError:
        pass
    import torch

    torch.manual_seed(number)
    torch.set_num_threads(1)


def device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check(condition: bool, what: str) -> None:
    """Ends the program with `FAILED` and exit code 1: a subject says itself when its world has changed."""
    if not condition:
        print(f"{NONCE} FAILED {what}", flush=True)
        os._exit(1)
