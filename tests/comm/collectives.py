# SPDX-License-Identifier: Apache-2.0
"""Every collective with every type, operation, count, place of its buffers and kind of data, against the model.

    devproxy-run --gpus N -- python tests/comm/collectives.py FOLDER RANKS PART PARTS

runs each PARTS-th case from PART on. Each rank computes from the case's number what all ranks send.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import model  # type: ignore[import-not-found]  # noqa: E402
import nccl  # type: ignore[import-not-found]  # noqa: E402

COUNTS = (0, 1, 7, 1000, -1)  # -1: so many that the members share the work
SHARED_BYTES = 70_000  # of all contributions; hal/soft/comm/lane.cc has the limit
PLACES = ("in place", "out of place", "misaligned")
GUARD = 256
FUNCTIONS = {
    "all_reduce": "ncclAllReduce", "reduce": "ncclReduce", "reduce_scatter": "ncclReduceScatter",
    "broadcast": "ncclBroadcast", "all_gather": "ncclAllGather", "all_to_all": "ncclAlltoAll",
    "gather": "ncclGather", "scatter": "ncclScatter",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    number: int
    kind: str
    dtype: model.Type
    op: int
    count: int
    place: str
    special: bool

    def __str__(self) -> str:
        op = model.REDUCTIONS[self.op] if self.kind in model.REDUCING else ""
        special = " special" if self.special else ""
        return f"case {self.number}: {self.kind} {op} {self.dtype.name} {self.count} {self.place}{special}"


def all_cases(ranks: int) -> list[Case]:
    found: list[Case] = []
    for kind, dtype, count, place in itertools.product(FUNCTIONS, model.TYPES, COUNTS, PLACES):
        if place == "in place" and kind not in model.IN_PLACE:
            continue
        if count < 0:
            count = SHARED_BYTES // (dtype.bytes * ranks) + 13
        reducing = kind in model.REDUCING
        for op in range(6 if reducing else 1):
            for special in (False, True) if reducing and count else (True,):
                found.append(Case(len(found), kind, dtype, op, count, place, special))
    return found


class Wrong(AssertionError):
    """A result that is not the model's. Whatever has come of it, the ranks can go on with the next case."""


def check(right: bool, text: str) -> None:
    if not right:
        raise Wrong(text)


class Arena:
    """Device memory in which each case's buffers lie at the offsets it wants, between bytes that must not change."""

    def __init__(self, nbytes: int) -> None:
        self.memory = nccl.Buffer(nbytes + 2 * GUARD + 512)
        self.size = nbytes + 2 * GUARD + 512

    def fill(self, at: int, content: bytes) -> None:
        self.before = np.full(GUARD + at + len(content) + GUARD, 0xA5, np.uint8)
        self.before[GUARD + at : GUARD + at + len(content)] = np.frombuffer(content, np.uint8)
        self.memory.write(self.before)

    def pointer(self, at: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.memory.addr + GUARD + at)

    def after(self) -> model.Array:
        return self.memory.read(np.uint8, self.before.size)


def run(case: Case, comm: nccl.Comm, send: Arena, receive: Arena) -> None:
    kind, dtype, count, ranks, rank = case.kind, case.dtype, case.count, comm.ranks, comm.rank
    size, root = dtype.bytes, case.number % ranks
    inputs = [
        model.data(
            dtype, model.sent(kind, count, ranks, r, root), case.number * 64 + r, case.special
        )
        for r in range(ranks)
    ]
    scalars = [model.data(dtype, 1, case.number * 64 + 32 + r, False) for r in range(ranks)]
    op = case.op
    if op == model.PREMULSUM and kind in model.REDUCING:
        made = ctypes.c_int()
        nccl.nccl("ncclRedOpCreatePreMulSum", ctypes.byref(made), scalars[rank].ctypes.data_as(nccl.P),
                  dtype.code, 1, comm.handle)  # fmt: skip
        op = made.value
    want = model.collective(kind, dtype, case.op, inputs, count, rank, root, scalars)
    own, length = inputs[rank].tobytes(), model.received(kind, count, ranks, rank, root) * size
    expected_send: model.Array | None = None
    if case.place == "in place":
        send_at, recv_at = (size * n for n in model.in_place(kind, count, rank, root))
        span = max(send_at + len(own), recv_at + length)
        content = bytearray(b"\x5a" * span)
        content[send_at : send_at + len(own)] = own
        receive.fill(0, bytes(content))
        send_ptr = receive.pointer(send_at)
    else:
        send_at = recv_at = 0
        if case.place == "misaligned":
            send_at, recv_at = size * (1 + rank), size * (3 + 2 * rank)
        send.fill(send_at, own)
        expected_send = send.before
        receive.fill(recv_at, b"\x5a" * length)
        send_ptr = send.pointer(send_at)
    recv_ptr = receive.pointer(recv_at)
    arguments: list[object] = [send_ptr, recv_ptr, nccl.SIZE(count), dtype.code]
    if kind in model.REDUCING:
        arguments.append(op)
    if kind in ("reduce", "broadcast", "gather", "scatter"):
        arguments.append(root)
    comm.call(FUNCTIONS[kind], *arguments)
    comm.wait()
    if op >= model.PREMULSUM:
        nccl.nccl("ncclRedOpDestroy", op, comm.handle)
    got = receive.after()
    begin = GUARD + recv_at
    result = got[begin : begin + length]
    check(model.same(dtype, result.view(dtype.raw), want), f"rank {rank} of {ranks}: {case}")
    expected = receive.before.copy()
    expected[begin : begin + length] = result
    check(
        np.array_equal(got, expected),
        f"rank {rank} of {ranks}: {case}: bytes beside the result changed",
    )
    if expected_send is not None:
        check(
            np.array_equal(send.after(), expected_send),
            f"rank {rank} of {ranks}: {case}: its input changed",
        )


def rank_main(rank: int, ranks: int, folder: Path) -> None:
    part, parts = int(sys.argv[3]), int(sys.argv[4])
    comm = nccl.Comm.init(nccl.unique_id(folder, rank), rank, ranks)
    cases = all_cases(ranks)[part::parts]
    most = 2 * SHARED_BYTES * ranks
    send, receive = Arena(most), Arena(most)
    wrong: dict[str, int] = {}
    for case in cases:
        try:
            run(case, comm, send, receive)
        except Wrong as error:
            op = model.REDUCTIONS[case.op] if case.kind in model.REDUCING else ""
            name = f"{case.kind} {op} {case.dtype.name}"
            wrong[name] = wrong.get(name, 0) + 1
            if len(wrong) <= 20 and wrong[name] <= 2:
                sys.stderr.write(f"wrong: {error}\n")  # whole, whatever the other ranks write
    assert not wrong, f"{sum(wrong.values())} of {len(cases)} cases are wrong, by kind: {wrong}"
    assert comm.error() == nccl.SUCCESS
    comm.destroy()
    if rank == 0:
        print(f"{len(cases)} cases")


if __name__ == "__main__":
    nccl.main(rank_main)
