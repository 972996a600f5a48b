# SPDX-License-Identifier: Apache-2.0
"""What gpu_check's torch programs share: cases in one process, each with a line of JSON on disk as soon as it is known.

Such a program runs natively and through the proxy, with the same seeds; gpu_check.py compares the lines. In the file:

    {"plan": [NAME, ...]}          once, at the start
    {"begin": NAME}                before each case, so that whoever finds the process dead knows which one it was
    {"case": NAME, ...}            what became of it
    {"end": "all" | "time" | "sticky"}

A CUDA error that stays (a fault in a kernel) spoils all that would follow: the process ends behind the case, with exit
code 17, and is begun again with --after.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import random
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

STICKY = 17  # exit code
SEED = 0
Case = Callable[[], dict[str, Any]]


class TooSlow(BaseException):
    """Not an Exception: what a case catches must not swallow it."""


def parse(description: str, **more: Any) -> argparse.Namespace:
    """The options that all have, and one per keyword: its default value, whose type it takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", default="", help="the file that lines are added to")
    parser.add_argument("--after", default="", help="begin behind this case")
    parser.add_argument("--start", default="", help="begin with this case")
    parser.add_argument("--only", default="", help="these cases, separated by commas")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after that")
    parser.add_argument("--alarm", type=int, default=40, help="the most seconds of one case")
    parser.add_argument("--times", type=int, default=1, help="how often each is run, to compare")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    for name, default in more.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    options = parser.parse_args()
    options.begun = time.monotonic()
    warnings.filterwarnings("ignore")
    return options


def seed(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def tensors(x: Any) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, dict):
        for one in x.values():
            yield from tensors(one)
    elif isinstance(x, (list, tuple)):
        for one in x:
            yield from tensors(one)


def parts(t: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that a tensor of another layout is made of."""
    if t.layout == torch.strided:
        return [t]
    if t.layout == torch.sparse_coo:
        return [t._indices(), t._values()]
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [t.crow_indices(), t.col_indices(), t.values()]
    if t.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [t.ccol_indices(), t.row_indices(), t.values()]
    return list(t.unbind())


def raw(t: torch.Tensor) -> bytes:
    """A strided tensor's bits in the order of its indices. Without numpy, which need not be there."""
    t = t.detach().cpu()
    t = t.resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(t.data_ptr(), t.numel() * t.element_size()) if t.numel() else b""


def digest(x: Any) -> str:
    """Of all tensors in it: types, shapes and bits."""
    found = hashlib.blake2b(digest_size=12)
    for t in tensors(x):
        for part in parts(t.detach()):
            found.update(f"{part.dtype} {tuple(part.shape)}".encode() + raw(part))
    return found.hexdigest()


def words(error: BaseException) -> str:
    """Type and first line, without what differs from run to run."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: " + re.sub(r"0x[0-9a-f]+", "0x", first)[:200]


class Lines:
    def __init__(self, path: str) -> None:
        self.file = open(path, "a", encoding="utf-8") if path else sys.stdout  # noqa: SIM115

    def add(self, **facts: Any) -> None:
        self.file.write(json.dumps(facts) + "\n")
        self.file.flush()


def run(options: argparse.Namespace, cases: dict[str, Case]) -> None:
    """Runs them in their order, and ends the process. A case's own exceptions are what became of it."""
    lines, names = Lines(options.json), list(cases)
    wanted = [n for n in options.only.split(",") if n]
    lines.add(plan=names)
    if options.after in names:
        names = names[names.index(options.after) + 1 :]
    elif options.start in names:
        names = names[names.index(options.start) :]

    def too_slow(*_: object) -> None:
        raise TooSlow

    signal.signal(signal.SIGALRM, too_slow)
    ended = "all"
    for name in [n for n in names if not wanted or n in wanted]:
        if time.monotonic() - options.begun > options.seconds:
            ended = "time"
            break
        lines.add(begin=name)
        facts: dict[str, Any] = {}
        began = time.monotonic()
        try:
            signal.alarm(options.alarm)
            facts = cases[name]()
        except TooSlow:
            facts = {"error": f"TooSlow: more than {options.alarm} s"}
        except Exception as error:
            facts = {"error": words(error)}
        finally:
            signal.alarm(0)
        facts["s"] = round(time.monotonic() - began, 3)
        if sticky := stays(facts):
            lines.add(case=name, **facts, sticky=sticky)
            lines.add(end="sticky")
            os._exit(STICKY)
        lines.add(case=name, **facts)
    lines.add(end=ended)
    # Not by way of the interpreter's end, where a library's clean-up may hang; all is written.
    sys.stdout.flush()
    os._exit(0)


def stays(facts: dict[str, Any]) -> str:
    """The error that every later call would return, after a case that had one."""
    if "error" not in json.dumps(facts):
        return ""
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").add_(1).cpu()
    except Exception as error:
        return words(error)
    return ""
