# SPDX-License-Identifier: Apache-2.0
"""How communicators fail: a member or a server dies, ranks disagree, arguments are wrong, programs use what is gone.

devproxy-run --gpus N -- python tests/comm/failures.py FOLDER RANKS SCENARIO
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import nccl  # type: ignore[import-not-found]  # noqa: E402
from nccl import FLOAT32, INT32, SIZE, SUM, Buffer, Comm, Group  # type: ignore[import-not-found]  # noqa: E402

byref = ctypes.byref
VICTIM = 2
Scenario = Callable[[int, int, Path], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def until(what: str, condition: Callable[[], bool], seconds: float = 20) -> float:
    """How long it took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.002)
    return time.monotonic() - begin


def all_reduce(comm: Comm, data: Buffer, count: int) -> None:
    comm.call("ncclAllReduce", data.ptr, data.ptr, SIZE(count), FLOAT32, SUM)


def fails(comm: Comm, code: int, *words: str, seconds: float = 20) -> float:
    """The communicator says so, by itself, with these words."""
    took = until("an asynchronous error", lambda: comm.error() != nccl.SUCCESS, seconds)
    assert comm.error() == code, (comm.error(), nccl.last_error())
    text = nccl.last_error()
    assert all(word in text for word in words), text
    return took


def abort(comm: Comm) -> None:
    """It returns at once, and the stream goes on."""
    begin = time.monotonic()
    nccl.nccl("ncclCommAbort", comm.handle)
    comm.wait()
    assert time.monotonic() - begin < 2, time.monotonic() - begin
    data = Buffer(4)
    nccl.driver("cuMemsetD32Async", ctypes.c_uint64(data.addr), 7, SIZE(1), comm.stream)
    comm.wait()
    assert data.read(np.int32, 1)[0] == 7


def mark(folder: Path, name: str) -> None:
    (folder / name).touch()


def wait_for(folder: Path, *names: str) -> None:
    until(f"{names}", lambda: all((folder / name).exists() for name in names))


def together(folder: Path, rank: int, ranks: Iterable[int]) -> None:
    """Nobody leaves before all have seen the failure: whoever looks late would find the others gone, too."""
    mark(folder, f"seen{rank}")
    wait_for(folder, *(f"seen{r}" for r in ranks))


def start(rank: int, ranks: int, folder: Path, count: int = 100_000) -> tuple[Comm, Buffer]:
    """A communicator that has worked."""
    comm = Comm.init(nccl.unique_id(folder, rank), rank, ranks)
    data = Buffer(count * 4).write(np.ones(count, np.float32))
    all_reduce(comm, data, count)
    comm.wait()
    return comm, data


# -- members and servers that die -----------------------------------------------------------------------------------


def one_dies(rank: int, ranks: int, folder: Path, count: int, many: bool = False) -> None:
    comm, data = start(rank, ranks, folder)
    if rank == VICTIM:
        wait_for(folder, *(f"posted{r}" for r in range(ranks) if r != VICTIM))
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(20 if many else 1):
        all_reduce(comm, data, count)
    assert comm.error() == nccl.SUCCESS
    mark(folder, f"posted{rank}")
    took = fails(comm, nccl.REMOTE, f"rank {VICTIM}")
    assert took < 3, took
    print(f"rank {rank}: remote error after {took:.3f} s", flush=True)
    together(folder, rank, (r for r in range(ranks) if r != VICTIM))
    abort(comm)


@scenario
def member_dies_small(rank: int, ranks: int, folder: Path) -> None:
    one_dies(rank, ranks, folder, 16)


@scenario
def member_dies_large(rank: int, ranks: int, folder: Path) -> None:
    one_dies(rank, ranks, folder, 100_000, many=True)


@scenario
def partner_dies(rank: int, ranks: int, folder: Path) -> None:
    """Whoever receives from the dead one learns of it; a pair of living ones is served before and after."""
    comm, data = start(rank, ranks, folder)
    if rank == VICTIM:
        wait_for(folder, "posted0")
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        comm.call("ncclRecv", data.ptr, SIZE(9), FLOAT32, VICTIM)
        mark(folder, "posted0")
        assert fails(comm, nccl.REMOTE, f"rank {VICTIM}") < 3
        mark(folder, "over")
    else:
        wait_for(folder, "over")
        if rank == 1:
            comm.call("ncclSend", data.ptr, SIZE(9), FLOAT32, 3)
        if rank == 3:
            comm.call("ncclRecv", data.ptr, SIZE(9), FLOAT32, 1)
        comm.wait()
        assert comm.error() == nccl.SUCCESS
    abort(comm)


@scenario
def member_dies_while_others_arrive(rank: int, ranks: int, folder: Path) -> None:
    """It has come, and is gone before the last one comes: ncclCommInitRank fails instead of waiting for ever."""
    uid = nccl.unique_id(folder, rank)
    handle, config = nccl.P(), nccl.Config.make(blocking=False)
    if rank == VICTIM:
        nccl.lib.ncclCommInitRankConfig(byref(handle), ranks, uid, rank, byref(config))
        time.sleep(0.3)
        mark(folder, "came")
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for(folder, "came")
    if rank == 0:
        return  # never comes
    begin = time.monotonic()
    code = nccl.lib.ncclCommInitRank(byref(handle), ranks, uid, rank)
    assert code == nccl.REMOTE, code
    assert f"rank {VICTIM}" in nccl.last_error(), nccl.last_error()
    assert time.monotonic() - begin < 3
    together(folder, rank, (1, 3))
    nccl.nccl("ncclCommAbort", handle)


@scenario
def server_dies(rank: int, ranks: int, folder: Path) -> None:
    """The test kills it, which sees processes that this one may not."""
    comm, data = start(rank, ranks, folder)
    if rank != VICTIM:
        all_reduce(comm, data, 100_000)
        assert comm.error() == nccl.SUCCESS
    mark(folder, f"posted{rank}")
    wait_for(folder, "killed")
    if rank == VICTIM:
        until("an error of the lost device", lambda: comm.error() == nccl.CUDA_ERROR)
        assert nccl.lib.ncclCommAbort(comm.handle) in (nccl.SUCCESS, nccl.CUDA_ERROR)
        return
    took = fails(comm, nccl.REMOTE, f"rank {VICTIM}", f"GPU {nccl.device_of(VICTIM)}")
    assert took < 3, took
    print(f"rank {rank}: remote error after {took:.3f} s", flush=True)
    together(folder, rank, (r for r in range(ranks) if r != VICTIM))
    abort(comm)


# -- ranks that disagree ------------------------------------------------------------------------------------------------


def disagreement(own: Callable[[Comm, Buffer], None], word: str) -> Scenario:
    """Rank 1 does something else than the others, which all_reduce a hundred float32."""

    def run(rank: int, ranks: int, folder: Path) -> None:
        comm, data = start(rank, ranks, folder)
        if rank == 1:
            own(comm, data)
        else:
            all_reduce(comm, data, 100)
        fails(comm, nccl.INVALID_USAGE, "rank 1", word, "(100 x float32")
        together(folder, rank, range(ranks))
        abort(comm)

    return run


def other_call(name: str, *arguments: object) -> Callable[[Comm, Buffer], None]:
    return lambda comm, data: comm.call(name, data.ptr, data.ptr, *arguments)


SCENARIOS |= {
    "other_count": disagreement(other_call("ncclAllReduce", SIZE(99), FLOAT32, SUM), "(99 x float32"),
    "other_large_count": disagreement(other_call("ncclAllReduce", SIZE(90_000), FLOAT32, SUM), "(90000 x float32"),
    "other_type": disagreement(other_call("ncclAllReduce", SIZE(100), INT32, SUM), "x int32"),
    "other_op": disagreement(other_call("ncclAllReduce", SIZE(100), FLOAT32, nccl.MAX), "float32, max"),
    "other_kind": disagreement(other_call("ncclBroadcast", SIZE(100), FLOAT32, 0), "Broadcast"),
}  # fmt: skip


@scenario
def other_root(rank: int, ranks: int, folder: Path) -> None:
    comm, data = start(rank, ranks, folder)
    comm.call("ncclBroadcast", data.ptr, data.ptr, SIZE(50_000), FLOAT32, int(rank == 3))
    fails(comm, nccl.INVALID_USAGE, "rank 3", "root 1", "root 0")
    together(folder, rank, range(ranks))
    abort(comm)


@scenario
def other_length_of_a_send(rank: int, ranks: int, folder: Path) -> None:
    """Both ends learn of it."""
    comm, data = start(rank, ranks, folder)
    if rank == 0:
        comm.call("ncclSend", data.ptr, SIZE(100), FLOAT32, 1)
    if rank == 1:
        comm.call("ncclRecv", data.ptr, SIZE(60), FLOAT32, 0)
    if rank < 2:
        fails(comm, nccl.INVALID_USAGE, "rank 0 sends 400 bytes to rank 1, which receives 240")
    together(folder, rank, range(ranks))
    abort(comm)


@scenario
def other_number_of_ranks(rank: int, ranks: int, folder: Path) -> None:
    """Whoever comes second fails; whoever came first waits for the rest until it aborts."""
    uid, handle = nccl.unique_id(folder, rank), nccl.P()
    config = nccl.Config.make(blocking=False)
    if rank == 0:
        nccl.lib.ncclCommInitRankConfig(byref(handle), ranks, uid, rank, byref(config))
        comm = Comm(handle, rank, ranks)
        time.sleep(0.2)
        assert comm.error() == nccl.IN_PROGRESS
        mark(folder, "first")
        wait_for(folder, *(f"failed{r}" for r in range(1, ranks)))
        nccl.nccl("ncclCommAbort", handle)
        return
    wait_for(folder, "first")
    code = nccl.lib.ncclCommInitRank(byref(handle), ranks + 1, uid, rank)
    assert code == nccl.INVALID_USAGE, code
    assert str(ranks) in nccl.last_error() and str(ranks + 1) in nccl.last_error(), (
        nccl.last_error()
    )
    assert nccl.lib.ncclAllReduce(None, None, SIZE(1), 0, 0, handle, None) == nccl.INVALID_USAGE
    nccl.nccl("ncclCommAbort", handle)
    mark(folder, f"failed{rank}")


@scenario
def one_rank_twice(rank: int, ranks: int, folder: Path) -> None:
    """Of two processes that say that they are rank 0 the second fails. The communicator is complete without it."""
    uid = nccl.unique_id(folder, rank)
    if rank != ranks - 1:
        comm = Comm.init(uid, rank, ranks - 1)
        mark(folder, f"made{rank}")
        wait_for(folder, "failed")
        data = Buffer(4).write(np.ones(1, np.float32))
        all_reduce(comm, data, 1)
        comm.wait()
        assert data.read(np.float32, 1)[0] == ranks - 1
        comm.destroy()
        return
    wait_for(folder, *(f"made{r}" for r in range(ranks - 1)))
    handle = nccl.P()
    code = nccl.lib.ncclCommInitRank(byref(handle), ranks - 1, uid, 0)
    assert code == nccl.INVALID_USAGE, code
    assert "rank 0" in nccl.last_error() and "two processes" in nccl.last_error(), nccl.last_error()
    nccl.nccl("ncclCommAbort", handle)
    mark(folder, "failed")


@scenario
def one_rank_twice_in_a_process(rank: int, ranks: int, folder: Path) -> None:
    uid, handle, config = nccl.unique_id(folder, rank), nccl.P(), nccl.Config.make(blocking=False)
    nccl.lib.ncclCommInitRankConfig(byref(handle), ranks + 1, uid, rank, byref(config))
    time.sleep(0.2)
    again = nccl.P()
    code = nccl.lib.ncclCommInitRank(byref(again), ranks + 1, uid, rank)
    assert code == nccl.INVALID_USAGE, code
    assert f"rank {rank}" in nccl.last_error(), nccl.last_error()
    for made in (again, handle):
        nccl.nccl("ncclCommAbort", made)


# -- wrong arguments ----------------------------------------------------------------------------------------------------


def refused(code: int, word: str, name: str, *arguments: object) -> None:
    got = getattr(nccl.lib, name)(*arguments)
    assert got == code, f"{name}: {got}, not {code}: {nccl.last_error()}"
    assert word in nccl.last_error(), f"{name}: {nccl.last_error()!r} lacks {word!r}"


@scenario
def wrong_arguments(rank: int, ranks: int, folder: Path) -> None:
    comm, data = start(rank, ranks, folder)
    handle, ptr, stream = comm.handle, data.ptr, comm.stream
    argument, usage = nccl.INVALID_ARGUMENT, nccl.INVALID_USAGE
    one, host = SIZE(1), ctypes.c_uint64()
    outside = ctypes.cast(byref(host), nccl.P)
    reducing = [("ncclAllReduce", ()), ("ncclReduce", (0,)), ("ncclReduceScatter", ())]
    moving = [
        ("ncclAllGather", ()),
        ("ncclAlltoAll", ()),
        ("ncclBroadcast", (0,)),
        ("ncclGather", (0,)),
        ("ncclScatter", (0,)),
    ]
    calls = [(n, (SUM, *more)) for n, more in reducing] + moving
    for name, more in calls:
        for wrong in (-1, 12, 1 << 20):
            refused(argument, "data type", name, ptr, ptr, one, wrong, *more, handle, stream)
        if rank == 0:  # the root of those that have one, so that it looks at both
            refused(
                argument, "send buffer", name, outside, ptr, one, FLOAT32, *more, handle, stream
            )
            refused(
                argument, "receive buffer", name, ptr, outside, one, FLOAT32, *more, handle, stream
            )
            refused(argument, "send buffer", name, None, ptr, one, FLOAT32, *more, handle, stream)
        refused(argument, "communicator", name, ptr, ptr, one, FLOAT32, *more, None, stream)
        refused(
            argument,
            "communicator",
            name,
            ptr,
            ptr,
            one,
            FLOAT32,
            *more,
            ctypes.create_string_buffer(512),
            stream,
        )
    for name, more in reducing:
        for wrong in (-1, 5, 17, 1 << 30):
            refused(
                argument, "reduction", name, ptr, ptr, one, FLOAT32, wrong, *more, handle, stream
            )
    for root in (-1, ranks):
        refused(
            argument, f"rank {root}", "ncclBroadcast", ptr, ptr, one, FLOAT32, root, handle, stream
        )
        refused(argument, f"rank {root}", "ncclBcast", ptr, one, FLOAT32, root, handle, stream)
        refused(
            argument,
            f"rank {root}",
            "ncclReduce",
            ptr,
            ptr,
            one,
            FLOAT32,
            SUM,
            root,
            handle,
            stream,
        )
        refused(
            argument, f"rank {root}", "ncclGather", ptr, ptr, one, FLOAT32, root, handle, stream
        )
        refused(
            argument, f"rank {root}", "ncclScatter", ptr, ptr, one, FLOAT32, root, handle, stream
        )
        refused(argument, f"rank {root}", "ncclSend", ptr, one, FLOAT32, root, handle, stream)
        refused(argument, f"rank {root}", "ncclRecv", ptr, one, FLOAT32, root, handle, stream)
    refused(argument, "stream", "ncclAllReduce", ptr, ptr, one, FLOAT32, SUM, handle, outside)

    op, number, made = ctypes.c_int(), ctypes.c_int(), nccl.P()
    create = "ncclRedOpCreatePreMulSum"
    refused(argument, "data type", create, byref(op), outside, 12, 1, handle)
    refused(argument, "residence", create, byref(op), outside, FLOAT32, 2, handle)
    refused(argument, "scalar", create, byref(op), outside, FLOAT32, 0, handle)
    refused(argument, "scalar", create, byref(op), None, FLOAT32, 1, handle)
    refused(argument, "op", create, None, outside, FLOAT32, 1, handle)
    nccl.nccl(create, byref(op), outside, FLOAT32, 1, handle)
    refused(argument, "data type", "ncclAllReduce", ptr, ptr, one, INT32, op, handle, stream)
    nccl.nccl("ncclRedOpDestroy", op, handle)
    refused(argument, "reduction", "ncclAllReduce", ptr, ptr, one, FLOAT32, op, handle, stream)
    refused(argument, "reduction", "ncclRedOpDestroy", op, handle)
    refused(argument, "reduction", "ncclRedOpDestroy", SUM, handle)

    refused(argument, "uniqueId", "ncclGetUniqueId", None)
    refused(argument, "version", "ncclGetVersion", None)
    for name in ("ncclCommCount", "ncclCommUserRank", "ncclCommCuDevice", "ncclCommGetAsyncError"):
        refused(argument, name, name, handle, None)
        refused(argument, "communicator", name, None, byref(number))
    for name in ("ncclCommDestroy", "ncclCommAbort", "ncclCommFinalize"):
        refused(argument, "communicator", name, None)
    uid = nccl.UniqueId()
    refused(argument, "unique id", "ncclCommInitRank", byref(made), 1, uid, 0)  # nobody has made it
    nccl.nccl("ncclGetUniqueId", byref(uid))
    for n, r in ((0, 0), (-1, 0), (2, 2), (2, -1), (1 << 20, 0)):
        refused(argument, f"rank {r} of {n}", "ncclCommInitRank", byref(made), n, uid, r)
    refused(argument, "comm", "ncclCommInitRank", None, 1, uid, 0)
    refused(
        argument,
        "NCCL_CONFIG_INITIALIZER",
        "ncclCommInitRankConfig",
        byref(made),
        1,
        uid,
        0,
        byref(nccl.Config()),
    )
    refused(
        argument, "unique ids", "ncclCommInitRankScalable", byref(made), 1, 0, 0, byref(uid), None
    )
    refused(
        argument, "unique ids", "ncclCommInitRankScalable", byref(made), 1, 0, 2, byref(uid), None
    )
    refused(argument, "devices", "ncclCommInitAll", byref(made), 0, None)
    refused(nccl.CUDA_ERROR, "device", "ncclCommInitAll", byref(made), 1, byref(ctypes.c_int(77)))
    refused(argument, "color", "ncclCommSplit", handle, -2, 0, byref(made), None)
    refused(argument, "newcomm", "ncclCommSplit", handle, 0, 0, None, None)
    for out in ([], [rank], [ranks], [-1], [(rank + 1) % ranks] * 2):
        listed = (ctypes.c_int * max(len(out), 1))(*out)
        refused(
            argument, "excluded", "ncclCommShrink", handle, listed, len(out), byref(made), None, 0
        )
    refused(argument, "uniqueId", "ncclCommGetUniqueId", handle, None)
    refused(argument, "communicator", "ncclCommGetUniqueId", None, byref(uid))
    more = ranks + 1
    refused(argument, "more than", "ncclCommGrow", handle, ranks, None, -1, byref(made), None)
    refused(argument, "keeps its number", "ncclCommGrow", handle, more, None, 0, byref(made), None)
    refused(argument, "newcomm", "ncclCommGrow", handle, more, None, -1, None, None)
    foreign = byref(uid)  # of ncclGetUniqueId
    refused(argument, "next growth", "ncclCommGrow", handle, more, foreign, -1, byref(made), None)
    refused(argument, "needs the id", "ncclCommGrow", None, 2, None, 1, byref(made), None)
    for r in (-1, 2, 5):
        refused(argument, f"rank {r} of 2", "ncclCommGrow", None, 2, foreign, r, byref(made), None)
    refused(argument, "value", "ncclCommMemStats", handle, 0, None)
    refused(argument, "statistic", "ncclCommMemStats", handle, 4, byref(ctypes.c_uint64()))
    for name, *rest in (("ncclCommSuspend", 1), ("ncclCommResume",), ("ncclCommMemStats", 0, ptr)):
        refused(argument, "communicator", name, None, *rest)
    refused(argument, "flags", "ncclCommRevoke", handle, 1)
    refused(argument, "window", "ncclWinGetUserPtr", handle, ptr, byref(made))
    refused(argument, "handle", "ncclCommRegister", handle, ptr, one, None)
    refused(argument, "communicator", "ncclCommRegister", None, ptr, one, byref(made))
    refused(argument, "communicator", "ncclCommDeregister", None, None)
    refused(argument, "win", "ncclCommWindowRegister", handle, ptr, one, None, 0)
    refused(argument, "communicator", "ncclCommWindowRegister", None, ptr, one, byref(made), 0)
    refused(argument, "communicator", "ncclCommWindowDeregister", None, None)
    refused(argument, "window", "ncclCommWindowDeregister", handle, ptr)
    refused(argument, "ptr", "ncclMemAlloc", None, one)
    refused(nccl.CUDA_ERROR, "ncclMemFree", "ncclMemFree", outside)
    refused(usage, "ncclGroupEnd", "ncclGroupEnd")

    # A call that fails makes its group fail, and nothing of the group runs.
    nccl.nccl("ncclGroupStart")
    all_reduce(comm, data, 10)
    refused(argument, "data type", "ncclAllReduce", ptr, ptr, one, 99, SUM, handle, stream)
    assert nccl.lib.ncclGroupEnd() == argument
    # A communicator that a group makes is not there before its end.
    nccl.nccl("ncclGetUniqueId", byref(uid))
    nccl.nccl("ncclGroupStart")
    nccl.nccl("ncclCommInitRank", byref(made), 1, uid, 0)
    refused(usage, "has not ended", "ncclAllReduce", ptr, ptr, one, FLOAT32, SUM, made, stream)
    nccl.lib.ncclGroupEnd()
    # After all this it works.
    data.write(np.ones(10, np.float32))
    all_reduce(comm, data, 10)
    comm.wait()
    assert (data.read(np.float32, 10) == ranks).all()
    assert comm.error() == nccl.SUCCESS
    comm.destroy()


@scenario
def use_after_the_end(rank: int, ranks: int, folder: Path) -> None:
    """Of a destroyed communicator, and of an aborted one."""
    for end in ("ncclCommDestroy", "ncclCommAbort"):
        comm = Comm.init(nccl.unique_id(folder, rank, end), rank, ranks)
        data = Buffer(400).write(np.ones(100, np.float32))
        all_reduce(comm, data, 100)
        comm.wait()
        nccl.nccl(end, comm.handle)
        gone = "destroyed or aborted"
        refused(
            4,
            gone,
            "ncclAllReduce",
            data.ptr,
            data.ptr,
            SIZE(1),
            FLOAT32,
            SUM,
            comm.handle,
            comm.stream,
        )
        refused(4, gone, "ncclCommSplit", comm.handle, 0, 0, byref(nccl.P()), None)
        refused(
            4,
            gone,
            "ncclCommShrink",
            comm.handle,
            (ctypes.c_int * 1)(ranks - 1 - rank),
            1,
            byref(nccl.P()),
            None,
            0,
        )
        refused(4, gone, "ncclCommFinalize", comm.handle)
        refused(4, gone, "ncclCommDestroy", comm.handle)
        refused(4, gone, "ncclCommAbort", comm.handle)
        code = ctypes.c_int(-1)
        refused(4, gone, "ncclCommGetAsyncError", comm.handle, byref(code))


@scenario
def foreign_id(rank: int, ranks: int, folder: Path) -> None:
    """Another NCCL's, and noise."""
    for content in (b"\x02\x00" + os.urandom(126), os.urandom(128), bytes(128)):
        uid, handle = nccl.UniqueId(), nccl.P()
        ctypes.memmove(byref(uid), content, 128)
        refused(4, "ncclGetUniqueId", "ncclCommInitRank", byref(handle), ranks, uid, rank)
        assert not handle


@scenario
def abort_of_what_waits(rank: int, ranks: int, folder: Path) -> None:
    """Rank 0 aborts operations that the others never post, one of a group over two communicators among them."""
    comm, data = start(rank, ranks, folder)
    second = comm.split(0, rank)
    assert second is not None
    if rank == 0:
        for count in (10, 100_000):
            all_reduce(comm, data, count)
        with Group():
            all_reduce(comm, data, 10)
            nccl.nccl(
                "ncclAllReduce",
                data.ptr,
                data.ptr,
                SIZE(10),
                FLOAT32,
                SUM,
                second.handle,
                comm.stream,
            )
            nccl.nccl("ncclRecv", data.ptr, SIZE(10), FLOAT32, 1, comm.handle, comm.stream)
        time.sleep(0.1)
        assert nccl.cuda.cuStreamQuery(comm.stream) == 600
        nccl.nccl("ncclCommAbort", comm.handle)
        nccl.nccl("ncclCommAbort", second.handle)
        assert until("the stream", lambda: nccl.cuda.cuStreamQuery(comm.stream) == 0) < 2
        # The device is well: a fresh communicator works.
    again = Comm.init(nccl.unique_id(folder, rank, "again"), rank, ranks)
    fresh = Buffer(40).write(np.ones(10, np.float32))
    all_reduce(again, fresh, 10)
    again.wait()
    assert (fresh.read(np.float32, 10) == ranks).all()


@scenario
def shrink_after_a_death(rank: int, ranks: int, folder: Path) -> None:
    """NCCL_SHRINK_ABORT: the others go on without the dead one, over its unfinished operation."""
    comm, data = start(rank, ranks, folder)
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce(comm, data, 100_000)
    fails(comm, nccl.REMOTE, f"rank {VICTIM}")
    together(folder, rank, (r for r in range(ranks) if r != VICTIM))
    handle = nccl.P()
    nccl.nccl("ncclCommShrink", comm.handle, (ctypes.c_int * 1)(VICTIM), 1, byref(handle), None, 1)
    fewer = Comm(handle, rank - (rank > VICTIM), ranks - 1)
    fresh = Buffer(40).write(np.ones(10, np.float32))
    all_reduce(fewer, fresh, 10)
    fewer.wait()
    assert (fresh.read(np.float32, 10) == ranks - 1).all()
    fewer.destroy()
    nccl.nccl("ncclCommAbort", comm.handle)


@scenario
def buffers_too_short(rank: int, ranks: int, folder: Path) -> None:
    """A buffer that begins in the device's memory and does not end there. As on a GPU it is the device that finds out."""
    comm, data = start(rank, ranks, folder)
    calls = [
        lambda: comm.call("ncclSend", data.ptr, SIZE(1 << 40), FLOAT32, 0),
        lambda: comm.call("ncclAllGather", data.ptr, data.ptr, SIZE(1 << 62), FLOAT32),
        lambda: comm.call("ncclAllReduce", data.ptr, data.ptr, SIZE((1 << 64) - 1), FLOAT32, SUM),
        lambda: all_reduce(comm, data, 1 << 34),
    ]
    calls[rank]()
    assert nccl.cuda.cuStreamSynchronize(comm.stream) != 0


STOPPED, ADDENDS = 2_000_000, 5


@scenario
def clients_are_stopped(rank: int, ranks: int, folder: Path) -> None:
    """What has been posted runs although all the job's processes are stopped: see watch_the_stopped()."""
    comm, data = start(rank, ranks, folder, STOPPED)
    data.write(np.full(STOPPED, rank + 1, np.float32))
    host = nccl.P()
    nccl.driver("cuMemHostAlloc", byref(host), SIZE(8), 0)
    ctypes.memset(host, 0, 8)
    if rank == ranks - 1:
        wait_for(folder, "go")
    for _ in range(ADDENDS):
        all_reduce(comm, data, STOPPED)
    for i, at in enumerate((0, STOPPED - 1)):
        source = ctypes.c_uint64(data.addr + 4 * at)
        nccl.driver(
            "cuMemcpyDtoHAsync_v2", nccl.P(host.value + 4 * i), source, SIZE(4), comm.stream
        )
    (folder / f"posted{rank}.part").write_text(f"{os.getpid()} {host.value}")
    (folder / f"posted{rank}.part").rename(folder / f"posted{rank}")
    if rank == ranks - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    comm.wait()
    want = 10.0 * 4 ** (ADDENDS - 1)  # 1 + 2 + 3 + 4, then four equal ones each time
    assert (data.read(np.float32, STOPPED) == want).all()
    assert comm.error() == nccl.SUCCESS
    comm.destroy()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def watch_the_stopped(ranks: int, folder: Path) -> None:
    """The launcher: stops all ranks but the last, lets the last post and stop itself, and looks into the stopped
    processes' pinned memory, into which a copy behind the operations puts the result."""

    def posted(rank: int) -> tuple[int, int]:
        wait_for(folder, f"posted{rank}")
        pid, address = (folder / f"posted{rank}").read_text().split()
        return int(pid), int(address)

    def result(pid: int, address: int) -> list[float]:
        with Path(f"/proc/{pid}/mem").open("rb") as memory:
            memory.seek(address)
            return np.frombuffer(memory.read(8), np.float32).tolist()

    found = [posted(r) for r in range(ranks - 1)]
    for pid, _ in found:
        os.kill(pid, signal.SIGSTOP)
    until("the ranks to stop", lambda: all(state_of(pid) == "T" for pid, _ in found))
    assert [result(*one) for one in found] == [[0.0, 0.0]] * (ranks - 1)
    mark(folder, "go")
    found.append(posted(ranks - 1))
    until("the last to stop", lambda: state_of(found[-1][0]) == "T")
    want = [10.0 * 4 ** (ADDENDS - 1)] * 2
    until("the results", lambda: all(result(*one) == want for one in found))
    assert all(state_of(pid) == "T" for pid, _ in found)
    for pid, _ in found:
        os.kill(pid, signal.SIGCONT)


def main() -> None:
    folder, ranks, name = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    pids = [nccl.start(SCENARIOS[name], r, ranks, folder) for r in range(ranks)]
    if name == "clients_are_stopped":
        watch_the_stopped(ranks, folder)
    codes = nccl.exit_codes(pids)
    dies = "dies" in name and name != "server_dies" or name == "shrink_after_a_death"
    want = [-signal.SIGKILL if dies and r == VICTIM else 0 for r in range(ranks)]
    assert codes == want, f"exit codes of the ranks: {codes}"
    print("PASS")


if __name__ == "__main__":
    main()
