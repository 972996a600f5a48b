# SPDX-License-Identifier: Apache-2.0
"""The bidirectional allocator over its C ABI: no overlap, joins what is given back, keeps the two ends apart. And what a
busy stream has freed: it gets that again in other pieces, and others get it when the stream has come so far."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.native.build import library

GRANULE = 512
BASE, BYTES = 0x10_0000, 64 * GRANULE
CHUNK = 2 << 20  # kChunkBytes
SMALL = 32  # kSmallBytes, in granules
SMALL_LOW = 2048  # kSmallLowBytes, in granules
LARGE = 3 << 19  # more than that, in bytes


class Allocator:
    """One allocator over [BASE, BASE + bytes)."""

    def __init__(self, lib: ctypes.CDLL, bytes: int = BYTES) -> None:
        self.lib = lib
        lib.alloc_new.restype = ctypes.c_void_p
        lib.alloc_new.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
        lib.alloc_best_low.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        for name in (
            "alloc_take",
            "alloc_low_top",
            "alloc_high_bottom",
            "alloc_free_runs",
            "alloc_best_low",
        ):
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


SIZES = st.one_of(
    st.integers(1, 12),
    st.integers(SMALL - 1, SMALL + 2),
    st.integers(SMALL_LOW - 1, SMALL_LOW + 2),
    st.integers(1000, 5000),
)
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


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(SIZES, min_size=1, max_size=60), drop=st.integers(0, 5))
def test_small_buffers_share_no_chunk_with_large_ones(
    lib: ctypes.CDLL, sizes: list[int], drop: int
) -> None:
    a = Allocator(lib, 256 * CHUNK)
    chunks: dict[bool, set[int]] = {True: set(), False: set()}
    for i, n in enumerate(sizes):
        addr = a.take(n, False)
        if i % 6 == drop:
            a.give(addr, n)
        else:
            last = addr + n * GRANULE - 1
            chunks[n <= SMALL_LOW].update(range(addr // CHUNK, last // CHUNK + 1))
    assert not chunks[True] & chunks[False]
    a.close()


def test_what_lives_long_does_not_cut_the_rest(lib: ctypes.CDLL) -> None:
    """A list of losses: each step keeps a small buffer, made while its large ones are there."""
    a = Allocator(lib, 256 * CHUNK)
    tops = []
    for _ in range(50):
        large = []
        for n in (5000, 3000, 9000):
            large.append((a.take(n, False), n))
            a.take(1, False)
        for addr, n in large:
            a.give(addr, n)
        tops.append(int(a.lib.alloc_low_top(a.ptr)))
    assert tops[-1] == tops[0]
    a.close()


class Pending:
    """What a stream has freed, in granules from address 0."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.lib = lib
        u64, ptr = ctypes.c_uint64, ctypes.c_void_p
        for name, result, args in (
            ("new", ptr, []),
            ("delete", None, [ptr]),
            ("give", None, [ptr, u64, u64, u64]),
            ("best", u64, [ptr, u64]),
            ("take", u64, [ptr, u64]),
            ("runs", u64, [ptr]),
            ("reclaim", u64, [ptr, u64, ctypes.POINTER(u64)]),
            ("gather", ctypes.c_int, [ptr, ptr, u64]),
        ):
            function = getattr(lib, f"pending_{name}")
            function.restype, function.argtypes = result, args
        self.ptr = lib.pending_new()

    def give(self, begin: int, granules: int, after: int) -> None:
        self.lib.pending_give(self.ptr, begin, granules, after)

    def best(self, granules: int) -> int:
        return int(self.lib.pending_best(self.ptr, granules))

    def take(self, granules: int) -> int:
        return int(self.lib.pending_take(self.ptr, granules))

    def reclaim(self, position: int) -> list[tuple[int, int]]:
        out = (ctypes.c_uint64 * 1000)()
        n = int(self.lib.pending_reclaim(self.ptr, position, out))
        return [(out[i], out[i + 1]) for i in range(0, n, 2)]


@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["give", "give", "take", "reclaim"]), st.integers(1, 9)),
        max_size=150,
    ),
    seed=st.randoms(use_true_random=False),
)
def test_a_stream_gets_what_it_freed_in_other_pieces(
    lib: ctypes.CDLL, steps: list[tuple[str, int]], seed: Random
) -> None:
    p = Pending(lib)
    freed: dict[int, int] = {}  # granule: position behind its last use
    live = dict.fromkeys(range(200), 0)
    reclaimed: set[int] = set()
    for position, (what, n) in enumerate(steps, 1):
        runs = runs_of(set(freed))
        if what == "give":
            begin = seed.choice(sorted(live) or [0])
            run = [g for g in range(begin, begin + n) if g in live]
            if len(run) < n:
                continue
            p.give(begin, n, position)
            for g in run:
                freed[g] = position
                del live[g]
        elif what == "take":
            fitting = [b for _, b in runs if b >= n]
            assert p.best(n) == min(fitting, default=0)
            if not fitting:
                continue
            begin = p.take(n)
            for g in range(begin, begin + n):
                del freed[g]
                live[g] = 0
            assert (begin, min(fitting)) in runs
        else:
            over = max(0, position - n)
            for begin, size in p.reclaim(over):
                # A run that was joined waits for the last of its parts, never for less.
                assert all(freed.pop(g) <= over for g in range(begin, begin + size))
                reclaimed.update(range(begin, begin + size))
        assert p.lib.pending_runs(p.ptr) == len(runs_of(set(freed)))
    got = {g for begin, size in p.reclaim(len(steps)) for g in range(begin, begin + size)}
    assert got == set(freed) and not got & reclaimed
    p.lib.pending_delete(p.ptr)


@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["take", "take", "give", "free", "reclaim"]), st.integers(1, 9)),
        max_size=150,
    ),
)
@example([("take", 3), ("take", 3), ("take", 1), ("give", 3), ("free", 2), ("take", 5)])
@example([("take", 3), ("take", 3), ("take", 1), ("free", 3), ("give", 2), ("take", 5)])
def test_what_is_free_for_all_joins_what_the_stream_has_freed(
    lib: ctypes.CDLL, steps: list[tuple[str, int]]
) -> None:
    """As DeviceState does it: the range grows only where no free neighbours, of either kind, have room."""
    a, p = Allocator(lib, 1000 * LARGE), Pending(lib)
    live: dict[int, int] = {}
    free: set[int] = set()  # units of LARGE, both kinds
    own: dict[int, int] = {}  # of these, those that the stream has freed: position
    for position, (what, n) in enumerate(steps, 1):
        top = (int(lib.alloc_low_top(a.ptr)) - BASE) // LARGE
        if what == "take":
            best, other = p.best(n * LARGE), int(lib.alloc_best_low(a.ptr, n * LARGE))
            if not best and not other and lib.pending_gather(p.ptr, a.ptr, n * LARGE):
                best = p.best(n * LARGE)
                assert best
            addr = (
                p.take(n * LARGE)
                if best and (not other or best <= other)
                else a.take(n * LARGE // GRANULE, False)
            )
            taken = set(range((addr - BASE) // LARGE, (addr - BASE) // LARGE + n))
            assert taken <= free | set(range(top, top + n))
            grown = (int(lib.alloc_low_top(a.ptr)) - BASE) // LARGE - top
            if grown:
                assert all(
                    size < n or not own.keys() & set(range(b, b + size))
                    for b, size in runs_of(free)
                )
                if top - 1 in own:
                    assert grown == n - next(size for b, size in runs_of(free) if b + size == top)
            free -= taken
            for g in taken:
                own.pop(g, None)
            live[min(taken)] = n
        elif what == "reclaim":
            for begin, size in p.reclaim(position - min(n, position)):
                a.give(begin, size // GRANULE)
                for g in range((begin - BASE) // LARGE, (begin - BASE + size) // LARGE):
                    own.pop(g, None)
        elif live:
            begin = sorted(live)[n % len(live)]
            size = live.pop(begin)
            free |= set(range(begin, begin + size))
            if what == "free":
                a.give(BASE + begin * LARGE, size * LARGE // GRANULE)
            else:
                p.give(BASE + begin * LARGE, size * LARGE, position)
                own.update(dict.fromkeys(range(begin, begin + size), position))
        free &= set(range((int(lib.alloc_low_top(a.ptr)) - BASE) // LARGE))
    for begin, size in p.reclaim(len(steps)):
        a.give(begin, size // GRANULE)
    for begin, size in live.items():
        a.give(BASE + begin * LARGE, size * LARGE // GRANULE)
    assert lib.alloc_free_runs(a.ptr) == 0 and lib.alloc_low_top(a.ptr) == BASE
    p.lib.pending_delete(p.ptr)
    a.close()


def runs_of(granules: set[int]) -> list[tuple[int, int]]:
    """Begin and length of each run of neighbours."""
    runs: list[tuple[int, int]] = []
    for g in sorted(granules):
        if runs and sum(runs[-1]) == g:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((g, 1))
    return runs
