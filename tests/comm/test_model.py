# SPDX-License-Identifier: Apache-2.0
"""The model's numbers against torch's, and the software GPU's reductions (hal/soft/comm/reduce.cc) against the model."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from tests.comm import model
from tests.comm.model import Array
from tests.native.build import library

BY_NAME = {t.name: t for t in model.TYPES}
RANKS = (1, 2, 3, 4, 5, 7, 8, 13)


def pointers(arrays: list[Array]) -> Any:
    return (ctypes.c_void_p * len(arrays))(*[a.ctypes.data for a in arrays])


def reduced(
    dtype: model.Type, op: int, inputs: list[Array], scalars: list[Array], first: int, count: int
) -> list[Array]:
    """What reduce.cc writes for the elements first .. first + count, into two outputs filled with 0xa5."""
    out = [np.full(inputs[0].nbytes, 0xA5, np.uint8).view(dtype.raw) for _ in range(2)]
    library("reduce").soft_reduce(
        dtype.code, op, len(inputs), pointers(inputs), pointers(scalars), 2, pointers(out),
        ctypes.c_uint64(first), ctypes.c_uint64(count),
    )  # fmt: skip
    return out


def test_bfloat16_is_torchs() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    theirs = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(model.bf16_to_f32(bits), theirs, equal_nan=True)
    values = model.data(BY_NAME["float32"], 400_000, 1, special=True)
    back = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert model.same(BY_NAME["bfloat16"], model.f32_to_bf16(values), back)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("float8e4m3", torch.float8_e4m3fn), ("float8e5m2", torch.float8_e5m2)],
)
def test_float8_is_torchs(name: str, theirs: torch.dtype) -> None:
    """Within the type's range: outside of it torch does not saturate."""
    dtype, bits = BY_NAME[name], np.arange(256, dtype=np.uint8)
    wide = torch.from_numpy(bits.copy()).view(theirs).float().numpy()
    assert np.array_equal(dtype.widen(bits), wide, equal_nan=True)
    assert np.array_equal(np.signbit(dtype.widen(bits))[:127], np.signbit(wide)[:127])
    largest = float(np.nanmax(wide[np.isfinite(wide)]))
    between = np.unique(np.concatenate([(wide[:-1] + wide[1:]) / 2, wide]))
    near = [np.nextafter(between, s, dtype=np.float32) for s in (-np.inf, np.inf)]
    values = np.concatenate(
        [between, *near, np.random.default_rng(1).standard_normal(200_000)]
    ).astype(np.float32)
    values = values[np.abs(values) <= largest]
    back = torch.from_numpy(values).to(theirs).view(torch.uint8).numpy()
    assert np.array_equal(dtype.narrow(values), back)
    beyond = np.array([largest * 2, -largest * 2, np.inf, -np.inf], np.float32)
    assert dtype.widen(dtype.narrow(beyond)).tolist() == [largest, -largest] * 2


@pytest.mark.parametrize("dtype", model.TYPES, ids=lambda t: t.name)
def test_reductions_are_the_models(dtype: model.Type) -> None:
    """Every operation and several numbers of ranks, at any position of the buffers."""
    for ranks in RANKS:
        for op, name in enumerate(model.REDUCTIONS):
            for special in (False, True):
                seed = ranks * 100 + op * 10 + special
                inputs = [model.data(dtype, 3000, seed * 1000 + r, special) for r in range(ranks)]
                scalars = [model.data(dtype, 1, seed * 2000 + r, False) for r in range(ranks)]
                want = model.reduce(dtype, op, inputs, scalars)
                first, count = [(0, 3000), (1, 2047), (2999, 1), (64, 1024)][seed % 4]
                for got in reduced(dtype, op, inputs, scalars, first, count):
                    part = slice(first, first + count)
                    assert model.same(dtype, got[part], want[part]), (name, ranks, special)
                    untouched = np.concatenate([got[:first], got[first + count :]]).view(np.uint8)
                    assert (untouched == 0xA5).all()


@pytest.mark.parametrize("name", ["float8e4m3", "float8e5m2"])
@pytest.mark.parametrize("op", range(6), ids=model.REDUCTIONS)
def test_every_pair_of_float8(name: str, op: int) -> None:
    dtype = BY_NAME[name]
    a, b = (c.astype(np.uint8).ravel() for c in np.meshgrid(np.arange(256), np.arange(256)))
    scalars = [dtype.narrow(np.array([s], np.float32)) for s in (0.75, -3.0)]
    assert model.same(
        dtype,
        reduced(dtype, op, [a, b], scalars, 0, a.size)[0],
        model.reduce(dtype, op, [a, b], scalars),
    )


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_16_bit_number(name: str) -> None:
    """Widened and narrowed: a sum with each of a few others, so that results lie between two numbers too."""
    dtype = BY_NAME[name]
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype.raw)
    for other in range(0, 1 << 16, 0x1357):
        with_it = np.full(every.size, other, np.uint16).view(dtype.raw)
        for op in (model.SUM, model.PROD, model.AVG):
            got = reduced(dtype, op, [every, with_it], [], 0, every.size)[0]
            assert model.same(dtype, got, model.reduce(dtype, op, [every, with_it])), (op, other)


def test_the_order_shows() -> None:
    """Inputs for which every other order gives other bits: else the tests of the order could not fail."""
    dtype = BY_NAME["float32"]
    inputs = [np.array([v], np.float32) for v in (1e8, 1.0, -1e8, 1.0, 3.0, 1e-3, 7.0)]
    tree = model.reduce(dtype, model.SUM, inputs)
    line = inputs[0]
    for value in inputs[1:]:
        line = line + value
    assert tree.tobytes() != line.tobytes()
    assert reduced(dtype, model.SUM, inputs, [], 0, 1)[0].tobytes() == tree.tobytes()
