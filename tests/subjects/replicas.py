# SPDX-License-Identifier: Apache-2.0
"""Ranks that hold the same: buffers that each rank changes alike, step by step, by what an all-reduce gave all of them.

--apart N: and N MiB that only this rank has. Every rank stands at the gate, so between steps all hold the same.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import common
import gate
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "comm"))
import nccl as n  # noqa: E402

COUNT = 1 << 18  # of int32: what a step changes, 1 MiB


class Replica:
    """Buffers of odd sizes, one of zeros, and one that holds the same block again and again."""

    def __init__(self, rank: int, ranks: int, folder: Path, mib: int, apart: int) -> None:
        self.rank = rank
        self.world = n.Comm.init(n.unique_id(folder, rank), rank, ranks)
        self.gradient = n.Buffer(4 * COUNT).write(np.zeros(COUNT, np.int32))
        self.counts = [mib << 18, (mib << 18) + 12345, COUNT // 3, COUNT + 1, 700]
        self.buffers = [self.filled(seed, count) for seed, count in enumerate(self.counts)]
        for values in (np.zeros(mib << 18, np.int32), np.tile(np.arange(COUNT, dtype=np.int32), 3)):
            self.counts.append(values.size)
            self.buffers.append(n.Buffer(values.nbytes).write(values))
        if apart:
            self.counts.append(apart << 18)
            self.buffers.append(self.filled(1000 + rank, apart << 18))

    def filled(self, seed: int, count: int) -> n.Buffer:
        values = np.random.default_rng(seed).integers(-(2**30), 2**30, count, np.int32)
        return n.Buffer(4 * count).write(values)

    def step(self, number: int) -> None:
        own = np.random.default_rng(100 * number + self.rank).integers(0, 2**20, COUNT, np.int32)
        self.gradient.write(own)
        self.world.call(
            "ncclAllReduce", self.gradient.ptr, self.gradient.ptr, n.SIZE(COUNT), n.INT32, n.SUM
        )
        self.world.wait()
        at = number % 4
        common_now = self.gradient.read(np.int32, COUNT)
        self.buffers[at].write(common_now[: self.counts[at]])

    def digest(self) -> str:
        hashed = hashlib.blake2b(digest_size=16)
        for buffer, count in zip(self.buffers, self.counts, strict=True):
            hashed.update(buffer.read(np.int32, count).tobytes())
        return hashed.hexdigest()


def rank_main(options: argparse.Namespace) -> None:
    n.open_device(options.rank % int(os.environ["DEVPROXY_GPUS"]))
    one = Replica(options.rank, options.ranks, options.folder, options.mib, options.apart)
    if options.rank == 0:
        common.NONCE = options.nonce
        steps = common.Steps(options)
        for number in steps:
            one.step(number)
            steps.say()
    else:
        for number in range(1, options.steps + 1):
            gate.before(number, options.steps, 0.0)
            one.step(number)
    (options.folder / f"digest-{options.rank}").write_text(one.digest())
    one.world.destroy()


def main() -> None:
    if "--rank" in sys.argv:
        parser = argparse.ArgumentParser()
        for name, kind in (("steps", int), ("seconds-per-step", float), ("ranks", int), ("rank", int), ("mib", int), ("apart", int), ("nonce", str), ("folder", Path)):  # fmt: skip
            parser.add_argument(f"--{name}", type=kind, default=0)
        rank_main(parser.parse_args())
        return
    options = common.options(__doc__ or "", ranks=4, mib=8, apart=0)
    folder = Path(tempfile.mkdtemp(prefix="replicas-", dir=os.getcwd()))
    command = [sys.executable, __file__, *sys.argv[1:], "--mib", str(options.mib), "--ranks", str(options.ranks),
               "--nonce", common.NONCE, "--folder", str(folder)]  # fmt: skip
    ranks = [subprocess.Popen([*command, "--rank", str(r)]) for r in range(options.ranks)]
    codes = [p.wait() for p in ranks]
    common.check(codes == [0] * options.ranks, f"exit codes of the ranks: {codes}")
    digest = common.Digest()
    for r in range(options.ranks):
        digest.add(f"rank {r}", (folder / f"digest-{r}").read_text())
    digest.finish()


if __name__ == "__main__":
    main()
