# SPDX-License-Identifier: Apache-2.0
"""The bidirectional allocator over its C ABI: no overlap, joins what is given back, keeps the two ends apart."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.build import library

GRANULE = 512
BASE, BYTES = 0x10_0000, 64 * GRANULE
CHUNK = 2 << 20  # kChunkBytes
SMALL = 32  # kSmallBytes, in granules


class Allocator:
    """One allocator over [BASE, BASE + bytes)."""

    def __init__(self, lib: ctypes.CDLL, bytes: int = BYTES) -> None:
        self.lib = lib
        lib.alloc_new.restype = ctypes.c_void_p
        lib.alloc_new.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
        for name in ("alloc_take", "alloc_low_top", "alloc_high_bottom", "alloc_free_runs"):
            getattr(lib, name).restype = ctypes.c_uint64
        lib.alloc_take.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int]
        lib.alloc_give.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64]
        for name in ("alloc_delete", "alloc_low_top", "alloc_high_bottom", "alloc_free_runs"):
            getattr(lib, name).argtypes = [ctypes.c_void_p]
        self.ptr = lib.alloc_new(BASE, bytes)

    def take(self, granules: int, stable: bool) -> int:
        return int(self.lib.alloc_take(self.ptr, granules * GRANULE, int(stable)))

    def give(self, addr: int, granules: int) -> None:
        self.lib.alloc_give(self.ptr, addr, granules * GRANULE)

    def close(self) -> None:
        self.lib.alloc_delete(self.ptr)


@pytest.fixture(scope="module")
def lib() -> ctypes.CDLL:
    return library("allocator")


@pytest.fixture
def allocator(lib: ctypes.CDLL) -> Iterator[Allocator]:
    a = Allocator(lib)
    yield a
    a.close()


SIZES = st.one_of(st.integers(1, 12), st.integers(SMALL - 1, SMALL + 2), st.integers(1000, 5000))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), SIZES, st.booleans()),
        st.tuples(st.just("give"), st.integers(0, 1000), st.just(False)),
    ),
    max_size=120,
)


@settings(max_examples=300, deadline=None)
@given(steps=STEPS, size=st.sampled_from([BYTES, CHUNK, 3 * CHUNK + GRANULE, 9 * CHUNK]))
def test_live_runs_never_overlap_and_everything_comes_back(
    lib: ctypes.CDLL, steps: list[tuple[str, int, bool]], size: int
) -> None:
    a = Allocator(lib, size)
    live: dict[int, tuple[int, bool]] = {}
    for what, n, stable in steps:
        if what == "take":
            addr = a.take(n, stable)
            if addr == 0:
                continue
            assert BASE <= addr and addr + n * GRANULE <= BASE + size
            assert all(
                addr + n * GRANULE <= other or other + g * GRANULE <= addr
                for other, (g, _) in live.items()
            )
            live[addr] = (n, stable)
        elif live:
            addr = sorted(live)[n % len(live)]
            a.give(addr, live.pop(addr)[0])
        low = [x + g * GRANULE for x, (g, s) in live.items() if not s]
        high = [x for x, (_, s) in live.items() if s]
        assert max(low, default=BASE) <= a.lib.alloc_low_top(a.ptr)
        assert min(high, default=BASE + size) >= a.lib.alloc_high_bottom(a.ptr)
    for addr, (n, _) in live.items():
        a.give(addr, n)
    assert a.lib.alloc_free_runs(a.ptr) == 0
    assert (a.lib.alloc_low_top(a.ptr), a.lib.alloc_high_bottom(a.ptr)) == (BASE, BASE + size)
    a.close()


@settings(max_examples=100, deadline=None)
@given(
    stable=st.lists(SIZES, min_size=1, max_size=6),
    noise=st.lists(st.lists(st.integers(1, 4), max_size=4), min_size=2, max_size=2),
)
def test_stable_addresses_do_not_depend_on_the_rest(
    lib: ctypes.CDLL, stable: list[int], noise: list[list[int]]
) -> None:
    """Replicas with other activations give their parameters the same addresses (paper 5.2.2)."""
    seen = []
    for extra in noise:
        a = Allocator(lib, 16 * CHUNK)
        got = []
        for i, n in enumerate(stable):
            for e in extra[i : i + 1]:
                a.take(e, False)
            got.append(a.take(n, True))
        seen.append(got)
        a.close()
    assert seen[0] == seen[1]


def test_exhausted_range_says_so(allocator: Allocator) -> None:
    assert allocator.take(BYTES // GRANULE, False) == BASE
    assert allocator.take(1, False) == 0 and allocator.take(1, True) == 0


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(SIZES, min_size=1, max_size=60), drop=st.integers(0, 5))
def test_small_stable_buffers_share_no_page_with_large_ones(
    lib: ctypes.CDLL, sizes: list[int], drop: int
) -> None:
    a = Allocator(lib, 256 * CHUNK)
    pages: dict[bool, set[int]] = {True: set(), False: set()}
    live = [(a.take(n, True), n) for n in sizes]
    for addr, n in live[:drop]:
        a.give(addr, n)
    live = live[drop:] + [(a.take(n, True), n) for n in sizes]
    for addr, n in live:
        last = addr + n * GRANULE - 1
        pages[n <= SMALL].update(range(addr // CHUNK, last // CHUNK + 1))
    assert not pages[True] & pages[False]
    small = sum(n for _, n in live if n <= SMALL)
    assert len(pages[True]) <= 1 + 2 * small * GRANULE // CHUNK
    a.close()
