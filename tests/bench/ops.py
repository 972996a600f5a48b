# SPDX-License-Identifier: Apache-2.0
"""One side of the comparison of tiny ops: what the client pays for an op, and what the whole pipeline does.

    python tests/bench/ops.py cuda|cpu        reads "OP COUNT" per line, answers with microseconds per op: post, pipeline

post is the calling thread's own time (time.thread_time) for a burst that the ring holds, so that it waits for nobody;
pipeline is wall time for COUNT ops, the server's share and the last synchronize included. On the CPU an op is done when
its call returns: both are its time. Run once in a plain process (cpu) and once under devproxy-run (cuda).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

BURST = 200  # ops between two waits: some hundred bytes each, and the ring has room for far more
BURSTS = 15


def operations(device: str) -> dict[str, Callable[[int], None]]:
    """Each runs its op that many times on 16 elements."""
    a = torch.full((16,), 0.5, device=device)
    b = torch.full((16,), 0.25, device=device)
    m = torch.full((4, 4), 0.25, device=device)
    zero = torch.zeros(16, device=device)
    mm, add, relu = torch.mm, torch.add, torch.relu

    def add_in_place(n: int) -> None:
        add_ = a.add_
        for _ in range(n):
            add_(zero)

    def add_new(n: int) -> None:
        for _ in range(n):
            add(a, b)

    def relu_new(n: int) -> None:
        for _ in range(n):
            relu(a)

    def mm_new(n: int) -> None:
        for _ in range(n):
            mm(m, m)

    return {"add_": add_in_place, "add": add_new, "relu": relu_new, "mm": mm_new}


def main() -> None:
    """Answers until its input ends."""
    torch.set_num_threads(1)
    device = sys.argv[1]
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    ops = operations(device)
    with torch.no_grad():
        for op in ops.values():
            op(1000)
        wait()
        print("ready", flush=True)
        for line in sys.stdin:
            name, count = line.split()
            op, n = ops[name], int(count)
            posts = []
            for _ in range(BURSTS):
                begin = time.thread_time()
                op(BURST)
                posts.append((time.thread_time() - begin) / BURST)
                wait()
            begin = time.perf_counter()
            op(n)
            wait()
            wall = (time.perf_counter() - begin) / n
            print(f"{statistics.median(posts) * 1e6:.4f} {wall * 1e6:.4f}", flush=True)


if __name__ == "__main__":
    main()
