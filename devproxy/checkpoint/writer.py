# SPDX-License-Identifier: Apache-2.0
"""One upload: from bytes to an image.

Two threads hash and compress, the caller's thread appends to the pack, a fourth syncs packs that are full and writes
their indices. A pack with its index is known to every later upload, so one that broke goes on where it was.
"""

from __future__ import annotations

import contextlib
import os
import random
import stat
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

from blake3 import blake3

from devproxy import fault
from devproxy.checkpoint import manifest as manifests
from devproxy.checkpoint.backend import ObjectWriter, named
from devproxy.checkpoint.chunker import (
    CHUNK_BYTES,
    KINDS,
    ZERO,
    ChunkRef,
    Encoded,
    Kind,
    batches,
    compress,
    cut,
    digest,
    is_zero,
)
from devproxy.checkpoint.errors import (
    DamagedChunk,
    DamagedPack,
    MissingChunk,
    StoreError,
    UploadLost,
)
from devproxy.checkpoint.markers import UPLOADS, Marker
from devproxy.checkpoint.packs import (
    PACK_BYTES,
    PACK_RECORDS,
    Location,
    Record,
    encode_index,
    index_name,
    pack_name,
)
from devproxy.checkpoint.shelf import Shelf
from devproxy.checkpoint.staged import StagedFile, mapped, staged_file
from devproxy.errors import Refused

_WORKERS = 2
_WINDOW = 24  # batches of 1 MiB under way
_PACKS_SYNCING = 2
_HASHED_AT_ONCE = 1 << 26
# Of older chunks and indices that are read before a commit relies on them: what takes no time that anybody notices.
_SAMPLE_CHUNKS = 16
_SAMPLE_BYTES = 8 << 20
_SAMPLE_INDICES = 16


@dataclass
class KindCount:
    """Bytes of one kind. raw = new + deduplicated + zero; stored is what new takes after compression."""

    raw: int = 0
    new: int = 0
    deduplicated: int = 0
    zero: int = 0
    stored: int = 0


@dataclass
class _Pack:
    pack: str
    object: ObjectWriter
    records: list[Record] = field(default_factory=list)


@dataclass(frozen=True)
class RangeChunks:
    """One buffer of a device dump: its place in the file, the BLAKE3 of its content, its chunks."""

    offset: int
    bytes: int
    hash: str
    chunks: list[ChunkRef]

    def as_json(self) -> dict[str, Any]:
        return {
            "offset": self.offset,
            "bytes": self.bytes,
            "hash": self.hash,
            "chunks": self.chunks,
        }


def begin(shelf: Shelf, image_id: str) -> Writer:
    """An upload. Raises Refused when there is such an image."""
    manifests.check_image_id(image_id)
    if any(entry.name == "manifest.json" for entry in shelf.backend.list(f"images/{image_id}")):
        raise Refused(f"image {image_id} is in store {shelf.url} already", "give another id")
    return Writer(shelf, image_id)


class Writer:
    """Made by begin(). A context manager: leaving it without commit() gives the upload up.

    put_* may be called from several threads. Every error of the store is a StoreError; what was stored until then
    serves the next try.
    """

    def __init__(self, shelf: Shelf, image_id: str) -> None:
        self.image_id = image_id
        self.counts: dict[str, KindCount] = {kind: KindCount() for kind in KINDS}
        self._shelf = shelf
        self._backend = shelf.backend
        self._mu = threading.Lock()  # the open pack, _new, counts
        self._new: dict[bytes, int] = {}  # chunks of this upload -> raw bytes
        self._ahead: set[bytes] = (
            set()
        )  # of those, what put_share() has stored and nothing has used yet
        self._pack: _Pack | None = None
        self._pack_number = 0
        self._packs: list[str] = []
        self._relied_on: set[str] = set()
        self.renewed: set[str] = set()  # doubted packs of which chunks were stored anew
        self._syncing: deque[Future[None]] = deque()
        self._done = False
        self.whole = False  # the manifest is written: the image is there, whatever fails afterwards
        # The order of these three is the upload's half of the agreement with gc (gc.py).
        self._marker = Marker(self._backend, UPLOADS, {"image": image_id})
        try:
            self._known, self._doubted, self._going = shelf.known_chunks(self._marker)
        except BaseException:
            self._marker.end()
            raise
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="devproxy-hash")
        self._io = ThreadPoolExecutor(1, thread_name_prefix="devproxy-pack")

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    # ---- what goes in ----

    def put_file(self, path: str, *, kind: Kind) -> list[ChunkRef]:
        """The chunks of a file, in order. Raises StoreError, and OSError when the file cannot be read.

        Device dumps, segments and CRIU's images are ours and stand still: they are mapped. Other files are read,
        because a map of a file that its owner truncates kills the reader.
        """
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if kind in ("file", "build") or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return self.put_stream(file, kind=kind)
            if size == 0:
                return []
            with mapped(file.fileno(), size) as view:
                return self.put_views(cut(view, CHUNK_BYTES[kind]), kind=kind)

    def put_bytes(self, data: bytes | memoryview, *, kind: Kind) -> list[ChunkRef]:
        return self.put_views(cut(memoryview(data).cast("B"), CHUNK_BYTES[kind]), kind=kind)

    def put_stream(self, stream: IO[bytes], *, kind: Kind) -> list[ChunkRef]:
        return self.put_views(_read_chunks(stream, CHUNK_BYTES[kind]), kind=kind)

    def put_ranges(
        self, path: str, ranges: Iterable[tuple[int, int]], *, kind: Kind = "device"
    ) -> list[RangeChunks]:
        """One entry per (offset, bytes) of the file, each cut from its own start, with a hash of its whole content."""
        wanted = list(ranges)
        if not wanted:
            return []
        with staged_file(path) as file:
            for offset, length in wanted:
                if offset < 0 or length < 0 or offset + length > file.size:
                    raise StoreError(
                        "cut", f"{path} at {offset}+{length}", f"the file has {file.size} bytes"
                    )
            return self._put_ranges(file, wanted, kind)

    def _put_ranges(
        self, file: StagedFile, wanted: list[tuple[int, int]], kind: Kind
    ) -> list[RangeChunks]:
        chunk_bytes = CHUNK_BYTES[kind]
        counts = [-(-length // chunk_bytes) for _, length in wanted]
        hashes: list[Future[str]] = []

        def pieces() -> Iterator[memoryview]:
            for offset, length in wanted:
                whole = file.slices(offset, length, _HASHED_AT_ONCE)
                hashes.append(self._pool.submit(_whole_hash, whole))
                yield from file.slices(offset, length, chunk_bytes)

        try:
            refs = self.put_views(pieces(), kind=kind)
            found: list[RangeChunks] = []
            start = 0
            for (offset, length), count, whole in zip(wanted, counts, hashes, strict=True):
                found.append(
                    RangeChunks(offset, length, whole.result(), refs[start : start + count])
                )
                start += count
            return found
        finally:
            for whole in hashes:  # none may look at the map after it is closed
                whole.cancel() or whole.exception()

    def put_share(
        self,
        path: str,
        ranges: Iterable[tuple[int, int]],
        number: int,
        of: int,
        *,
        kind: Kind = "device",
    ) -> None:
        """Ahead of put_ranges: of what is not in the store yet, the chunks whose hash names part `number` of `of` parts.

        Each part of an image does this with a writer of its own, and flushes; behind look_again() none of them stores what
        another has stored, however many of them hold it. Raises StoreError and OSError.
        """
        window: deque[Future[list[Encoded]]] = deque()
        with staged_file(path) as file:
            pieces = (v for o, n in ranges for v in file.slices(o, n, CHUNK_BYTES[kind]) if len(v))
            try:
                for batch in batches(pieces):
                    window.append(self._pool.submit(self._encode_share, batch, number, of))
                    if len(window) >= _WINDOW:
                        self._take_ahead(window.popleft().result(), kind)
                while window:
                    self._take_ahead(window.popleft().result(), kind)
            finally:
                for future in window:  # none may look at the map after it is closed
                    future.cancel() or future.exception()

    def put_views(self, views: Iterable[memoryview], *, kind: Kind) -> list[ChunkRef]:
        """Chunks as the caller cut them (pages.py). The memory must stay as it is until this returns."""
        if self._done:
            raise StoreError("put", f"image {self.image_id}", "the upload has ended")
        refs: list[ChunkRef] = []
        window: deque[Future[list[Encoded]]] = deque()
        try:
            for batch in batches(view for view in views if len(view)):
                window.append(self._pool.submit(self._encode, batch))
                if len(window) >= _WINDOW:
                    self._take(window.popleft().result(), kind, refs)
            while window:
                self._take(window.popleft().result(), kind, refs)
        finally:
            for future in window:
                future.cancel() or future.exception()
        return refs

    # ---- threads of the pool ----

    def _encode(self, batch: list[memoryview]) -> list[Encoded]:
        done: list[Encoded] = []
        for view in batch:
            hashed = digest(view)
            if is_zero(view, hashed):
                done.append(Encoded(hashed, len(view), 0, None, zero=True))
            elif hashed in self._known or hashed in self._new:
                done.append(Encoded(hashed, len(view), 0, None))
            else:
                codec, body = compress(view)
                done.append(Encoded(hashed, len(view), codec, body))
        return done

    def _encode_share(self, batch: list[memoryview], number: int, of: int) -> list[Encoded]:
        done: list[Encoded] = []
        for view in batch:
            hashed = digest(view)
            others = int.from_bytes(hashed[:8], "little") % of != number
            if others or is_zero(view, hashed) or hashed in self._known or hashed in self._new:
                continue
            codec, body = compress(view)
            done.append(Encoded(hashed, len(view), codec, body))
        return done

    # ---- the caller's thread ----

    def _take_ahead(self, chunks: list[Encoded], kind: Kind) -> None:
        with self._mu:
            for chunk in chunks:
                if chunk.digest not in self._new:
                    assert chunk.body is not None
                    self._append_new(chunk, chunk.body)
                    self._ahead.add(chunk.digest)
                    self.counts[kind].stored += len(chunk.body)

    def _append_new(self, chunk: Encoded, body: bytes | memoryview) -> None:
        self._append(chunk.digest, chunk.raw_bytes, chunk.codec, body)
        if where := self._doubted.get(chunk.digest):
            self.renewed.add(where.pack)

    def _take(self, chunks: list[Encoded], kind: Kind, refs: list[ChunkRef]) -> None:
        with self._mu:
            count = self.counts[kind]
            for chunk in chunks:
                count.raw += chunk.raw_bytes
                if chunk.zero:
                    count.zero += chunk.raw_bytes
                    refs.append((ZERO, chunk.raw_bytes))
                    continue
                refs.append((chunk.digest.hex(), chunk.raw_bytes))
                if chunk.digest in self._ahead:  # its first use
                    self._ahead.discard(chunk.digest)
                    count.new += chunk.raw_bytes
                elif where := self._known.get(chunk.digest):
                    self._relied_on.add(where.pack)
                    count.deduplicated += chunk.raw_bytes
                elif chunk.digest in self._new:
                    count.deduplicated += chunk.raw_bytes
                else:
                    assert (
                        chunk.body is not None
                    )  # _new only grows, and grows before a pool thread can see it
                    self._append_new(chunk, chunk.body)
                    count.new += chunk.raw_bytes
                    count.stored += len(chunk.body)

    def append_body(self, location: Location, hashed: bytes, body: bytes | memoryview) -> None:
        """A body that is stored already moves to a new pack as it is."""
        with self._mu:
            if hashed not in self._new:
                self._append(hashed, location.raw_bytes, location.codec, body)

    def _append(self, hashed: bytes, raw_bytes: int, codec: int, body: bytes | memoryview) -> None:
        if self._pack is None:
            pack = f"{self._marker.id}.{self._pack_number:05d}"
            self._pack_number += 1
            self._pack = _Pack(
                pack, self._backend.new_object(pack_name(pack), stage="write a pack")
            )
        target = self._pack.object
        offset = target.size
        with named("write a pack", f"{pack_name(self._pack.pack)} in store {self._shelf.url}"):
            fault.point("store_pack_write")
            target.append(body)
        self._pack.records.append(Record(hashed, offset, len(body), raw_bytes, codec))
        self._new[hashed] = raw_bytes
        if target.size >= PACK_BYTES or len(self._pack.records) >= PACK_RECORDS:
            self._close_pack()

    def _close_pack(self) -> None:
        pack, self._pack = self._pack, None
        if pack is None:
            return
        self._packs.append(pack.pack)
        self._syncing.append(self._io.submit(self._finish, pack))
        while len(self._syncing) > _PACKS_SYNCING:
            self._syncing.popleft().result()

    def _finish(self, pack: _Pack) -> None:
        pack_bytes = pack.object.size
        try:
            pack.object.finish()
        except BaseException:
            pack.object.abandon()
            raise
        name = index_name(pack.pack)
        with named("write an index", f"{name} in store {self._shelf.url}"):
            fault.point("store_index_write")
            data = encode_index(pack.pack, pack_bytes, pack.records, self._shelf.key)
            self._backend.write(name, data, stage="write an index", durable=True)

    def flush(self) -> None:
        """Blocks until everything that was put is on the disk, under an index. Raises StoreError."""
        with self._mu:
            self._close_pack()
            while self._syncing:
                self._syncing.popleft().result()
            if self._packs:
                self._backend.sync("packs")

    # ---- other hosts' parts of the image ----

    def look_again(self) -> None:
        """Another host has put its part by an upload of its own, and flushed it: its chunks are known from here on.

        That upload must not end before this one has committed. Raises StoreError.
        """
        known = self._shelf.known_chunks(self._marker)
        with self._mu:
            self._known, self._doubted, self._going = known

    def add_sizes(self, per_kind: dict[str, dict[str, int]]) -> None:
        """What the other upload counted (sizes()["per_kind"]) is the image's too."""
        with self._mu:
            for kind, row in per_kind.items():
                count = self.counts[kind]
                for name, value in row.items():
                    setattr(count, name, getattr(count, name) + value)

    # ---- the end ----

    def sizes(self) -> dict[str, Any]:
        """Bytes so far: raw per kind, and new, deduplicated and stored in all; per_kind has it all."""
        with self._mu:
            per_kind = {kind: dict(vars(count)) for kind, count in self.counts.items()}
        total: dict[str, Any] = {kind: row["raw"] for kind, row in per_kind.items()}
        for name in ("new", "deduplicated", "zero", "stored"):
            total[name] = sum(row[name] for row in per_kind.values())
        total["per_kind"] = per_kind
        return total

    def commit(self, manifest: dict[str, Any]) -> manifests.Image:
        """Makes the image: from the manifest's rename on it is whole. `manifest` brings job, job_id and epoch.

        Raises StaleJob when the job was restored elsewhere, UploadLost when a gc took this upload for dead, DamagedPack
        when a new upload of the same is needed, DamagedChunk when that would not help, and StoreError; then those before are
        as they were, and there is no image unless self.whole, or the store did what it was asked and its answer was lost.
        """
        self.flush()
        self._check_packs(self._check_references(manifest))
        self.flush()
        body = {
            "created": time.time(),
            **manifest,
            "format": manifests.FORMAT,
            "image": self.image_id,
            "sizes": self.sizes(),
        }
        job_id, epoch = body.get("job_id"), body.get("epoch")
        self._check_still_ours(job_id, epoch)
        name = f"images/{self.image_id}/manifest.json"
        label = f"{name} in store {self._shelf.url}"
        with named("write the manifest", label):
            fault.point("store_manifest_write")
            data = manifests.encode(body, self._shelf.key)
            self._backend.write(name, data, stage="write the manifest", durable=True)
        self.whole = True
        with named("end the upload", label):
            fault.point("store_after_manifest")
        try:
            # A gc or a restore that began while the manifest was on its way has not seen it: look again.
            self._check_still_ours(job_id, epoch)
        except BaseException:
            with contextlib.suppress(StoreError):
                self._backend.remove(name)
                self.whole = False
            raise
        self._close()
        return manifests.summary(body)

    def _check_references(self, body: dict[str, Any]) -> dict[bytes, Location]:
        """The older chunks that the image relies on."""
        relied: dict[bytes, Location] = {}
        for label, refs in manifests.chunk_lists(body):
            for name, _ in refs:
                if name == ZERO:
                    continue
                hashed = bytes.fromhex(name)
                if hashed in self._new:
                    continue
                where = self._known.get(hashed)
                if where is None:
                    self._renew(hashed, name, label)
                    continue
                relied[hashed] = where
                self._relied_on.add(where.pack)
        return relied

    def _renew(self, hashed: bytes, name: str, label: str) -> None:
        """A chunk of a file that is as in the last image: nobody has put it, and its pack is doubted, or about to go. It is
        still good where its hash says so."""
        where = self._doubted.get(hashed) or self._going.get(hashed)
        if where is None:
            raise MissingChunk(name, label, why="it was never put")
        body = self._shelf.read_chunk(hashed, where)
        if body is None and where.pack in self._shelf.damaged:
            raise DamagedChunk(name, label, pack=where.pack)
        if body is None:
            raise MissingChunk(name, label, why=f"pack {where.pack} was removed meanwhile")
        self.append_body(where, hashed, body)
        if hashed in self._doubted:
            self.renewed.add(where.pack)

    def _check_packs(self, relied: dict[bytes, Location]) -> None:
        """What the image relies on is as it was written, as far as a few reads can tell. Raises DamagedPack."""
        doubted = self._shelf.doubted_packs()
        for pack in sorted(self._relied_on):
            # Another thread may have looked at the packs meanwhile, and read an index again.
            if pack in doubted or self._shelf.has_bad_index(pack):
                raise DamagedPack(self.image_id, pack, self._shelf.url)
        some = random.sample(sorted(self._relied_on), min(len(self._relied_on), _SAMPLE_INDICES))
        bad = list(self._pool.map(partial(self._shelf.has_bad_index, again=True), some))
        if any(bad):
            raise DamagedPack(self.image_id, some[bad.index(True)], self._shelf.url)
        chosen = _sample(relied)
        # All of them: the next try is then to meet no other damaged pack.
        read = list(self._pool.map(lambda one: self._shelf.read_chunk(*one), chosen))
        for (_, where), body in zip(chosen, read, strict=True):
            if body is None and where.pack in self._shelf.damaged:
                raise DamagedPack(self.image_id, where.pack, self._shelf.url)

    def _check_still_ours(self, job_id: object, epoch: object) -> None:
        if isinstance(job_id, str) and isinstance(epoch, int):
            self._shelf.check_epoch(job_id, epoch)
        if not self._marker.exists():
            raise UploadLost(self.image_id, "a gc took this upload for dead")
        there = {entry.name for entry in self._backend.list("packs")}
        for pack in sorted(self._relied_on.union(self._packs)):
            if f"{pack}.pack" not in there or f"{pack}.idx" not in there:
                raise UploadLost(self.image_id, f"pack {pack} was removed meanwhile")

    def abort(self) -> None:
        """Gives the upload up; finished packs stay until the next gc. No effect after commit()."""
        if self._done:
            return
        with self._mu:
            pack, self._pack = self._pack, None
        self._close()
        if pack is not None:
            pack.object.abandon()

    def _close(self) -> None:
        self._done = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._io.shutdown(wait=True)
        self._marker.end()

    @property
    def upload_id(self) -> str:
        return self._marker.id


def _sample(relied: dict[bytes, Location]) -> list[tuple[bytes, Location]]:
    """A few chunks, of as many packs as can be."""
    some = random.sample(list(relied.items()), min(len(relied), 4 * _SAMPLE_CHUNKS))
    packs = {where.pack: (hashed, where) for hashed, where in some}
    first = list(packs.values())
    chosen: list[tuple[bytes, Location]] = []
    left = _SAMPLE_BYTES
    for one in dict.fromkeys([*first, *some]):
        if len(chosen) < _SAMPLE_CHUNKS and one[1].stored_bytes <= left:
            chosen.append(one)
            left -= one[1].stored_bytes
    return chosen


def _whole_hash(views: Iterable[memoryview]) -> str:
    hasher = blake3()
    for view in views:
        hasher.update(view)
    return hasher.hexdigest()


def _read_chunks(stream: IO[bytes], chunk_bytes: int) -> Iterator[memoryview]:
    while True:
        parts: list[bytes] = []
        have = 0
        while have < chunk_bytes:
            data = stream.read(chunk_bytes - have)
            if not data:
                break
            parts.append(data)
            have += len(data)
        if not have:
            return
        yield memoryview(b"".join(parts) if len(parts) > 1 else parts[0])
