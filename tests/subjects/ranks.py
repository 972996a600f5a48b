# SPDX-License-Identifier: Apache-2.0
"""Several ranks over NCCL, started by a launcher of its own: collectives, sends and groups on several streams.

What each step does is drawn from the step's number, the same at every rank: so most of it is in flight at any moment, in
another order each time. Communicators come and go. Every rank hashes what it has after each step; the launcher's digest
is of all of them. Rank 0 says the steps.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import behind
import common
import gate
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "comm"))
import nccl as n  # noqa: E402

COUNT = 4096
KINDS = ("reduce", "gather", "scatter", "ring", "all_to_all", "halves", "short_lived")
CHANGES = ("grown", "revoked")  # with --changing 1
WAVE, CRESTS = 1 << 20, 6  # with --waves 1: bytes of an activation, and how many a step has


class Rank:
    """One rank's communicators, buffers and history."""

    def __init__(
        self, rank: int, ranks: int, folder: Path, more: bool, changing: bool, waves: bool
    ) -> None:
        self.rank, self.ranks, self.waves = rank, ranks, waves
        self.kinds = [*KINDS, *(CHANGES if changing else ())]
        self.world = n.Comm.init(n.unique_id(folder, rank), rank, ranks)
        half = self.world.split(rank % 2, rank)
        assert half is not None
        self.half = half
        self.history = hashlib.blake2b(digest_size=16)
        self.marks: list[str] = []  # of the history after each step: where two runs part
        self.one = self.buffer(rank)
        self.two = self.buffer(rank + 100)
        self.wide = n.Buffer(4 * COUNT * ranks).write(np.zeros(COUNT * ranks, np.int32))
        self.small = n.Buffer(4 * COUNT).write(np.zeros(COUNT, np.int32))
        self.passed_on = n.Buffer(128)

        self.behind = behind.Behind(self.world) if more else None

    def buffer(self, seed: int) -> n.Buffer:
        values = np.random.default_rng(seed).integers(-(2**30), 2**30, COUNT, np.int32)
        return n.Buffer(4 * COUNT).write(values)

    def wave(self) -> None:
        """As a data-parallel step: activations come, and go while collectives are submitted."""
        kept = []
        for _ in range(CRESTS):
            kept.append(n.Buffer(WAVE))
            n.driver("cuMemsetD8Async", kept[-1].base, 1, n.SIZE(WAVE), self.world.stream)
        for one in reversed(kept):
            self.world.call("ncclAllReduce", one.ptr, one.ptr, n.SIZE(COUNT), n.INT32, n.SUM)
            n.driver("cuMemFree_v2", one.base)

    def step(self, number: int) -> None:
        """Nothing waits for the device before the end of the step, but where one stream needs the other."""
        dice = np.random.default_rng(number)
        if self.waves:
            self.wave()
        if self.behind:
            self.behind.submit(number)
        for _ in range(int(dice.integers(2, 7))):
            getattr(self, self.kinds[dice.integers(len(self.kinds))])()
        self.world.wait()
        self.half.wait()
        if self.behind:
            self.history.update(self.behind.finish(number))
        for buffer, count in ((self.one, COUNT), (self.two, COUNT), (self.wide, COUNT * self.ranks), (self.small, COUNT)):  # fmt: skip
            self.history.update(buffer.read(np.int32, count).tobytes())
        self.marks.append(self.history.hexdigest()[:4])
        # What the next step adds up is another mixture at every rank.
        for buffer in (self.one, self.two):
            values = buffer.read(np.int32, COUNT).astype(np.uint64)
            mixed = values * np.uint64(1664525 + 2 * self.rank) + np.uint64(number)
            buffer.write(mixed.astype(np.uint32).view(np.int32))

    def reduce(self) -> None:
        self.world.call("ncclAllReduce", self.one.ptr, self.one.ptr, n.SIZE(COUNT), n.INT32, n.SUM)

    def gather(self) -> None:
        self.world.call("ncclAllGather", self.two.ptr, self.wide.ptr, n.SIZE(COUNT), n.INT32)

    def scatter(self) -> None:
        self.world.call("ncclReduceScatter", self.wide.ptr, self.small.ptr, n.SIZE(COUNT), n.INT32, n.SUM)  # fmt: skip

    def ring(self) -> None:
        stream, comm = self.world.stream, self.world.handle
        with n.Group():
            n.nccl("ncclSend", self.one.ptr, n.SIZE(COUNT), n.INT32, (self.rank + 1) % self.ranks, comm, stream)  # fmt: skip
            n.nccl("ncclRecv", self.small.ptr, n.SIZE(COUNT), n.INT32, (self.rank - 1) % self.ranks, comm, stream)  # fmt: skip

    def all_to_all(self) -> None:
        self.world.call("ncclAlltoAll", self.one.ptr, self.wide.ptr, n.SIZE(COUNT // self.ranks), n.INT32)  # fmt: skip

    def halves(self) -> None:
        """On its own stream: `two` is the world's too, so each waits for the other."""
        self.world.wait()
        self.half.call("ncclAllReduce", self.two.ptr, self.two.ptr, n.SIZE(COUNT), n.INT32, n.SUM)
        self.half.wait()

    def end(self, comm: n.Comm) -> None:
        comm.destroy()
        n.driver("cuStreamDestroy_v2", comm.stream)

    def use(self, comm: n.Comm) -> None:
        self.world.wait()
        comm.call("ncclBroadcast", self.one.ptr, self.small.ptr, n.SIZE(COUNT), n.INT32, 0)
        comm.wait()
        self.end(comm)

    def short_lived(self) -> None:
        comm = self.world.split(self.rank // 2, -self.rank)
        assert comm is not None
        self.use(comm)

    def grown(self) -> None:
        """The last rank joins the others. No host waits for another: the id comes to it by the world."""
        last = self.ranks - 1
        if last == 0:
            return
        few = self.world.split(-1 if self.rank == last else 0, self.rank)
        uid, handle = n.UniqueId(), n.P()
        if self.rank == 0:
            n.nccl("ncclCommGetUniqueId", few.handle, ctypes.byref(uid))
        at = self.passed_on.write(np.frombuffer(uid.raw(), np.int32)).ptr
        self.world.call("ncclBroadcast", at, at, n.SIZE(32), n.INT32, 0)
        self.world.wait()
        if few is None:
            ctypes.memmove(ctypes.byref(uid), self.passed_on.read(np.int32, 32).tobytes(), 128)
            n.nccl("ncclCommGrow", None, self.ranks, ctypes.byref(uid), last, ctypes.byref(handle), None)  # fmt: skip
        else:
            n.nccl("ncclCommGrow", few.handle, self.ranks, None, -1, ctypes.byref(handle), None)
            self.end(few)
        self.use(n.Comm(handle, self.rank, self.ranks))

    def revoked(self) -> None:
        comm = self.world.split(0, self.rank)
        assert comm is not None
        n.nccl("ncclCommRevoke", comm.handle, 0)
        again = comm.split(0, -self.rank)
        assert again is not None
        self.use(again)
        self.end(comm)


def rank_main(options: argparse.Namespace, folder: Path, rank: int) -> None:
    n.open_device(rank % int(os.environ["DEVPROXY_GPUS"]))
    one = Rank(
        rank,
        options.ranks,
        folder,
        bool(options.behind),
        bool(options.changing),
        bool(options.waves),
    )
    if rank == 0:
        common.NONCE = options.nonce
        steps = common.Steps(options)
        numbers: Any = steps
    else:
        numbers = range(1, options.steps + 1)
    for number in numbers:
        if options.together and rank != 0:
            gate.before(number, options.steps, 0.0)
        one.step(number)
        if options.counted:  # as the import hook does it behind an optimizer's step
            n.cuda.devproxy_step()
        if rank == 0:
            steps.say()
    print(f"marks of rank {rank}: {' '.join(one.marks)}", flush=True)
    # The other node's launcher waits for the file's name, and reads it then: so it comes whole.
    being_written = folder / f"being-written-{rank}"
    being_written.write_text(one.history.hexdigest())
    being_written.rename(folder / f"digest-{rank}")
    one.half.destroy()
    one.world.destroy()


def main() -> None:
    if "--rank" in sys.argv:
        parser = argparse.ArgumentParser()
        for name, kind in (("steps", int), ("seconds-per-step", float), ("ranks", int), ("rank", int), ("together", int), ("behind", int), ("changing", int), ("waves", int), ("counted", int), ("nonce", str), ("folder", Path)):  # fmt: skip
            parser.add_argument(f"--{name}", type=kind, default=0)
        found = parser.parse_args()
        rank_main(found, found.folder, found.rank)
        return
    # together: all ranks stand at the gate, and not rank 0 alone with the others waiting for it.
    # counted: a step is an optimizer's (devproxy_step).
    more = dict.fromkeys(("together", "behind", "changing", "waves", "counted"), 0)
    options = common.options(__doc__ or "", ranks=4, **more)
    nodes, node = int(os.environ.get("DEVPROXY_NODES", "1")), int(os.environ.get("DEVPROXY_NODE", "0"))  # fmt: skip
    if nodes == 1:
        folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=os.getcwd()))
    else:  # the nodes have the file system in common
        folder = Path(os.getcwd(), "ranks")
        folder.mkdir(exist_ok=True)
    here = range(options.ranks * node // nodes, options.ranks * (node + 1) // nodes)
    command = [sys.executable, __file__, *sys.argv[1:], "--nonce", common.NONCE, "--folder", str(folder)]  # fmt: skip
    ranks = [subprocess.Popen([*command, "--rank", str(r)]) for r in here]
    codes = [p.wait() for p in ranks]
    common.check(codes == [0] * len(here), f"exit codes of the ranks: {codes}")
    digest = common.Digest()
    while not all((folder / f"digest-{r}").exists() for r in range(options.ranks)):
        time.sleep(0.05)
    for r in range(options.ranks):
        digest.add(f"rank {r}", (folder / f"digest-{r}").read_text())
    digest.finish()


if __name__ == "__main__":
    main()
