# SPDX-License-Identifier: Apache-2.0
"""The kernel of hal/cuda/reduce_ptx.cc, by an interpreter of the PTX that it uses, against the model of reductions
(tests/comm/model.py); and NVIDIA's assembler takes it.

The interpreter is written from the PTX ISA. It refuses what it does not know: no instruction is passed over.
"""

from __future__ import annotations

import concurrent.futures
import functools
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.comm import model
from tests.comm.model import Array
from tests.integration.needs import require_nvcc
from tests.native.test_hal_cuda import ROOT, compiled

BY_NAME = {t.name: t for t in model.TYPES}
RANKS = (1, 2, 3, 4, 5, 7, 8)
BLOCKS, THREADS = 3, 64


# -- the interpreter ---------------------------------------------------------------------------------------------------


class NotKnown(Exception):
    """An instruction, an operand or a line that the interpreter does not know, or that PTX does not allow."""


TYPES: dict[str, Any] = {
    "pred": np.bool_, "f16": np.float16, "f32": np.float32, "f64": np.float64,
    **{f"{kind}{bits}": np.dtype(f"{'i' if kind == 's' else 'u'}{bits // 8}")
       for kind in "sub" for bits in (8, 16, 32, 64)},
}  # fmt: skip


BYTES = {name: np.dtype(dtype).itemsize for name, dtype in TYPES.items()}


@functools.cache
def constant(name: str, kind: str) -> Any:
    """The same for all threads."""
    if re.fullmatch(r"0f[0-9a-f]{8}", name) and kind == "f32":
        return np.array([int(name[2:], 16)], np.uint32).view(np.float32)
    if re.fullmatch(r"0d[0-9a-f]{16}", name) and kind == "f64":
        return np.array([int(name[2:], 16)], np.uint64).view(np.float64)
    if re.fullmatch(r"\d+|0x[0-9a-f]+", name) and kind[0] in "sub":
        if not int(name, 0) >> 8 * BYTES[kind]:
            return np.array([int(name, 0)], f"u{BYTES[kind]}").view(TYPES[kind])
    raise NotKnown(f"{name} as {kind}, or before it has a value")


def quotient(a: Array, b: Array) -> Any:
    """Towards zero."""
    size = np.abs(a).view(f"u{a.itemsize}") // np.abs(b).view(f"u{a.itemsize}")
    return np.where((a < 0) != (b < 0), 0 - size, size).view(a.dtype)


def rounded(how: Any) -> Callable[..., Any]:
    """A float32's NaN is this one whatever it was before: a rounding of its bits would carry into the sign."""
    nan = np.array(0x7FFFFFFF, np.uint32).view(np.float32)

    def of(*operands: Array) -> Any:
        result = how(*operands)
        return np.where(np.isnan(result), nan, result) if result.dtype == np.float32 else result

    return of


def shifted(how: Any) -> Callable[[Array, Array], Any]:
    def shift(a: Array, by: Array) -> Any:
        assert (by < 8 * a.itemsize).all()
        return how(a, by.astype(a.dtype))

    return shift


def taken(a: Array, at: Array, bits: Array) -> Any:
    """bfe: the sign is the field's highest bit."""
    assert (at + bits <= 32).all() and (bits > 0).all()
    return (a << (32 - at - bits).astype(a.dtype)) >> (32 - bits).astype(a.dtype)


def inserted(a: Array, into: Array, at: Array, bits: Array) -> Any:
    """bfi."""
    assert (at + bits <= 32).all() and (bits < 32).all()
    mask = ((np.uint32(1) << bits) - np.uint32(1)) << at
    return (into & ~mask) | ((a << at) & mask)


@dataclass(frozen=True)
class Operation:
    result: str
    operands: tuple[str, ...]
    of: Callable[..., Any]
    wider: bool = False  # registers may be wider than their operands' types: the low bits count


def _operations() -> dict[str, Operation]:
    """By name. A name ends with a type, which "=" stands for below."""
    floats, integers = ("f32", "f64"), ("s32", "u32", "s64", "u64")
    rows: list[tuple[str, tuple[str, ...], str, str, Any]] = [
        ("add.rn", floats, "=", "= =", rounded(np.add)),
        ("mul.rn", floats, "=", "= =", rounded(np.multiply)),
        ("div.rn", floats, "=", "= =", rounded(np.divide)),
        ("setp.nan", floats, "pred", "= =", lambda a, b: np.isnan(a) | np.isnan(b)),
        ("setp.lt.or", floats, "pred", "= = pred", lambda a, b, c: (a < b) | c),
        ("add", integers, "=", "= =", np.add),
        ("sub", integers, "=", "= =", np.subtract),
        ("mul.lo", integers, "=", "= =", np.multiply),
        ("div", ("s32", "s64"), "=", "= =", quotient),
        ("div", ("u32", "u64"), "=", "= =", np.floor_divide),
        ("min", integers, "=", "= =", np.minimum),
        ("setp.lt", integers, "pred", "= =", np.less),
        ("setp.gt", integers, "pred", "= =", np.greater),
        ("setp.ge", integers, "pred", "= =", np.greater_equal),
        ("setp.eq", integers, "pred", "= =", np.equal),
        ("and", ("b32", "b64"), "=", "= =", np.bitwise_and),
        ("or", ("b32", "b64"), "=", "= =", np.bitwise_or),
        ("shl", ("b32", "b64"), "=", "= u32", shifted(np.left_shift)),
        ("shr", ("u32", "u64"), "=", "= u32", shifted(np.right_shift)),
        ("bfe", ("s32", "u32"), "=", "= u32 u32", taken),
        ("bfi", ("b32",), "=", "= = u32 u32", inserted),
        ("selp", ("b32", "b64"), "=", "= = pred", lambda a, b, c: np.where(c, a, b)),
        ("mul.wide", ("u32",), "u64", "= =", lambda a, b: a.astype("u8") * b.astype("u8")),
        ("mov", ("u32", "u64"), "=", "=", np.copy),
        ("cvta.to.global", ("u64",), "=", "=", np.copy),
    ]
    table = {
        f"{name}.{t}": Operation(
            result.replace("=", t), tuple(operands.replace("=", t).split()), of
        )
        for name, kinds, result, operands, of in rows
        for t in kinds
    }
    integer = ("u64.u32", "u16.u32", "u32.u16", "s32.s8", "u32.u8")
    for kinds in (*integer, "f32.f16", "rn.f16.f32"):
        to, source = kinds.split(".")[-2:]
        cast = rounded(functools.partial(np.ndarray.astype, dtype=TYPES[to]))
        table[f"cvt.{kinds}"] = Operation(to, (source,), cast, wider=kinds in integer)
    return table


OPERATIONS = _operations()
ADDRESS = re.compile(r"\[(%?\w+)\]")
MEMORY = re.compile(r"(ld\.param|ld\.global|st\.global)(?:\.v([24]))?\.([su](?:8|16|32|64))")


@dataclass(frozen=True)
class Instruction:
    guard: str  # a predicate, or empty
    name: str
    operands: tuple[str, ...]
    text: str


@dataclass
class Program:
    """A module of one entry."""

    text: str
    params: list[str] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)  # name -> type
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    most_threads: int = 0

    def __post_init__(self) -> None:
        head = re.match(
            r"(?://.*\n)*\.version \d\.\d\n\.target sm_\d+\n\.address_size 64\n\n\.visible \.entry (\w+)\(\n"
            r"((?:  \.param \.u64 \w+,?\n)+)\)\n\.maxntid (\d+), 1, 1\n\{\n",
            self.text,
        )
        if not head or not self.text.endswith("}\n"):
            raise NotKnown(self.text[:200])
        self.entry, self.most_threads = head[1], int(head[3])
        self.params = re.findall(r"\.param \.u64 (\w+)", head[2])
        for line in self.text[head.end() : -2].splitlines():
            self.take(line.strip())

    def take(self, line: str) -> None:
        if found := re.fullmatch(r"\.reg \.(\w+) (.+);", line):
            for name in found[2].split(", "):
                many = re.fullmatch(r"(%\w+)<(\d+)>", name)
                names = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]
                self.registers |= dict.fromkeys(names, found[1])
        elif found := re.fullmatch(r"(\w+):", line):
            self.labels[found[1]] = len(self.code)
        elif found := re.fullmatch(r"(?:@(%\w+) )?([\w.]+)(?: (.+))?;", line):
            parts = re.findall(r"\{[^}]*\}|[^,\s]+", found[3] or "")
            self.code.append(Instruction(found[1] or "", found[2], tuple(parts), line))
        else:
            raise NotKnown(line)


class Memory:
    """Buffers between bytes that nobody may touch. Addresses are not the host's."""

    def __init__(self) -> None:
        self.base = 0x7F12_3456_0000
        self.data = np.full(4096, 0xEE, np.uint8)
        self.allowed = np.zeros(4096, np.bool_)
        self.written = np.zeros(4096, np.uint32)  # how many times

    def put(self, content: Array, align: int, skew: int = 0) -> int:
        """The address of a copy; skew: bytes behind a multiple of align."""
        at = -(-self.data.size // align) * align + align * (32 // align + 1) + skew
        size = at + content.nbytes + 64
        for name, fill in (("data", 0xEE), ("allowed", 0), ("written", 0)):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.full(size - old.size, fill, old.dtype)]))
        self.data[at : at + content.nbytes] = content.view(np.uint8)
        self.allowed[at : at + content.nbytes] = True
        return self.base + at

    def get(self, address: int, dtype: Any, count: int) -> Array:
        at = address - self.base
        return self.data[at : at + count * np.dtype(dtype).itemsize].view(dtype)

    def places(self, addresses: Array, size: int) -> Any:
        at = (addresses - np.uint64(self.base)).astype(np.int64)
        if (addresses % size).any() or (at < 0).any() or (at + size > self.data.size).any():
            raise NotKnown(f"an access of {size} bytes at {hex(int(addresses[0]))}")
        places = at[:, None] + np.arange(size)
        if not self.allowed[places].all():
            raise NotKnown(f"an access of {size} bytes outside of all buffers")
        return places

    def check_guards(self) -> None:
        assert (self.data[~self.allowed] == 0xEE).all()


class Machine:
    """All threads in lockstep. Those that have come least far go next, so that they meet again behind a loop."""

    def __init__(
        self, program: Program, memory: Memory, params: list[int], grid: int, block: int
    ) -> None:
        assert len(params) == len(program.params)
        assert block <= program.most_threads
        self.program, self.memory = program, memory
        self.params = dict(zip(program.params, params))
        thread = np.arange(grid * block, dtype=np.uint32)
        self.special = {
            "%tid.x": thread % np.uint32(block), "%ctaid.x": thread // np.uint32(block),
            "%ntid.x": np.full_like(thread, block), "%nctaid.x": np.full_like(thread, grid),
        }  # fmt: skip
        self.threads = thread.size
        self.values: dict[str, Array] = {}

    def run(self) -> None:
        code, starts = self.program.code, set(self.program.labels.values())
        pc = np.zeros(self.threads, np.int64)
        with np.errstate(all="ignore"):
            while (pc < len(code)).any():
                at = int(pc.min())
                mask = pc == at
                going = True
                while going:
                    one = code[at]
                    at += 1
                    pc[mask] = at
                    if one.name == "bra":
                        jumping = mask & self.read(one.guard, "pred") if one.guard else mask
                        pc[jumping] = self.program.labels[one.operands[0]]
                        going = False
                    elif one.name == "ret":
                        if one.guard:
                            raise NotKnown(one.text)
                        pc[mask] = len(code)
                        going = False
                    else:
                        self.step(one, mask)
                        going = at not in starts

    def step(self, one: Instruction, mask: Array) -> None:
        if one.guard:
            raise NotKnown(one.text)
        operation = OPERATIONS.get(one.name)
        if operation is None:
            self.access(one, mask)
            return
        if len(one.operands) != 1 + len(operation.operands):
            raise NotKnown(one.text)
        operands = [
            self.read(name, kind, operation.wider)
            for name, kind in zip(one.operands[1:], operation.operands)
        ]
        self.write(one.operands[0], operation.result, operation.of(*operands), mask)

    # -- registers -----------------------------------------------------------------------------------------------------

    def read(self, name: str, kind: str, wider: bool = False) -> Any:
        value = self.values.get(name)
        if value is None:
            if name in self.special and kind == "u32":
                return self.special[name]
            return constant(name, kind)
        has, wanted = value.itemsize, BYTES[kind]
        if (value.dtype == np.bool_) != (kind == "pred") or has < wanted:
            raise NotKnown(f"{name} as {kind}")
        if has > wanted:
            if not wider:
                raise NotKnown(f"{name} as {kind}")
            value = value.astype(f"u{wanted}")
        return value.view(TYPES[kind])

    def write(self, name: str, kind: str, value: Array, mask: Array) -> None:
        register = self.program.registers.get(name, "none")
        if BYTES.get(register) != BYTES[kind] or (register == "pred") != (kind == "pred"):
            raise NotKnown(f"{name} as {kind}")
        old = self.values.get(name)
        if old is None:
            old = np.zeros(self.threads, TYPES[register])
        self.values[name] = np.where(mask, value.view(TYPES[register]), old)

    def write_loaded(self, name: str, kind: str, value: Array, mask: Array) -> None:
        """A register may be wider than what is loaded: then the sign or zeros fill it."""
        register = self.program.registers.get(name, "pred")
        if BYTES[register] > BYTES[kind]:
            kind = kind[0] + register[1:]
            value = value.astype(TYPES[kind])
        self.write(name, kind, value, mask)

    # -- memory --------------------------------------------------------------------------------------------------------

    def access(self, one: Instruction, mask: Array) -> None:
        found = MEMORY.fullmatch(one.name)
        if not found or len(one.operands) != 2:
            raise NotKnown(one.text)
        to, source = one.operands
        kind, count = found[3], int(found[2] or 1)
        if found[1] == "ld.global":
            self.load(to, source, kind, count, mask)
        elif found[1] == "st.global":
            self.store(to, source, kind, count, mask)
        elif count == 1:
            self.load_param(to, source, kind)
        else:
            raise NotKnown(one.text)

    def load_param(self, to: str, source: str, kind: str) -> None:
        found = ADDRESS.fullmatch(source)
        if not found or found[1] not in self.params:
            raise NotKnown(source)
        whole = np.full(self.threads, self.params[found[1]], np.uint64)
        low = whole.astype(f"u{BYTES[kind]}").view(TYPES[kind])
        self.write_loaded(to, kind, low, np.ones(self.threads, np.bool_))

    def names(self, operand: str, count: int) -> list[str]:
        names = operand.strip("{}").split(", ")
        if len(names) != count or (operand[0] == "{") != (count > 1):
            raise NotKnown(operand)
        return names

    def addresses(self, operand: str, mask: Array) -> Any:
        found = ADDRESS.fullmatch(operand)
        if not found:
            raise NotKnown(operand)
        return self.read(found[1], "u64")[mask]

    def load(self, to: str, source: str, kind: str, count: int, mask: Array) -> None:
        places = self.memory.places(self.addresses(source, mask), count * BYTES[kind])
        found = self.memory.data[places].view(TYPES[kind])
        for i, name in enumerate(self.names(to, count)):
            value = np.zeros(self.threads, TYPES[kind])
            value[mask] = found[:, i]
            self.write_loaded(name, kind, value, mask)

    def store(self, to: str, source: str, kind: str, count: int, mask: Array) -> None:
        places = self.memory.places(self.addresses(to, mask), count * BYTES[kind])
        values = [self.read(name, kind, wider=True)[mask] for name in self.names(source, count)]
        self.memory.data[places] = np.stack(values, axis=1).view(np.uint8)
        self.memory.written[places] += 1


# -- what is tested ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    dtype: model.Type
    op: int
    sources: int
    destinations: int = 1
    on_device: int = 0

    def line(self) -> str:
        return f"{self.dtype.code} {self.op} {self.sources} {self.destinations} {self.on_device}\n"


@functools.cache
def printer() -> Path:
    here = ROOT / "tests" / "native" / "hal_cuda" / "reduce_ptx_print.cc"
    return compiled("reduce_ptx_print", [here, ROOT / "devproxy/hal/cuda/reduce_ptx.cc"])


def texts(shapes: Iterable[Shape]) -> list[str]:
    lines = "".join(shape.line() for shape in shapes)
    done = subprocess.run(
        [printer()], input=lines, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.split("\0")[:-1]


def parted(text: str) -> tuple[str, list[int]]:
    """The PTX, and the parameters that reduce_ptx_print.cc shows behind it."""
    ptx, params = re.fullmatch(r"(.*\n)// ([\d ]+)\n", text, re.DOTALL).groups()  # type: ignore[union-attr]
    return ptx, [int(one) for one in params.split()]


@functools.cache
def program(shape: Shape) -> Program:
    return Program(parted(texts([shape])[0])[0])


def one_scalar(dtype: model.Type, seed: int) -> Array:
    return model.data(dtype, 1, seed, False)


def check(
    shape: Shape,
    inputs: list[Array],
    scalars: list[Array],
    *,
    in_place: bool,
    skew: int,
    blocks: int = BLOCKS,
    ptx: Program | None = None,
) -> None:
    """One launch. In place: the destinations are the last sources. skew: elements from a multiple of 16 bytes."""
    dtype, count = shape.dtype, inputs[0].size
    memory = Memory()
    sources = [memory.put(a, 256, skew * dtype.bytes * (r % 2)) for r, a in enumerate(inputs)]
    nothing = np.zeros(count, dtype.raw)
    destinations = (
        sources[shape.sources - shape.destinations :]
        if in_place
        else [
            memory.put(nothing, 256, skew * dtype.bytes * (shape.sources == 1))
            for _ in range(shape.destinations)
        ]
    )
    params = [count, *sources, *destinations]
    if shape.op == model.PREMULSUM:
        for rank, scalar in enumerate(scalars):
            if shape.on_device >> rank & 1:
                params.append(memory.put(scalar, dtype.bytes, dtype.bytes))
            else:  # the param's other bytes are anything
                params.append(int.from_bytes((scalar.tobytes() + b"\xa5" * 8)[:8], "little"))
    want = model.reduce(dtype, shape.op, inputs, scalars)
    Machine(ptx or program(shape), memory, params, blocks, THREADS).run()
    for at in destinations:
        got = memory.get(at, dtype.raw, count)
        assert model.same(dtype, got, want), (shape, differing(dtype, got, want, inputs))
    for at, before in zip(sources, inputs):
        if at not in destinations:
            assert memory.get(at, np.uint8, before.nbytes).tobytes() == before.tobytes()
    memory.check_guards()
    assert int(memory.written.sum()) == len(destinations) * count * dtype.bytes
    assert memory.written.max(initial=0) <= 1


def differing(dtype: model.Type, got: Array, want: Array, inputs: list[Array]) -> str:
    at = next(i for i in range(got.size) if not model.same(dtype, got[i : i + 1], want[i : i + 1]))
    of = [a[at : at + 1].tobytes()[::-1].hex() for a in (got, want, *inputs)]
    return f"element {at}: {of[0]} for {of[1]} of {of[2:]}"


@pytest.mark.parametrize("op", range(6), ids=model.REDUCTIONS)
@pytest.mark.parametrize("dtype", model.TYPES, ids=lambda t: t.name)
def test_kernels_are_the_models(dtype: model.Type, op: int) -> None:
    for ranks in RANKS:
        seed = ranks * 100 + op * 10 + dtype.code * 7
        scalars = [one_scalar(dtype, seed * 2000 + r) for r in range(ranks)]
        on_device = (
            np.random.default_rng(seed).integers(0, 1 << ranks) if op == model.PREMULSUM else 0
        )
        some = (ranks + 1) // 2
        for special, destinations, in_place, skew in (
            (True, ranks, True, 0), (True, some, False, 1), (False, some, seed % 2 == 0, 0),
        ):  # fmt: skip
            # Some threads take 16 bytes twice, and some elements are left; with skew each is taken alone.
            count = 250 if skew else BLOCKS * THREADS * 4 // 3 * 16 // dtype.bytes + 1
            inputs = [model.data(dtype, count, seed * 1000 + r, special) for r in range(ranks)]
            shape = Shape(dtype, op, ranks, destinations, int(on_device))
            check(shape, inputs, scalars, in_place=in_place, skew=skew)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, BLOCKS * THREADS, 5 * BLOCKS * THREADS + 1])
def test_any_number_of_elements(count: int) -> None:
    for name in ("int8", "float64"):
        dtype = BY_NAME[name]
        for skew in (0, 1):
            inputs = [model.data(dtype, count, r, True) for r in range(2)]
            check(Shape(dtype, model.SUM, 2, 2), inputs, [], in_place=False, skew=skew)


@pytest.mark.parametrize("name", ["uint8", "int32", "float32", "float8e4m3"])
def test_most_sources(name: str) -> None:
    dtype = BY_NAME[name]
    for ranks, op in ((13, model.AVG), (33, model.SUM), (64, model.PREMULSUM)):
        inputs = [model.data(dtype, 501, r, False) for r in range(ranks)]
        scalars = [one_scalar(dtype, 1000 + r) for r in range(ranks)]
        shape = Shape(dtype, op, ranks, ranks, 0x8000_0000_0000_0001 if ranks == 64 else 0)
        check(shape, inputs, scalars, in_place=True, skew=0)


@pytest.mark.parametrize("op", range(6), ids=model.REDUCTIONS)
@pytest.mark.parametrize("name", ["int8", "uint8", "float8e4m3", "float8e5m2"])
def test_every_pair_of_bytes(name: str, op: int) -> None:
    dtype = BY_NAME[name]
    a, b = (
        c.astype(np.uint8).ravel().view(dtype.raw)
        for c in np.meshgrid(np.arange(256), np.arange(256))
    )
    scalars = [dtype.narrow(np.array([s]).astype(dtype.wide)) for s in (3, 5)]
    check(Shape(dtype, op, 2), [a, b], scalars, in_place=False, skew=0, blocks=64)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_16_bit_number(name: str) -> None:
    """Widened and narrowed: a sum with each of a few others, so that results lie between two numbers too."""
    dtype = BY_NAME[name]
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype.raw)
    for other in range(0, 1 << 16, 0x1357):
        with_it = np.full(every.size, other, np.uint16).view(dtype.raw)
        for op in (model.SUM, model.PROD):
            check(Shape(dtype, op, 2), [every, with_it], [], in_place=False, skew=0, blocks=64)


def test_parameters_and_the_first_line() -> None:
    shape = Shape(BY_NAME["bfloat16"], model.PREMULSUM, 4, 3, 0b1010)
    ptx, params = parted(texts([shape])[0])
    said = "// devproxy reduce type=9 reduction=5 sources=4 destinations=3 on_device=0101\n"
    assert ptx.startswith(said)
    parsed = Program(ptx)
    assert parsed.entry == "devproxy_reduce"
    firsts = {"source": 1000, "destination": 2000, "scalar": 3000}
    numbered = [re.fullmatch(r"([a-z]+)(\d+)", name) for name in parsed.params[1:]]
    assert parsed.params[0] == "count"
    assert params == [1] + [firsts[n[1]] + int(n[2]) for n in numbered if n]
    # Without scalars it has no parameters for them, and its first line says none.
    ptx, params = parted(texts([Shape(BY_NAME["float32"], model.SUM, 2, 1, 3)])[0])
    assert ptx.startswith(
        "// devproxy reduce type=7 reduction=0 sources=2 destinations=1 on_device=00\n"
    )
    assert params == [1, 1000, 1001, 2000] and len(Program(ptx).params) == 4


@pytest.mark.parametrize(
    "line",
    [
        "add.f32 %r0, %r1, %r2", "fma.rn.f32 %r0, %r1, %r2, %r1", "add.rn.ftz.f32 %r0, %r1, %r2",
        "max.f32 %r0, %r1, %r2", "add.rn.f32 %r0, %r1, %r99", "add.rn.f64 %r0, %r1, %r2",
        "ld.global.nc.u32 %r0, [%offset]", "ld.global.f32 %r0, [%offset]", "st.global.u32 [%offset+4], %r0",
        "@%p0 add.rn.f32 %r0, %r1, %r2", "call helper", "bar.sync 0", "mov.u32 %r0, %laneid",
    ],
)  # fmt: skip
def test_interpreter_refuses_what_it_does_not_know(line: str) -> None:
    shape = Shape(BY_NAME["float32"], model.SUM, 3)
    ptx = parted(texts([shape])[0])[0]
    (place,) = re.findall(r"elements:\n", ptx)
    inputs = [model.data(shape.dtype, 40, r, False) for r in range(3)]
    with pytest.raises(NotKnown):
        changed = Program(ptx.replace(place, f"{place}  {line};\n"))
        check(shape, inputs, [], in_place=False, skew=0, ptx=changed)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"])
def test_ptxas_takes_it(arch: str, tmp_path: Path) -> None:
    """A shape of each type, none of whose values has to leave its register, and two of the largest."""
    ptxas = shutil.which("ptxas", path=str(Path(require_nvcc()).parent))
    assert ptxas
    shapes = [
        Shape(dtype, (dtype.code + at) % 6, 5, 2, 0b00010) for at, dtype in enumerate(model.TYPES)
    ]
    shapes += [Shape(BY_NAME[name], model.SUM, 64, 64) for name in ("float8e4m3", "float64")]

    def assemble(at: int, text: str) -> str:
        source = tmp_path / f"{at}.ptx"
        source.write_text(parted(text)[0])
        command = [
            ptxas,
            "-v",
            f"-arch={arch}",
            "-o",
            str(source.with_suffix(".cubin")),
            str(source),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, (shapes[at], done.stderr)
        return done.stderr

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for shape, said in zip(shapes, pool.map(assemble, range(len(shapes)), texts(shapes))):
            assert "warning" not in said
            if shape.sources < 64:
                assert "0 bytes spill stores, 0 bytes spill loads" in said
