# SPDX-License-Identifier: Apache-2.0
"""What programs do with NCCL besides single collectives: groups, streams, several communicators, graphs, derived ones.

    devproxy-run --gpus G -- python tests/comm/scenarios.py FOLDER RANKS [SCENARIO ...]

Every rank runs the same scenarios one after another; with fewer GPUs than ranks some ranks share one.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import model  # type: ignore[import-not-found]  # noqa: E402
import nccl  # type: ignore[import-not-found]  # noqa: E402
from nccl import FLOAT32, FLOAT64, INT32, SIZE, SUM, Buffer, Comm, Group  # type: ignore[import-not-found]  # noqa: E402

byref = ctypes.byref
Scenario = Callable[[Comm, Path], None]
SCENARIOS: dict[str, Scenario] = {}
F32 = model.TYPES[7]


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def floats(comm: Comm, count: int, salt: int = 0) -> list[model.Array]:
    """What each rank has."""
    return [model.data(F32, count, salt * 100 + r, False) for r in range(comm.ranks)]


def all_reduce(comm: Comm, data: Buffer, count: int, stream: object = None) -> None:
    nccl.nccl(
        "ncclAllReduce",
        data.ptr,
        data.ptr,
        SIZE(count),
        FLOAT32,
        SUM,
        comm.handle,
        stream or comm.stream,
    )


def check_sum(comm: Comm, count: int, salt: int) -> None:
    inputs = floats(comm, count, salt)
    data = Buffer(count * 4).write(inputs[comm.rank])
    all_reduce(comm, data, count)
    comm.wait()
    assert model.same(F32, data.read(np.float32, count), model.reduce(F32, SUM, inputs))
    data.free()


def send(comm: Comm, data: Buffer, count: int, peer: int, stream: object = None) -> None:
    nccl.nccl("ncclSend", data.ptr, SIZE(count), FLOAT32, peer, comm.handle, stream or comm.stream)


def recv(comm: Comm, data: Buffer, count: int, peer: int, stream: object = None) -> None:
    nccl.nccl("ncclRecv", data.ptr, SIZE(count), FLOAT32, peer, comm.handle, stream or comm.stream)


# -- groups -------------------------------------------------------------------------------------------------------------


@scenario
def group_of_collectives(comm: Comm, folder: Path) -> None:
    """Thirty of several sizes in one group, in nested groups; the results of one are the inputs of no other."""
    counts = [1 + 977 * i % 9001 for i in range(30)]
    inputs = [floats(comm, n, i) for i, n in enumerate(counts)]
    buffers = [Buffer(n * 4).write(inputs[i][comm.rank]) for i, n in enumerate(counts)]
    with Group():
        for i, n in enumerate(counts):
            with Group():
                all_reduce(comm, buffers[i], n)
    comm.wait()
    for i, n in enumerate(counts):
        assert model.same(F32, buffers[i].read(np.float32, n), model.reduce(F32, SUM, inputs[i])), i


@scenario
def group_of_kinds(comm: Comm, folder: Path) -> None:
    """A collective, sends and receives in one group, in another order at each rank."""
    n, rank, ranks = 3000, comm.rank, comm.ranks
    inputs = floats(comm, n, 7)
    reduced, gathered = Buffer(n * 4).write(inputs[rank]), Buffer(n * 4 * ranks)
    out, mine = Buffer(n * 4), Buffer(n * 4).write(inputs[rank])
    calls = [
        lambda: send(comm, mine, n, (rank + 1) % ranks),
        lambda: recv(comm, out, n, (rank - 1) % ranks),
    ]
    with Group():
        if rank % 2:
            calls.reverse()
        calls[0]()
        all_reduce(comm, reduced, n)
        comm.call("ncclAllGather", mine.ptr, gathered.ptr, SIZE(n), FLOAT32)
        calls[1]()
    comm.wait()
    assert np.array_equal(out.read(np.float32, n), inputs[(rank - 1) % ranks])
    assert model.same(F32, reduced.read(np.float32, n), model.reduce(F32, SUM, inputs))
    assert np.array_equal(gathered.read(np.float32, n * ranks), np.concatenate(inputs))


@scenario
def all_to_all_by_send_and_recv(comm: Comm, folder: Path) -> None:
    """Also to itself, of several sizes, two messages for each pair, sends and receives in any order in the group."""
    rank, ranks = comm.rank, comm.ranks
    sizes = {
        (a, b, i): 1 + 5000 * ((a * 7 + b * 3 + i) % 5)
        for a in range(ranks)
        for b in range(ranks)
        for i in (0, 1)
    }
    values = {
        key: np.full(n, sum(k * 10**e for e, k in enumerate(key)), np.float32)
        for key, n in sizes.items()
    }
    out = {k: Buffer(n * 4).write(values[k]) for k, n in sizes.items() if k[0] == rank}
    into = {k: Buffer(n * 4) for k, n in sizes.items() if k[1] == rank}
    for turn in range(3):
        order = list(range(ranks))
        order = order[turn % ranks :] + order[: turn % ranks]
        with Group():
            for peer in reversed(order):
                for i in (0, 1):
                    recv(comm, into[peer, rank, i], sizes[peer, rank, i], peer)
            for peer in order:
                for i in (0, 1):
                    send(comm, out[rank, peer, i], sizes[rank, peer, i], peer)
        comm.wait()
        for key, buffer in into.items():
            assert np.array_equal(buffer.read(np.float32, sizes[key]), values[key]), key
            buffer.write(np.zeros(sizes[key], np.float32))


@scenario
def ring_of_sends(comm: Comm, folder: Path) -> None:
    """Without groups: rank 0 sends first, the others receive first. A message goes around three times."""
    n, rank, ranks = 20_000, comm.rank, comm.ranks
    data = Buffer(n * 4).write(np.full(n, rank, np.float32))
    for turn in range(3):
        if rank == 0:
            data.write(np.full(n, 100 + turn, np.float32))
            send(comm, data, n, 1)
            recv(comm, data, n, ranks - 1)
        else:
            recv(comm, data, n, rank - 1)
            send(comm, data, n, (rank + 1) % ranks)
        comm.wait()
        assert (data.read(np.float32, n) == 100 + turn).all()


@scenario
def communicators_in_any_order(comm: Comm, folder: Path) -> None:
    """Three communicators of the same ranks: in a group each rank names them in another order; the streams differ."""
    comms = [comm, comm.split(0, comm.rank), comm.split(0, -comm.rank)]
    n = 12_000
    inputs = [floats(c, n, 20 + i) for i, c in enumerate(comms)]
    buffers = [Buffer(n * 4).write(inputs[i][c.rank]) for i, c in enumerate(comms)]
    order = [(comm.rank + i) % 3 for i in range(3)]
    with Group():
        for i in order:
            all_reduce(comms[i], buffers[i], n)
    for i, c in enumerate(comms):
        c.wait()
        assert model.same(F32, buffers[i].read(np.float32, n), model.reduce(F32, SUM, inputs[i]))
    # The same on streams of their own, without a group.
    for i, c in enumerate(comms):
        buffers[i].write(inputs[i][c.rank])
    for i in order:
        all_reduce(comms[i], buffers[i], n)
    for i, c in enumerate(comms):
        c.wait()
        assert model.same(F32, buffers[i].read(np.float32, n), model.reduce(F32, SUM, inputs[i]))
    for c in comms[1:]:
        c.destroy()


@scenario
def streams_of_a_group(comm: Comm, folder: Path) -> None:
    """nccl.h: a group begins when all its streams have come to it, and all of them wait for its end."""
    n = 400_000
    streams = [nccl.new_stream() for _ in range(3)]
    inputs = [floats(comm, n, 40 + i) for i in range(3)]
    staged = [Buffer(n * 4).write(inputs[i][comm.rank]) for i in range(3)]
    work, result = [Buffer(n * 4) for _ in range(3)], [Buffer(n * 4) for _ in range(3)]
    for stream, a, b in zip(streams, work, staged, strict=True):
        copy_async(a, b, n * 4, stream)
    with Group():
        for stream, a in zip(streams, work, strict=True):
            all_reduce(comm, a, n, stream)
    for i, stream in enumerate(streams):  # each reads what another one has reduced
        copy_async(result[i], work[(i + 1) % 3], n * 4, stream)
    for i, stream in enumerate(streams):
        nccl.synchronize(stream)
        want = model.reduce(F32, SUM, inputs[(i + 1) % 3])
        assert model.same(F32, result[i].read(np.float32, n), want)


def copy_async(to: Buffer, source: Buffer, nbytes: int, stream: object) -> None:
    nccl.driver(
        "cuMemcpyDtoDAsync_v2",
        ctypes.c_uint64(to.addr),
        ctypes.c_uint64(source.addr),
        SIZE(nbytes),
        stream,
    )


@scenario
def one_communicator_on_two_streams(comm: Comm, folder: Path) -> None:
    """Its operations run in the order of submission, whichever stream."""
    n = 5000
    other = nccl.new_stream()
    inputs = floats(comm, n, 50)
    data = [Buffer(n * 4).write(inputs[comm.rank]) for _ in range(20)]
    for i, buffer in enumerate(data):
        all_reduce(comm, buffer, n, other if i % 2 else comm.stream)
    comm.wait()
    nccl.synchronize(other)
    want = model.reduce(F32, SUM, inputs)
    assert all(model.same(F32, b.read(np.float32, n), want) for b in data)


@scenario
def many_in_flight(comm: Comm, folder: Path) -> None:
    """Three hundred posted without a wait; each adds up what the one before has left."""
    n = 16
    data = Buffer(n * 4).write(np.ones(n, np.float32))
    half = np.float32(1 / comm.ranks)
    op = ctypes.c_int()
    nccl.nccl(
        "ncclRedOpCreatePreMulSum", byref(op), byref(ctypes.c_float(half)), FLOAT32, 1, comm.handle
    )
    want = np.ones(n, np.float32)
    for _ in range(300):
        comm.call("ncclAllReduce", data.ptr, data.ptr, SIZE(n), FLOAT32, op)
        want = model.reduce(
            F32, model.PREMULSUM, [want] * comm.ranks, [np.array([half])] * comm.ranks
        )
    comm.wait()
    assert model.same(F32, data.read(np.float32, n), want)


# -- graphs -------------------------------------------------------------------------------------------------------------


@scenario
def captured_graph(comm: Comm, folder: Path) -> None:
    """An all_reduce, an all_gather and a send and receive, captured once, launched three times on new inputs."""
    n, rank, ranks = 9000, comm.rank, comm.ranks
    data, gathered, around = Buffer(n * 4), Buffer(n * 4 * ranks), Buffer(n * 4)
    graph, instance = ctypes.c_void_p(), ctypes.c_void_p()
    nccl.driver("cuStreamBeginCapture_v2", comm.stream, 0)
    all_reduce(comm, data, n)
    comm.call("ncclAllGather", data.ptr, gathered.ptr, SIZE(n), FLOAT32)
    with Group():
        send(comm, data, n, (rank + 1) % ranks)
        recv(comm, around, n, (rank - 1) % ranks)
    nccl.driver("cuStreamEndCapture", comm.stream, byref(graph))
    nodes = ctypes.c_size_t()
    nccl.driver("cuGraphGetNodes", graph, None, byref(nodes))
    assert nodes.value == 3
    nccl.driver("cuGraphInstantiateWithFlags", byref(instance), graph, ctypes.c_ulonglong(0))
    for turn in range(3):
        inputs = floats(comm, n, 60 + turn)
        data.write(inputs[rank])
        nccl.driver("cuGraphLaunch", instance, comm.stream)
        comm.wait()
        want = model.reduce(F32, SUM, inputs)
        assert model.same(F32, data.read(np.float32, n), want)
        assert model.same(F32, gathered.read(np.float32, n * ranks), np.tile(want, ranks))
        assert model.same(F32, around.read(np.float32, n), want)
    nccl.driver("cuGraphExecDestroy", instance)
    nccl.driver("cuGraphDestroy", graph)
    check_sum(comm, 100, 1)


# -- making and ending communicators ------------------------------------------------------------------------------------


@functools.cache
def serial(what: str) -> list[int]:
    return [0]


def fresh_id(comm: Comm, folder: Path, what: str) -> nccl.UniqueId:
    serial(what)[0] += 1
    return nccl.unique_id(folder, comm.rank, f"{what}{serial(what)[0]}")


def poll(comm: Comm) -> int:
    """Until it is no longer in progress."""
    until = time.monotonic() + 30
    while (code := comm.error()) == nccl.IN_PROGRESS:
        assert time.monotonic() < until
        time.sleep(0.001)
    return int(code)


@scenario
def init_with_config(comm: Comm, folder: Path) -> None:
    handle = nccl.P()
    config = nccl.Config.make(blocking=True)
    uid = fresh_id(comm, folder, "config")
    nccl.nccl("ncclCommInitRankConfig", byref(handle), comm.ranks, uid, comm.rank, byref(config))
    made = Comm(handle, comm.rank, comm.ranks)
    check_sum(made, 1000, 2)
    made.destroy()


@scenario
def init_without_blocking(comm: Comm, folder: Path) -> None:
    """The last rank comes late: until then all others are in progress, and the call has returned."""
    handle, config = nccl.P(), nccl.Config.make(blocking=False)
    uid = fresh_id(comm, folder, "polling")
    last = comm.rank == comm.ranks - 1
    if last:
        time.sleep(0.2)
    begin = time.monotonic()
    code = nccl.lib.ncclCommInitRankConfig(byref(handle), comm.ranks, uid, comm.rank, byref(config))
    took = time.monotonic() - begin
    assert code in (nccl.SUCCESS, nccl.IN_PROGRESS), code
    made = Comm(handle, comm.rank, comm.ranks)
    if comm.rank == 0:
        assert took < 0.15, took
        assert made.error() == nccl.IN_PROGRESS
    assert poll(made) == nccl.SUCCESS
    check_sum(made, 1000, 3)
    # In a group: GroupEnd returns at once too.
    uid, other = fresh_id(comm, folder, "polling"), nccl.P()
    nccl.nccl("ncclGroupStart")
    nccl.lib.ncclCommInitRankConfig(byref(other), comm.ranks, uid, comm.rank, byref(config))
    assert nccl.lib.ncclGroupEnd() in (nccl.SUCCESS, nccl.IN_PROGRESS)
    second = Comm(other, comm.rank, comm.ranks)
    assert poll(second) == nccl.SUCCESS
    check_sum(second, 10, 4)
    second.destroy()
    made.destroy()


@scenario
def init_scalable(comm: Comm, folder: Path) -> None:
    ids = (nccl.UniqueId * 2)(*(fresh_id(comm, folder, f"scalable{i}-") for i in range(2)))
    handle = nccl.P()
    nccl.nccl("ncclCommInitRankScalable", byref(handle), comm.ranks, comm.rank, 2, ids, None)
    made = Comm(handle, comm.rank, comm.ranks)
    check_sum(made, 1000, 5)
    made.destroy()


@scenario
def what_a_communicator_says(comm: Comm, folder: Path) -> None:
    number = ctypes.c_int(-1)
    for name, want in (("ncclCommCount", comm.ranks), ("ncclCommUserRank", comm.rank),
                       ("ncclCommCuDevice", nccl.device_of(comm.rank))):  # fmt: skip
        nccl.nccl(name, comm.handle, byref(number))
        assert number.value == want, (name, number.value)
    nccl.nccl("ncclGetVersion", byref(number))
    assert number.value >= 22907  # which programs ask for before ncclCommSuspend


@scenario
def split_by_color(comm: Comm, folder: Path) -> None:
    """Two halves, in the reverse order of the ranks, each at work; then of a half again."""
    half = comm.split(comm.rank % 2, -comm.rank)
    assert half is not None
    members = [r for r in range(comm.ranks) if r % 2 == comm.rank % 2]
    assert (half.rank, half.ranks) == (members[::-1].index(comm.rank), len(members))
    data = Buffer(4).write(np.array([10**comm.rank], np.int32))
    half.call("ncclAllReduce", data.ptr, data.ptr, SIZE(1), INT32, SUM)
    half.wait()
    assert data.read(np.int32, 1)[0] == sum(10**r for r in members)
    order = Buffer(4 * half.ranks)
    data.write(np.array([comm.rank], np.int32))
    half.call("ncclAllGather", data.ptr, order.ptr, SIZE(1), INT32)
    half.wait()
    assert order.read(np.int32, half.ranks).tolist() == members[::-1]
    alone = half.split(half.rank, 0)
    assert alone is not None and alone.ranks == 1
    check_sum(alone, 100, 6)
    alone.destroy()
    half.destroy()


@scenario
def split_with_equal_keys(comm: Comm, folder: Path) -> None:
    """Equal keys: by rank. Negative keys come first."""
    same = comm.split(3, 5)
    assert same is not None and (same.rank, same.ranks) == (comm.rank, comm.ranks)
    check_sum(same, 50, 7)
    first = comm.split(0, -1 if comm.rank == comm.ranks - 1 else 0)
    assert first is not None
    assert first.rank == (comm.rank + 1) % comm.ranks
    first.destroy()
    same.destroy()


@scenario
def split_without_color(comm: Comm, folder: Path) -> None:
    """NCCL_SPLIT_NOCOLOR: rank 0 gets none, the others go on without it."""
    some = comm.split(-1 if comm.rank == 0 else 4, comm.rank)
    if comm.rank == 0:
        assert some is None
    else:
        assert some is not None and (some.rank, some.ranks) == (comm.rank - 1, comm.ranks - 1)
        check_sum(some, 100, 8)
        some.destroy()
    check_sum(comm, 100, 9)


@scenario
def shrink(comm: Comm, folder: Path) -> None:
    """The second rank is left out and does not call it."""
    if comm.rank != 1:
        handle, out = nccl.P(), (ctypes.c_int * 1)(1)
        nccl.nccl("ncclCommShrink", comm.handle, out, 1, byref(handle), None, 0)
        fewer = Comm(handle, max(comm.rank - 1, 0), comm.ranks - 1)
        number = ctypes.c_int()
        nccl.nccl("ncclCommUserRank", handle, byref(number))
        assert number.value == fewer.rank
        nccl.nccl("ncclCommCount", handle, byref(number))
        assert number.value == fewer.ranks
        check_sum(fewer, 2000, 10)
        fewer.destroy()
    # The parents have derived another number of communicators: nccl.h allows no split of this one any more, but its use.
    check_sum(comm, 100, 11)


def passed_on(folder: Path, name: str, uid: nccl.UniqueId | None) -> nccl.UniqueId:
    """An id, from the rank that has it to one that needs it."""
    path = folder / name
    if uid is None:
        uid = nccl.UniqueId()
        while not path.exists():
            time.sleep(0.005)
        ctypes.memmove(byref(uid), path.read_bytes(), 128)
    else:
        path.with_suffix(".part").write_bytes(uid.raw())
        path.with_suffix(".part").rename(path)
    return uid


def numbers_of(handle: object) -> tuple[int, int]:
    rank, ranks = ctypes.c_int(-1), ctypes.c_int(-1)
    nccl.nccl("ncclCommUserRank", handle, byref(rank))
    nccl.nccl("ncclCommCount", handle, byref(ranks))
    return rank.value, ranks.value


@scenario
def grow(comm: Comm, folder: Path) -> None:
    """The last rank joins the others, twice: the first time the coordinator shows the id, the second time nobody does.

    Ids of one communicator are never equal, and the first growth leaves the communicator as it was.
    """
    last = comm.ranks - 1
    few = comm.split(-1 if comm.rank == last else 0, comm.rank)
    for turn in (1, 2):
        handle, uid = nccl.P(), nccl.UniqueId()
        if comm.rank == 0:
            other = nccl.UniqueId()
            nccl.nccl("ncclCommGetUniqueId", few.handle, byref(other))
            nccl.nccl("ncclCommGetUniqueId", few.handle, byref(uid))
            assert uid.raw() != other.raw()
            passed_on(folder, f"grow{turn}", uid)
        if few is None:
            uid = passed_on(folder, f"grow{turn}", None)
            nccl.nccl("ncclCommGrow", None, comm.ranks, byref(uid), last, byref(handle), None)
        else:
            shown = byref(uid) if comm.rank == 0 and turn == 1 else None
            nccl.nccl("ncclCommGrow", few.handle, comm.ranks, shown, -1, byref(handle), None)
        assert numbers_of(handle) == (comm.rank, comm.ranks)
        grown = Comm(handle, comm.rank, comm.ranks)
        check_sum(grown, 3000, 12)
        if few is not None:
            check_sum(few, 100, 13)
        if comm.rank == 0:  # the id of a growth that was
            again = nccl.P()
            refused = nccl.lib.ncclCommGrow(few.handle, 99, byref(uid), -1, byref(again), None)
            assert refused == 4 and not again
        grown.destroy()
    if few is not None:
        few.destroy()


@scenario
def grow_without_waiting(comm: Comm, folder: Path) -> None:
    """A non-blocking communicator grows as one, unless its config says otherwise."""
    last = comm.ranks - 1
    config, few = nccl.Config.make(blocking=False), nccl.P()
    color, begun = (-1, 0) if comm.rank == last else (0, nccl.IN_PROGRESS)
    split = nccl.lib.ncclCommSplit
    assert split(comm.handle, color, comm.rank, byref(few), byref(config)) == begun
    if few:
        assert poll(Comm(few, comm.rank, last)) == nccl.SUCCESS
    handle, uid = nccl.P(), None
    if comm.rank == 0:
        uid = nccl.UniqueId()
        nccl.nccl("ncclCommGetUniqueId", few, byref(uid))
    if comm.rank in (0, last):
        uid = passed_on(folder, "grow_without_waiting", uid)
    if few:
        begun = nccl.lib.ncclCommGrow(few, comm.ranks, None, -1, byref(handle), None)
        assert begun == nccl.IN_PROGRESS
    else:
        nccl.nccl("ncclCommGrow", None, comm.ranks, byref(uid), last, byref(handle), None)
    grown = Comm(handle, comm.rank, comm.ranks)
    assert poll(grown) == nccl.SUCCESS
    check_sum(grown, 500, 14)
    grown.destroy()
    if few:
        nccl.nccl("ncclCommDestroy", few)


@scenario
def revoke(comm: Comm, folder: Path) -> None:
    """What waits for the others ends, nothing new begins; and what comes from the communicator works."""
    mine = comm.split(0, comm.rank)
    assert mine is not None
    data = Buffer(40).write(np.ones(10, np.float32))
    if comm.rank == 0:
        all_reduce(mine, data, 10)
        time.sleep(0.05)
        assert comm.ranks == 1 or nccl.cuda.cuStreamQuery(mine.stream) == 600
    nccl.nccl("ncclCommRevoke", None, 0)
    assert nccl.lib.ncclCommRevoke(mine.handle, 1) == 4
    # No rank revokes it before all have come to this. Freeing memory would wait for what is stuck.
    here = Buffer(4).write(np.ones(1, np.float32))
    all_reduce(comm, here, 1)
    comm.wait()
    nccl.nccl("ncclCommRevoke", mine.handle, 0)
    mine.wait()
    assert mine.error() == 0
    for call, want in (
        (lambda: nccl.lib.ncclCommRevoke(mine.handle, 0), 4),
        (lambda: nccl.lib.ncclCommFinalize(mine.handle), 4),
        (lambda: nccl.lib.ncclAllReduce(data.ptr, data.ptr, SIZE(10), FLOAT32, SUM, mine.handle, mine.stream), 5),
        (lambda: nccl.lib.ncclSend(data.ptr, SIZE(10), FLOAT32, 0, mine.handle, mine.stream), 5),
    ):  # fmt: skip
        assert call() == want
    for turn in range(2):
        again = mine.split(0, -comm.rank)
        assert again is not None
        assert (again.rank, again.ranks) == (comm.ranks - 1 - comm.rank, comm.ranks)
        check_sum(again, 1000, 15 + turn)
        again.destroy()
    if comm.rank != 1:
        handle, out = nccl.P(), (ctypes.c_int * 1)(1)
        nccl.nccl("ncclCommShrink", mine.handle, out, 1, byref(handle), None, 0)
        fewer = Comm(handle, *numbers_of(handle))
        check_sum(fewer, 100, 18)
        fewer.destroy()
    mine.destroy()
    check_sum(comm, 100, 19)


@scenario
def suspend(comm: Comm, folder: Path) -> None:
    def stat(which: int) -> int:
        value = ctypes.c_uint64(99)
        nccl.nccl("ncclCommMemStats", comm.handle, which, byref(value))
        return value.value

    data = Buffer(4).write(np.ones(1, np.float32))
    for flags, suspended in ((0, 0), (2, 0), (1, 1)):
        nccl.nccl("ncclCommSuspend", comm.handle, flags)
        assert stat(1) == suspended and stat(0) + stat(2) == stat(3)
    begin = nccl.lib.ncclAllReduce
    assert begin(data.ptr, data.ptr, SIZE(1), FLOAT32, SUM, comm.handle, comm.stream) == 5
    assert nccl.lib.ncclCommSuspend(comm.handle, 1) == 5
    half = comm.split(0, comm.rank)  # which goes through the suspended one
    assert half is not None
    check_sum(half, 10, 20)
    half.destroy()
    nccl.nccl("ncclCommResume", comm.handle)
    assert stat(1) == 0 and nccl.lib.ncclCommResume(comm.handle) == 5
    for which in (-1, 4):
        assert nccl.lib.ncclCommMemStats(comm.handle, which, byref(ctypes.c_uint64())) == 4
    user = nccl.P(1)
    nccl.nccl("ncclWinGetUserPtr", comm.handle, None, byref(user))
    assert not user
    check_sum(comm, 10, 21)


@scenario
def premulsum_scalars(comm: Comm, folder: Path) -> None:
    """On the host, read at once; on the device, read when the operation runs. Each rank has its own."""
    n, rank = 5000, comm.rank
    dtype = model.TYPES[8]
    inputs = [model.data(dtype, n, 700 + r, False) for r in range(comm.ranks)]
    data = Buffer(n * 8).write(inputs[rank])
    host, op = ctypes.c_double(1.25 + rank), ctypes.c_int()
    nccl.nccl("ncclRedOpCreatePreMulSum", byref(op), byref(host), FLOAT64, 1, comm.handle)
    host.value = 99.0
    comm.call("ncclAllReduce", data.ptr, data.ptr, SIZE(n), FLOAT64, op)
    nccl.nccl("ncclRedOpDestroy", op, comm.handle)  # nccl.h: at once, also while it is used
    comm.wait()
    scalars = [np.array([1.25 + r]) for r in range(comm.ranks)]
    assert model.same(
        dtype, data.read(np.float64, n), model.reduce(dtype, model.PREMULSUM, inputs, scalars)
    )
    scalar = Buffer(8).write(np.array([99.0]))
    nccl.nccl("ncclRedOpCreatePreMulSum", byref(op), scalar.ptr, FLOAT64, 0, comm.handle)
    data.write(inputs[rank])
    scalar.write(np.array([-0.5 - rank]))
    comm.call("ncclAllReduce", data.ptr, data.ptr, SIZE(n), FLOAT64, op)
    comm.wait()
    scalars = [np.array([-0.5 - r]) for r in range(comm.ranks)]
    assert model.same(
        dtype, data.read(np.float64, n), model.reduce(dtype, model.PREMULSUM, inputs, scalars)
    )
    # It may be of each rank as it likes: some on the host, some on the device.
    mixed = ctypes.c_int()
    where = scalar.ptr if rank % 2 else ctypes.cast(byref(ctypes.c_double(-0.5 - rank)), nccl.P)
    nccl.nccl(
        "ncclRedOpCreatePreMulSum", byref(mixed), where, FLOAT64, 0 if rank % 2 else 1, comm.handle
    )
    data.write(inputs[rank])
    comm.call("ncclAllReduce", data.ptr, data.ptr, SIZE(n), FLOAT64, mixed)
    comm.wait()
    assert model.same(
        dtype, data.read(np.float64, n), model.reduce(dtype, model.PREMULSUM, inputs, scalars)
    )
    for made in (op, mixed):
        nccl.nccl("ncclRedOpDestroy", made, comm.handle)
        assert nccl.lib.ncclRedOpDestroy(made, comm.handle) == nccl.INVALID_ARGUMENT


@scenario
def registered_memory(comm: Comm, folder: Path) -> None:
    at, handle, n = nccl.P(), nccl.P(), 3000
    nccl.nccl("ncclMemAlloc", byref(at), SIZE(n * 4))
    nccl.nccl("ncclCommRegister", comm.handle, at, SIZE(n * 4), byref(handle))
    window = nccl.P(1)
    nccl.nccl("ncclCommWindowRegister", comm.handle, at, SIZE(n * 4), byref(window), 1)
    assert not window, "there is none, and NCCL says so by a null"
    inputs = floats(comm, n, 12)
    data = Buffer.__new__(Buffer)
    data.addr, data.nbytes = at.value, n * 4
    data.write(inputs[comm.rank])
    all_reduce(comm, data, n)
    comm.wait()
    assert model.same(F32, data.read(np.float32, n), model.reduce(F32, SUM, inputs))
    nccl.nccl("ncclCommWindowDeregister", comm.handle, window)
    nccl.nccl("ncclCommDeregister", comm.handle, handle)
    nccl.nccl("ncclMemFree", at)


@scenario
def broadcast_of_a_buffer(comm: Comm, folder: Path) -> None:
    """ncclBcast, the older name with one buffer."""
    n = 4000
    data = Buffer(n * 4).write(np.full(n, comm.rank, np.float32))
    for root in range(comm.ranks):
        data.write(np.full(n, comm.rank + 10 * root, np.float32))
        comm.call("ncclBcast", data.ptr, SIZE(n), FLOAT32, root)
        comm.wait()
        assert (data.read(np.float32, n) == root * 11).all()


@scenario
def finalize_and_destroy(comm: Comm, folder: Path) -> None:
    """Finalize returns when what was submitted is done, and destroy frees the id's place: thirty in a row."""
    for i in range(30):
        made = Comm.init(fresh_id(comm, folder, "row"), comm.rank, comm.ranks)
        data = Buffer(4).write(np.array([1], np.float32))
        all_reduce(made, data, 1)
        if i % 2:
            nccl.nccl("ncclCommFinalize", made.handle)
            assert nccl.cuda.cuStreamQuery(made.stream) == 0
        made.destroy()
        assert data.read(np.float32, 1)[0] == comm.ranks
        data.free()
    for _ in range(10):
        half = comm.split(comm.rank * 2 // comm.ranks, comm.rank)
        assert half is not None
        check_sum(half, 1, 13)
        half.destroy()
    check_sum(comm, 1, 13)  # all have destroyed theirs
    # The one in use, and those of ranks that are ahead. A tree that has no members forgets a communicator soon.
    for tree in trees():
        until = time.monotonic() + 10
        while len(left := [p.name for p in tree.glob("comm-*")]) > 4:
            assert time.monotonic() < until, left
            time.sleep(0.01)


def trees() -> set[Path]:
    """The job's folders."""
    places = json.loads(os.environ.get("TEST_TREES", "[]"))
    return {Path(place[0]) for place in places} or {Path(os.environ["DEVPROXY_JOB_DIR"])}


@scenario
def rank_alone(comm: Comm, folder: Path) -> None:
    """A communicator of one rank needs nobody."""
    uid, handle = nccl.UniqueId(), nccl.P()
    nccl.nccl("ncclGetUniqueId", byref(uid))
    nccl.nccl("ncclCommInitRank", byref(handle), 1, uid, 0)
    alone = Comm(handle, 0, 1)
    check_sum(alone, 20_000, 14)
    data, out = Buffer(40).write(np.arange(10, dtype=np.float32)), Buffer(40)
    with Group():
        send(alone, data, 10, 0)
        recv(alone, out, 10, 0)
    alone.wait()
    assert np.array_equal(out.read(np.float32, 10), np.arange(10, dtype=np.float32))
    alone.destroy()


@scenario
def a_thread_of_its_own(comm: Comm, folder: Path) -> None:
    """Two threads, a communicator each, at the same time; groups are the thread's own."""
    import threading

    other = comm.split(0, comm.rank)
    assert other is not None
    device, failed = nccl.device_of(comm.rank), []

    def work(which: Comm, salt: int) -> None:
        try:
            nccl.open_device(device)
            # Nothing is freed meanwhile: cuMemFree waits for the device, so for the other thread's partners.
            data = [Buffer(2800) for _ in range(2)]
            for i in range(20):
                inputs = floats(which, 700, salt + i)
                for buffer in data:
                    buffer.write(inputs[which.rank])
                with Group():
                    for buffer in data:
                        all_reduce(which, buffer, 700)
                which.wait()
                want = model.reduce(F32, SUM, inputs)
                for buffer in data:
                    assert model.same(F32, buffer.read(np.float32, 700), want)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(c, s)) for c, s in ((comm, 1000), (other, 2000))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    other.destroy()


def rank_main(rank: int, ranks: int, folder: Path) -> None:
    comm = Comm.init(nccl.unique_id(folder, rank), rank, ranks)
    for name in sys.argv[3:] or SCENARIOS:
        try:
            begin = time.monotonic()
            SCENARIOS[name](comm, folder)
            if rank == 0:
                print(f"{time.monotonic() - begin:.3f} s {name}", flush=True)
        except BaseException as error:
            error.add_note(f"rank {rank} of {ranks}, scenario {name}")
            raise
    comm.destroy()


if __name__ == "__main__":
    nccl.main(rank_main)
