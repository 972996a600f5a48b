# SPDX-License-Identifier: Apache-2.0
"""One run of the campaign `clock-jumps`: a store in a folder, a wall clock that jumps, and a model beside it.

The seed gives the program and the jumps: by seconds to years, back and forth, between operations and in the middle of
them, whenever the store asks for the time or touches a file. Files have the times of that clock. A program commits images
of several jobs, as a supervisor does, restores jobs (a new epoch), prunes, collects garbage and verifies; some uploads
stay open meanwhile, some die, and some operations run side by side. After each operation everything is compared with the
model: the order of images, which one a restore would take, what was removed, and every byte. No gc takes a living upload for dead.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from devproxy.checkpoint import writer as writers
from devproxy.checkpoint.chunker import KIB
from devproxy.checkpoint.errors import StaleJob
from devproxy.checkpoint.folder_backend import LocalBackend, LocalObject
from devproxy.checkpoint.markers import ABANDONED_S
from devproxy.checkpoint.store import Store
from devproxy.checkpoint.writer import Writer
from devproxy.control.stores import find_image
from tests.fault.store_programs import load, side_by_side

BLOCK = 64 * KIB  # one chunk
JOBS = (
    "a",
    "b",
    "old",
)  # the images of `old` have no sequence: their clocks are all that orders them
OPERATIONS = 60
SHARES = (
    *(("save", 8), ("begin", 4), ("commit", 4), ("abort", 1), ("crash", 1.5), ("load", 2)),
    *(("verify", 1), ("remove", 1.5), ("prune", 3), ("gc", 5), ("restore", 1.5)),
)
HANG_S = 60.0
# How far the clock goes from where it began.
REACHES_S = (ABANDONED_S / 2.5, 3 * ABANDONED_S, 86_400.0, 5 * 365 * 86_400.0)
DEAD_PID = (1 << 22) + 1  # above all that Linux gives

_real_ns = time.time_ns


class Clock:
    """What time.time() says. share: the chance of a jump whenever the store looks at it or touches a file."""

    def __init__(self, dice: random.Random, reach_s: float) -> None:
        self.share = 0.0
        self.jumps = 0
        self._dice, self._reach_ns = dice, int(reach_s * 1e9)
        self._off_ns = 0
        self._mu = threading.Lock()

    def now_ns(self) -> int:
        return _real_ns() + self._off_ns

    def jump(self) -> None:
        with self._mu:
            size = int(10 ** self._dice.uniform(9, 17.5)) * self._dice.choice([-1, 1])
            self._off_ns = max(-self._reach_ns, min(self._reach_ns, self._off_ns + size))
            self.jumps += 1

    def tick(self) -> int:
        with self._mu:
            jumps = self._dice.random() < self.share
        if jumps:
            self.jump()
        return self.now_ns()

    def stamp(self, file: str | int) -> None:
        os.utime(file, ns=(self.now_ns(), self.now_ns()))


@contextlib.contextmanager
def under(clock: Clock) -> Iterator[None]:
    """The store sees that clock, and so do its files."""
    folder, file = LocalBackend, LocalObject
    made, written, created = file.__init__, file._write, folder.create

    def looking(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            clock.tick()
            return original(*arguments, **more)

        return call

    def make(self: Any, *arguments: Any, **more: Any) -> None:
        made(self, *arguments, **more)
        clock.stamp(self._fd)

    def write(self: Any, view: memoryview) -> None:
        clock.tick()
        written(self, view)
        clock.stamp(self._fd)

    def create(self: Any, name: str, *arguments: Any, **more: Any) -> bool:
        done = created(self, name, *arguments, **more)
        if done:
            clock.stamp(self._path(name))
        return done

    with contextlib.ExitStack() as patches:
        for where, name, how in (
            (time, "time", lambda: clock.tick() / 1e9),
            (time, "time_ns", clock.tick),
            (file, "__init__", make),
            (file, "_write", write),
            (folder, "create", create),
            *((folder, n, looking(getattr(folder, n))) for n in ("list", "read", "remove", "sync")),
        ):
            patches.enter_context(mock.patch.object(where, name, how))
        yield


# ---- the model ----


@dataclass
class Wish:
    """An image as it is to be. order: among those of its job."""

    data: bytes
    job: str
    epoch: int
    sequence: int
    order: tuple[int, int, float, str] = (0, 0, 0.0, "")


@dataclass
class Upload:
    image: str
    wish: Wish
    carried: list[Any]  # chunks that an older image has, and that nobody puts again
    put: int  # bytes of the data that need not be put any more
    writer: Writer | None = None
    chunks: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Op:
    """work() runs in a thread of its own; done(value, error) then says what the model makes of it."""

    name: str
    work: Callable[[], Any]
    done: Callable[[Any, BaseException | None], None]
    job: str = ""


class Program:
    def __init__(self, seed: int, root: Path, clock: Clock) -> None:
        self.dice = random.Random(seed)
        self.root, self.clock = root, clock
        self.figures: Counter[str] = Counter()
        self.images: dict[str, Wish] = {}
        self.uploads: list[Upload] = []
        self.sequences: Counter[str] = Counter()
        self.blocks = [self.dice.randbytes(BLOCK) for _ in range(10)] + [bytes(BLOCK)]
        self.serial = 0
        self.log: list[str] = []
        self.stores = [Store.open(str(root)) for _ in range(2)]
        self.epochs = {job: self.stores[0].take_epoch(job) for job in JOBS}
        self.seen: dict[str, set[str]] = {job: set() for job in JOBS}  # by its last restore

    def store(self) -> Store:
        if self.dice.random() < 0.3:
            self.stores[self.dice.randrange(len(self.stores))] = Store.open(str(self.root))
        return self.dice.choice(self.stores)

    def of(self, job: str) -> list[str]:
        """Its images, oldest first."""
        mine = [image for image, wish in self.images.items() if wish.job == job]
        return sorted(mine, key=lambda image: self.images[image].order)

    # ---- operations ----

    def begin(self) -> Upload:
        dice = self.dice
        self.serial += 1
        job = dice.choice(JOBS)
        if job != "old":
            self.sequences[job] += 1
        blocks = dice.choices(self.blocks, k=dice.randint(0, 5))
        blocks += [dice.randbytes(dice.choice([BLOCK, 1000])) for _ in range(dice.randint(0, 2))]
        data = b"".join(blocks)
        carried: list[Any] = []
        if self.of(job) and dice.random() < 0.4:
            older = dice.choice(self.of(job))
            carried = self.stores[0].read_manifest(older)["data"]["chunks"]
            data = self.images[older].data + data
        wish = Wish(data, job, self.epochs[job], self.sequences[job])
        put = sum(size for _, size in carried)
        return Upload(f"i{dice.randrange(1 << 20)}-{self.serial}", wish, carried, put)

    def put(self, upload: Upload, most: int) -> None:
        assert upload.writer is not None
        data = upload.wish.data[upload.put : upload.put + most]
        upload.chunks += upload.writer.put_bytes(data, kind="host")
        upload.put += len(data)

    def commit(self, upload: Upload) -> float:
        assert upload.writer is not None
        wish = upload.wish
        self.put(upload, len(wish.data))
        data = {"name": "the data", "chunks": [*upload.carried, *upload.chunks]}
        body = {"job": wish.job, "job_id": wish.job, "epoch": wish.epoch, "data": data}
        return upload.writer.commit({**body, "sequence": wish.sequence}).created

    def committed(
        self, upload: Upload, newest: int, created: float | None, error: BaseException | None
    ) -> bool:
        """newest: the epoch of the job when it began. Whether the image is there."""
        wish = upload.wish
        if error is None:
            assert wish.epoch == newest, f"{upload.image} of a stale job was committed"
            assert created is not None
            wish.order = (wish.epoch, wish.sequence, created, upload.image)
            self.images[upload.image] = wish
            return True
        stale = isinstance(error, StaleJob) and wish.epoch < self.epochs[wish.job]
        assert stale, f"{upload.image}: {error!r}"
        self.figures["stale"] += stale
        return False

    def op_save(self) -> Op:
        upload, store, keep = self.begin(), self.store(), self.dice.choice([0, 0, 1, 2, 3])
        newest = self.epochs[upload.wish.job]

        def work() -> tuple[float, list[str] | None]:
            upload.writer = store.writer(upload.image)
            with upload.writer:
                created = self.commit(upload)
            if not keep:
                return created, None
            return created, store.prune(upload.wish.job, keep, committed=upload.image)

        def done(made: tuple[float, list[str] | None] | None, error: BaseException | None) -> None:
            created, removed = made or (None, None)
            if self.committed(upload, newest, created, error) and removed is not None:
                self.pruned(upload.wish.job, keep, upload.image, removed)

        return Op("save", work, done, upload.wish.job)

    def pruned(self, job: str, keep: int, committed: str, removed: list[str]) -> None:
        expected = [image for image in self.of(job)[:-keep] if image != committed]
        assert removed == expected, f"{removed} instead of {expected} of {self.of(job)}"
        for image in removed:
            del self.images[image]
        self.figures["pruned"] += len(removed)

    def op_begin(self) -> Op:
        if len(self.uploads) >= 3:
            return self.op_commit()
        upload, store = self.begin(), self.store()
        half = len(upload.wish.data[upload.put :]) // (2 * BLOCK) * BLOCK

        def work() -> None:
            upload.writer = store.writer(upload.image)
            self.put(upload, half)

        def done(_: None, error: BaseException | None) -> None:
            assert error is None, f"begin of {upload.image}: {error!r}"
            self.uploads.append(upload)

        return Op("begin", work, done)

    def op_commit(self) -> Op:
        if not self.uploads:
            return self.op_begin()
        upload = self.uploads.pop(self.dice.randrange(len(self.uploads)))
        newest = self.epochs[upload.wish.job]

        def work() -> float:
            assert upload.writer is not None
            with upload.writer:
                return self.commit(upload)

        def done(created: float | None, error: BaseException | None) -> None:
            self.committed(upload, newest, created, error)

        return Op("commit", work, done, upload.wish.job)

    def ended(self) -> Upload:
        return self.uploads.pop(self.dice.randrange(len(self.uploads)))

    def op_abort(self) -> Op:
        if not self.uploads:
            return self.op_save()
        upload = self.ended()
        assert upload.writer is not None
        return Op("abort", upload.writer.abort, nothing)

    def op_crash(self) -> Op:
        """As if its process had been killed."""
        if not self.uploads:
            return self.op_begin()
        upload = self.ended()

        def work() -> None:
            writer = upload.writer
            assert writer is not None
            writer._marker._stop()
            path = self.root / f"uploads/{writer.upload_id}.json"
            if path.exists():  # else a gc has taken it for dead
                path.write_text(json.dumps({**json.loads(path.read_text()), "pid": DEAD_PID}))
            pack = writer._pack
            if pack is not None:
                left = Path(pack.object._temporary)  # type: ignore[attr-defined]
                if left.exists():
                    left.rename(str(left).replace(f".{os.getpid()}.", f".{DEAD_PID}."))
            with mock.patch.object(writer._marker, "end"):
                writer.abort()

        return Op("crash", work, nothing)

    def op_load(self) -> Op:
        if not self.images:
            return self.op_save()
        image, store = self.dice.choice(sorted(self.images)), self.store()
        wish = self.images[image]

        def done(data: bytes | None, error: BaseException | None) -> None:
            assert error is None, f"load of {image}: {error!r}"
            assert data == wish.data, f"{image} has other bytes"

        return Op("load", lambda: load(store, image), done)

    def op_verify(self) -> Op:
        if not self.images:
            return self.op_save()
        image, store = self.dice.choice(sorted(self.images)), self.store()
        mine = self.of(self.images[image].job)
        older = [*mine[: mine.index(image)], None][-1 if mine[0] == image else -2]

        def work() -> tuple[str, str | None]:
            return store.verify(image, full=True).problem, store.older_whole(image)

        def done(found: tuple[str, str | None] | None, error: BaseException | None) -> None:
            assert error is None, f"verify of {image}: {error!r}"
            assert found == ("", older), f"verify of {image}: {found}, and {older} is older"

        return Op("verify", work, done, "*")

    def op_remove(self) -> Op:
        if not self.images:
            return self.op_save()
        image, store = self.dice.choice(sorted(self.images)), self.store()

        def done(_: None, error: BaseException | None) -> None:
            assert error is None, f"remove of {image}: {error!r}"
            del self.images[image]

        return Op("remove", lambda: store.remove_image(image), done)

    def op_prune(self) -> Op:
        job, keep, store = self.dice.choice(JOBS), self.dice.randint(1, 3), self.store()

        def done(removed: list[str] | None, error: BaseException | None) -> None:
            assert error is None and removed is not None, f"prune: {error!r}"
            self.pruned(job, keep, "", removed)

        return Op("prune", lambda: store.prune(job, keep), done, job)

    def op_gc(self) -> Op:
        store, repack = self.store(), self.dice.random() < 0.8

        def done(report: Any, error: BaseException | None) -> None:
            assert error is None, f"gc: {error!r}"
            self.figures["removed_packs"] += report.removed_packs
            self.figures["repacked_packs"] += report.repacked_packs

        return Op("gc", lambda: store.gc(repack=repack), done)

    def op_restore(self) -> Op:
        """The job has a new epoch, and counts anew. What is not there by then must not appear any more."""
        job, store = self.dice.choice(JOBS), self.store()

        def work() -> tuple[int, set[str]]:
            return store.take_epoch(job), {image.id for image in store.images()}

        def done(found: tuple[int, set[str]] | None, error: BaseException | None) -> None:
            assert error is None and found is not None, f"restore: {error!r}"
            assert found[0] == self.epochs[job] + 1, f"epoch {found[0]} after {self.epochs[job]}"
            self.epochs[job], self.seen[job] = found
            self.sequences[job] = 0

        return Op("restore", work, done)

    def step(self) -> None:
        dice, clock = self.dice, self.clock
        if dice.random() < 0.4:
            clock.jump()
        name = dice.choices([name for name, _ in SHARES], [share for _, share in SHARES])[0]
        ops: list[Op] = [getattr(self, f"op_{name}")()]
        if ops[0].name == "restore":
            ops.append(self.op_commit())
        elif ops[0].name not in ("abort", "crash") and dice.random() < 0.4:
            beside = self.op_gc() if dice.random() < 0.6 or ops[0].job == "*" else self.op_save()
            if beside.job and beside.job == ops[0].job:
                # A prune must know which images of its job there are.
                beside = self.op_gc()
            ops.append(beside)
        for op in ops:
            self.figures[op.name] += 1
        clock.share = dice.choice([0.0, 0.0, 0.02, 0.2])
        results = side_by_side([op.work for op in ops], HANG_S)
        clock.share = 0.0
        self.figures["side_by_side"] += len(ops) > 1
        for op, (value, error) in zip(ops, results, strict=True):
            self.log.append(f"{op.name}: {error or value!s:.100}")
            if error is not None and not isinstance(error, Exception):
                raise error
        for op, (value, error) in zip(ops, results, strict=True):
            op.done(value, error)
        self.settle(self.stores[0])

    # ---- comparing ----

    def settle(self, store: Store) -> None:
        listed = store.images()
        for job in JOBS:
            order = [image.id for image in listed if image.job_id == job]
            assert order == self.of(job), f"{order} are listed instead of {self.of(job)}"
            late = {image for image in order if self.images[image].epoch < self.epochs[job]}
            assert late <= self.seen[job], f"{late - self.seen[job]} came after a restore"
        self.check_which(store)
        for image in listed:
            assert image.whole, f"{image.id}: {image.problem}"
            assert load(store, image.id) == self.images[image.id].data, f"{image.id}: other bytes"

    def check_which(self, store: Store) -> None:
        """What `devproxy restore` would bring back: each job's newest image, and of all jobs that of the youngest clock."""
        clocks: dict[str, float] = {}  # by newest image: the youngest of its job
        for job in JOBS:
            if order := self.of(job):
                meant = find_image([store], job)[1].id
                assert meant == order[-1], f"{job} is taken for {meant}, not for {order[-1]}"
                clocks[meant] = max(self.images[image].order[2] for image in order)
        if clocks:
            meant = find_image([store], "latest")[1].id
            youngest = clocks.get(meant, -1.0)
            assert youngest == max(clocks.values()), f"{meant} is taken for the latest of {clocks}"

    def finish(self) -> None:
        while self.uploads:
            writer = self.ended().writer
            assert writer is not None
            writer.abort()
        store = Store.open(str(self.root))
        report = store.gc()
        assert not report.busy, report.busy
        self.settle(store)
        for image in self.images:
            assert store.verify(image, full=True).whole, image
        left = [f"{f}/{e.name}" for f in ("uploads", "gc", "tmp") for e in store.backend.list(f)]
        assert not left, left
        self.check_garbage(store)

    def check_garbage(self, store: Store) -> None:
        """Each pack has an index, and at least half of its bytes are needed; or it is doubted, and nothing else has a chunk."""
        live = {
            bytes.fromhex(name)
            for image in self.images
            for name, _ in store.read_manifest(image)["data"]["chunks"]
            if name != "zero"
        }
        sizes = {entry.name: entry.size for entry in store.backend.list("packs")}
        packs = {pack: store.pack_index(pack) for pack in store.pack_ids()}
        assert len(sizes) == 2 * len(packs), f"halves of packs are left: {sorted(sizes)}"
        doubted = store.doubted_packs()
        self.figures["doubted_packs"] += len(doubted)
        good = {
            key
            for pack, index in packs.items()
            if index and pack not in doubted
            for key in index.entries
        }
        for pack, index in packs.items():
            assert index is not None, pack
            used = {key: at.stored_bytes for key, at in index.entries.items() if key in live}
            if pack in doubted:
                assert used.keys() - good, f"{pack} is doubted, and nobody needs it"
            else:
                enough = 2 * sum(used.values()) >= sizes[f"{pack}.pack"] > 0
                assert enough, f"{pack}: {sum(used.values())} bytes of it are needed"


def nothing(_: Any, error: BaseException | None) -> None:
    assert error is None, repr(error)


def run(seed: int) -> dict[str, int]:
    """Raises AssertionError where the promise is broken. Returns what was done, to add up."""
    dice = random.Random(seed * 7919)
    clock = Clock(dice, REACHES_S[seed % len(REACHES_S)])
    # On a disk a pack is written when it is full; in memory whenever something is put.
    where = "/dev/shm" if dice.random() < 0.6 else None
    with (
        tempfile.TemporaryDirectory(dir=where) as folder,
        mock.patch.dict(os.environ, {"DEVPROXY_KEY_FILE": f"{folder}/image.key"}),
        mock.patch.object(writers, "PACK_BYTES", 5 * BLOCK),
        under(clock),
    ):
        program: Program | None = None
        try:
            program = Program(seed, Path(folder) / "store", clock)
            for _ in range(OPERATIONS):
                program.step()
            program.finish()
        except Exception as error:
            steps = "\n".join(program.log[-40:] if program else [])
            raise AssertionError(
                f"{steps}\nseed {seed}: {type(error).__name__}: {error}"
            ) from error
    return {**program.figures, "jumps": clock.jumps}
