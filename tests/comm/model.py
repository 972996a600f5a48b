# SPDX-License-Identifier: Apache-2.0
"""What a collective computes, by numpy, written from the contract at the top of devproxy/hal/comm.h and from nccl.h.

Values travel as raw elements: an array of the type's own numpy dtype, and of bits (uint16, uint8) for the floating types
that numpy lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


# -- numbers ------------------------------------------------------------------------------------------------------------


def bf16_to_f32(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: Array) -> Array:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    low, high = bits & 0xFFFF, bits >> 16
    up = (low > 0x8000) | ((low == 0x8000) & (high & 1 == 1))
    rounded = np.where(np.isnan(values), 0x7FC0 | (high & 0x8000), high + up)
    return rounded.astype(np.uint16)


@dataclass(frozen=True)
class Float8:
    """The 256 values, from the format's definition; the way back looks for the nearest of them."""

    exponent_bits: int
    mantissa_bits: int
    largest: int  # code of the largest number

    def values(self) -> Array:
        """In float64, by code; codes behind `largest` are no numbers, but for the infinity of E5M2."""
        bias = 2 ** (self.exponent_bits - 1) - 1
        out = np.full(256, np.nan)
        for code in range(self.largest + 1):
            exponent, mantissa = code >> self.mantissa_bits, code & (2**self.mantissa_bits - 1)
            fraction = mantissa / 2**self.mantissa_bits
            scale = 2.0 ** (max(exponent, 1) - bias)
            out[code] = (fraction + (exponent > 0)) * scale
            out[code | 0x80] = -out[code]
        if self.exponent_bits == 5:
            out[0x7C], out[0xFC] = np.inf, -np.inf
        return out

    def decode(self, bits: Array) -> Array:
        return self.values().astype(np.float32)[bits]

    def encode(self, values: Array) -> Array:
        numbers = self.values()[: self.largest + 1]
        wide = np.abs(values.astype(np.float64))
        sign = np.signbit(values).astype(np.uint8) << 7
        wide = np.where(np.isnan(wide), 0, np.minimum(wide, numbers[-1]))
        above = np.searchsorted(numbers, wide)  # the first code that is not less
        below = np.maximum(above - 1, 0)
        to_above, to_below = numbers[above] - wide, wide - numbers[below]  # exact in float64
        take_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
        code = np.where(take_above, above, below).astype(np.uint8)
        return np.where(np.isnan(values), np.uint8(0x7F), code | sign).astype(np.uint8)


E4M3, E5M2 = Float8(4, 3, 0x7E), Float8(5, 2, 0x7B)


@dataclass(frozen=True)
class Type:
    name: str
    code: int  # nccl.h, ncclDataType_t
    raw: Any  # numpy's dtype of an element as it lies in memory
    wide: Any  # what a tree is computed in
    widen: Callable[[Array], Array]
    narrow: Callable[[Array], Array]

    @property
    def bytes(self) -> int:
        return int(np.dtype(self.raw).itemsize)

    @property
    def floating(self) -> bool:
        return bool(np.issubdtype(self.wide, np.floating))


def _own(name: str, code: int) -> Type:
    dtype = np.dtype(name)
    return Type(name, code, dtype, dtype, lambda a: a, lambda a: a.astype(dtype, copy=False))


def _half(values: Array) -> Array:
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


TYPES = (
    *(_own(name, i) for i, name in enumerate(("int8", "uint8", "int32", "uint32", "int64", "uint64"))),
    Type("float16", 6, np.float16, np.float32, lambda a: a.astype(np.float32), _half),
    _own("float32", 7),
    _own("float64", 8),
    Type("bfloat16", 9, np.uint16, np.float32, bf16_to_f32, f32_to_bf16),
    Type("float8e4m3", 10, np.uint8, np.float32, E4M3.decode, E4M3.encode),
    Type("float8e5m2", 11, np.uint8, np.float32, E5M2.decode, E5M2.encode),
)  # fmt: skip
SUM, PROD, MAX, MIN, AVG, PREMULSUM = range(6)
REDUCTIONS = ("sum", "prod", "max", "min", "avg", "premulsum")


# -- reductions ---------------------------------------------------------------------------------------------------------


def _pair(op: int, a: Array, b: Array) -> Array:
    if op == PROD:
        return a * b
    if op in (MAX, MIN):
        # Of two equal ones, as the zeros are, the lower rank's; a number rather than NaN.
        other = b > a if op == MAX else b < a
        return np.where(other | np.isnan(a) if a.dtype.kind == "f" else other, b, a)
    return a + b


def _tree(op: int, values: list[Array]) -> Array:
    if len(values) == 1:
        return values[0]
    half = 1
    while half * 2 < len(values):
        half *= 2
    return _pair(op, _tree(op, values[:half]), _tree(op, values[half:]))


def _towards_zero(total: Array, ranks: int) -> Array:
    signed = total.dtype.kind == "i"
    if not signed:
        return total // total.dtype.type(ranks)
    quotient = total // ranks  # towards minus infinity
    back = (quotient < 0) & (quotient * ranks != total)
    return (quotient + back).astype(total.dtype)


def reduce(dtype: Type, op: int, inputs: list[Array], scalars: list[Array] | None = None) -> Array:
    """Raw elements of every rank -> raw elements of the result. scalars: one raw element of each rank, for premulsum."""
    with np.errstate(all="ignore"):
        values = [dtype.widen(a) for a in inputs]
        if op == PREMULSUM:
            assert scalars is not None
            values = [v * dtype.widen(s)[0] for v, s in zip(values, scalars, strict=True)]
        total = _tree(op, values)
        if op == AVG:
            if dtype.floating:
                total = total / total.dtype.type(len(inputs))
            else:
                total = _towards_zero(total, len(inputs))
        assert total.dtype == np.dtype(dtype.wide)
        return dtype.narrow(total)


def same(dtype: Type, a: Array, b: Array) -> bool:
    """Bit for bit; any NaN is like any other, since no contract says which one comes out."""
    if a.tobytes() == b.tobytes():
        return True
    if not dtype.floating:
        return False
    raw = np.dtype(f"u{dtype.bytes}")
    nan = np.isnan(dtype.widen(a)), np.isnan(dtype.widen(b))
    return bool(np.all((nan[0] & nan[1]) | (a.view(raw) == b.view(raw))))


# -- collectives --------------------------------------------------------------------------------------------------------

# nccl.h: how many elements a rank sends and receives for `count`; 0 also where its buffer is not looked at.
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
MOVING = ("broadcast", "all_gather", "all_to_all", "gather", "scatter")
# In place is defined for all but all_to_all.
IN_PLACE = (*REDUCING, "broadcast", "all_gather", "gather", "scatter")


def sent(kind: str, count: int, ranks: int, rank: int, root: int) -> int:
    if kind in ("reduce_scatter", "all_to_all"):
        return count * ranks
    if kind == "broadcast":
        return count if rank == root else 0
    if kind == "scatter":
        return count * ranks if rank == root else 0
    return count


def received(kind: str, count: int, ranks: int, rank: int, root: int) -> int:
    if kind in ("all_gather", "all_to_all"):
        return count * ranks
    if kind == "reduce":
        return count if rank == root else 0
    if kind == "gather":
        return count * ranks if rank == root else 0
    return count


def in_place(kind: str, count: int, rank: int, root: int) -> tuple[int, int]:
    """Where in one buffer, in elements, the send and the receive buffer begin."""
    if kind == "all_gather":
        return rank * count, 0
    if kind == "reduce_scatter":
        return 0, rank * count
    if kind == "gather":
        return (rank * count if rank == root else 0), 0
    if kind == "scatter":
        return 0, (root * count if rank == root else 0)
    return 0, 0


def collective(
    kind: str,
    dtype: Type,
    op: int,
    inputs: list[Array],
    count: int,
    rank: int,
    root: int,
    scalars: list[Array] | None = None,
) -> Array:
    """What this rank receives, of what all ranks send."""
    ranks = len(inputs)
    if received(kind, count, ranks, rank, root) == 0:
        return np.empty(0, dtype.raw)
    mine = slice(rank * count, (rank + 1) * count)
    if kind in ("all_reduce", "reduce"):
        return reduce(dtype, op, inputs, scalars)
    if kind == "reduce_scatter":
        return reduce(dtype, op, [a[mine] for a in inputs], scalars)
    if kind == "broadcast":
        return inputs[root]
    if kind == "scatter":
        return inputs[root][mine]
    if kind == "all_to_all":
        return np.concatenate([a[mine] for a in inputs])
    assert kind in ("all_gather", "gather")
    return np.concatenate(inputs)


# -- data ---------------------------------------------------------------------------------------------------------------

_SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-40, 3.4e38, -3.4e38, 65504.0, 65520.0, 6e-8, 448.0, 464.0,
            480.0, 57344.0, 61440.0, 2.0**-9, 2.0**-10, 2.0**-16, 1.0)  # fmt: skip


def data(dtype: Type, count: int, seed: int, special: bool) -> Array:
    """Elements like a gradient's; special: among them what ends badly, and any bits at all."""
    rng = np.random.default_rng(seed)
    if not dtype.floating:
        info = np.iinfo(dtype.raw)
        low, high = (info.min, info.max) if special else (max(info.min, -9), 10)
        return rng.integers(low, high, count, dtype.raw, endpoint=True)
    values = rng.standard_normal(count) * np.exp2(rng.integers(-6, 7, count))
    with np.errstate(all="ignore"):
        if not special:
            return dtype.narrow(values.astype(dtype.wide))
        where = rng.random(count)
        chosen = rng.choice(np.array(_SPECIAL), count)
        out = dtype.narrow(np.where(where < 0.3, chosen, values).astype(dtype.wide))
    raw = np.dtype(f"u{dtype.bytes}")
    any_bits = rng.integers(0, np.iinfo(raw).max, count, raw, endpoint=True)
    return np.where(where > 0.8, any_bits, out.view(raw)).astype(raw).view(dtype.raw)
