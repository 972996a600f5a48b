# SPDX-License-Identifier: Apache-2.0
"""What a stream has freed it gets again at once, in other pieces, while the kernels that use the old ones have not run."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

MIB = 1 << 20


Gate = Callable[[], Callable[[], None]]
NUMBERS = torch.arange(5 * MIB // 4, dtype=torch.int32)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Nothing that is posted behind it on the current stream begins, until what it returns is called."""
    open_now = threading.Event()

    def wait(_: object) -> None:
        assert open_now.wait(60)

    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(wait)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def close() -> Callable[[], None]:
        torch.cuda.synchronize()
        assert ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(stream, callback, None) == 0
        return open_now.set

    yield close
    open_now.set()
    torch.cuda.synchronize()


def turns(numbers: torch.Tensor, seed: int, spans: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Tensors come and go in random sizes, as a model's activations do; each sum needs what was in them."""
    choose = random.Random(seed)
    live: list[torch.Tensor] = []
    sums = []
    for turn in range(80):
        count = choose.randrange(5 * MIB // 8, 5 * MIB // 4)  # 2.5 to 5 MiB
        made = numbers[:count] + turn
        if live:
            common = min(count, *(len(x) for x in live))
            made[:common] += choose.choice(live)[-common:]
        live.append(made)
        spans.append((made.data_ptr(), made.data_ptr() + 4 * count))
        if len(live) > 3:
            gone = live.pop(choose.randrange(4))
            sums.append(gone.sum(dtype=torch.int64) + gone[::77].sum(dtype=torch.int64))
    return sums


@pytest.mark.parametrize("seed", range(3))
def test_freed_memory_is_given_out_again_in_other_pieces(gate: Gate, seed: int) -> None:
    numbers = NUMBERS.cuda()
    turns(numbers, seed, [])  # an op waits where its shapes are new
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    spans: list[tuple[int, int]] = []
    go_on = gate()
    sums = turns(numbers, seed, spans)
    peak = torch.cuda.max_memory_allocated() - before
    assert not torch.cuda.current_stream().query()  # nothing has run so far
    go_on()
    assert [s.item() for s in sums] == [s.item() for s in turns(NUMBERS, seed, [])]
    covered, top = 0, 0
    for begin, end in sorted(spans):
        covered += max(0, end - max(begin, top))
        top = max(top, end)
    assert covered < 2 * peak, (covered // MIB, peak // MIB)
