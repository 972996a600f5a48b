"""The store of images: content-addressed chunks in packs, manifests that name them.

docs/checkpoint-format.md has the layout. Every error is a StoreError (the store), an ImageError (an image) or Refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import IO, Any, NamedTuple

from devproxy import fault
from devproxy.checkpoint import gc as collector
from devproxy.checkpoint import key as keys
from devproxy.checkpoint import manifest as manifests
from devproxy.checkpoint import packs
from devproxy.checkpoint.backend import Backend, named, open_backend
from devproxy.checkpoint.chunker import MIB, ZERO, ChunkRef, decompress, digest
from devproxy.checkpoint.errors import (
    ChunkError,
    DamagedChunk,
    ImageError,
    MissingChunk,
    NoSuchImage,
    StaleJob,
)
from devproxy.checkpoint.gc import GcReport
from devproxy.checkpoint.markers import ABANDONED_S, TOMBSTONES, UPLOADS, Marker
from devproxy.checkpoint.packs import Location, PackIndex
from devproxy.checkpoint.writer import Writer, check_image_id
from devproxy.errors import Refused

_READERS = 4  # two that compute while two wait for the disk
_READ_BYTES = 4 * MIB  # one request: neighbours in a pack are read together
_Put = Callable[[int, bytes | memoryview], None]


@dataclass(frozen=True)
class Image:
    """What `devproxy images` shows. Bytes; created in seconds since 1970. problem is "" for a whole image."""

    id: str
    job: str = ""
    job_id: str = ""
    created: float = 0.0
    epoch: int = 0
    format: int = 0
    sizes: dict[str, Any] = field(default_factory=dict)
    whole: bool = True
    problem: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class _Wanted(NamedTuple):
    """A chunk on its way to its place. name: of the part that it belongs to, for errors."""

    digest: bytes
    bytes: int
    offset: int
    put: _Put
    name: str


class Store:
    """An open store. Any number of threads and processes may use one at the same time."""

    def __init__(self, backend: Backend, key: bytes) -> None:
        self.backend = backend
        self.url = backend.url
        self.key = key
        self._mu = threading.Lock()  # the two below
        self._indices: dict[str, PackIndex | None] = {}  # None: damaged
        self._merged: dict[bytes, list[Location]] | None = None

    @classmethod
    def open(cls, url: str) -> Store:
        """Opens, and makes it when it is not there. Raises Refused (another user's, no bucket) and StoreError."""
        backend = open_backend(url)
        with named("open", f"store {backend.url}"):
            fault.point("store_open")
        backend.prepare()
        return cls(backend, keys.load())

    # ---- writing ----

    def writer(self, image_id: str) -> Writer:
        """Begins an upload. Raises Refused when there is such an image."""
        check_image_id(image_id)
        if any(entry.name == "manifest.json" for entry in self.backend.list(f"images/{image_id}")):
            raise Refused(f"image {image_id} is in store {self.url} already", "give another id")
        return Writer(self, image_id)

    def known_chunks(self, marker: Marker) -> dict[bytes, Location]:
        """The chunks an upload may rely on. The order of the steps matters: U2 to U4 of gc.py."""
        doomed: set[str] = set()
        for entry in self.backend.list(TOMBSTONES):
            if entry.name.endswith(".json"):
                doomed.update(_victims(self.backend, f"{TOMBSTONES}/{entry.name}"))
        found: dict[bytes, Location] = {}
        pinned: list[str] = []
        for pack in self._pack_ids():
            if pack not in doomed and (index := self.pack_index(pack)):
                pinned.append(pack)
                found.update(index.entries)
        marker.pin(pinned)
        return found

    def take_epoch(self, job_id: str) -> int:
        """The next fencing number of the job: whoever has it is the job, all before are stale.

        jobs/<job id>/epoch-<n> is made exclusively (a link; on S3 a put with If-None-Match), so two takers never get the
        same number. None is ever removed: a taker that listed long ago could make it a second time.
        """
        check_image_id(job_id)
        while True:
            epoch = self.epoch(job_id) + 1
            if self.backend.create(f"jobs/{job_id}/epoch-{epoch:08d}", b"", stage="take the epoch"):
                return epoch

    def epoch(self, job_id: str) -> int:
        """The newest epoch of the job; 0 when none was taken."""
        return max(self._epochs(job_id), default=0)

    def check_epoch(self, job_id: str, epoch: int) -> None:
        """Raises StaleJob when the job was restored elsewhere since `epoch` was taken."""
        newest = self.epoch(job_id)
        if newest > epoch:
            raise StaleJob(job_id, epoch, newest)

    def _epochs(self, job_id: str) -> list[int]:
        names = [entry.name for entry in self.backend.list(f"jobs/{job_id}")]
        return [int(n.removeprefix("epoch-")) for n in names if n.removeprefix("epoch-").isdigit()]

    # ---- images ----

    def image_ids(self) -> list[str]:
        return sorted(
            entry.name for entry in self.backend.list("images") if not entry.name.startswith(".")
        )

    def read_manifest(self, image_id: str) -> dict[str, Any]:
        """Raises NoSuchImage, TruncatedManifest, UnknownFormat, WrongChecksum, WrongAuthentication, StoreError."""
        return manifests.decode(image_id, self._manifest_bytes(image_id), self.key, keys.path())

    def read_unauthenticated(self, image_id: str) -> dict[str, Any]:
        """For gc, which keeps what another key's image needs as well."""
        return manifests.decode(image_id, self._manifest_bytes(image_id), None)

    def _manifest_bytes(self, image_id: str) -> bytes:
        check_image_id(image_id)
        try:
            return self.backend.read(f"images/{image_id}/manifest.json")
        except FileNotFoundError:
            raise NoSuchImage(image_id, self.url) from None

    def images(self) -> list[Image]:
        """All images, oldest first, each quickly verified. Damaged ones are among them, with what is wrong."""
        self._refresh()
        found: list[Image] = []
        for image_id in self.image_ids():
            try:
                body = self.read_manifest(image_id)
            except NoSuchImage:
                continue  # an upload that has not come so far, or one removed since
            except ImageError as error:
                found.append(Image(image_id, whole=False, problem=error.what))
                continue
            found.append(self.summary(body, self._quick_problem(body)))
        return sorted(found, key=lambda image: (image.created, image.id))

    def summary(self, body: dict[str, Any], problem: str = "") -> Image:
        return Image(
            id=str(body["image"]),
            job=str(body.get("job", "")),
            job_id=str(body.get("job_id", "")),
            created=float(body.get("created", 0.0)),
            epoch=int(body.get("epoch") or 0),
            format=int(body["format"]),
            sizes=dict(body.get("sizes", {})),
            whole=not problem,
            problem=problem,
        )

    def verify(self, image_id: str, *, full: bool = False) -> Image:
        """quick: the manifest is ours and each chunk lies inside a pack that is long enough. full: each chunk's hash.

        What is wrong with the image is in the result; only the store's own errors are raised.
        """
        try:
            body = self.read_manifest(image_id)
        except ImageError as error:
            return Image(image_id, whole=False, problem=error.what)
        self._refresh()
        problem = self._quick_problem(body)
        if not problem and full:
            try:
                for label, refs in manifests.chunk_lists(body):
                    self._fetch(refs, lambda _offset, _data: None, label)
            except ChunkError as error:
                problem = error.what
        return self.summary(body, problem)

    def older_whole(self, image_id: str) -> str | None:
        """The newest whole image of the same job that is older: what to offer when this one is damaged."""
        images = self.images()
        this = next((image for image in images if image.id == image_id), None)
        older = [
            image.id
            for image in images
            if image.whole
            and image.id != image_id
            and (this is None or not this.job_id or image.job_id == this.job_id)
            and (this is None or not this.created or image.created < this.created)
        ]
        return older[-1] if older else None

    def remove_image(self, image_id: str) -> None:
        """Removes the manifest; its chunks go with the next gc."""
        check_image_id(image_id)
        self.backend.remove(f"images/{image_id}/manifest.json")

    def prune(self, job_id: str, keep: int) -> list[str]:
        """Removes the oldest images of the job but `keep` whole ones, then what nobody needs. The ids removed.

        Images of the job that are not whole do not count, and go when a newer whole one is there.
        """
        collector.check_keep(keep)
        whole = [image for image in self.images() if image.job_id == job_id]
        counted = [(image.created, image.id) for image in whole if image.whole]
        removed = collector.prune_candidates(counted, keep)
        if counted:
            newest = max(counted)[0]
            removed += [image.id for image in whole if not image.whole and image.created < newest]
        for image_id in removed:
            with named("prune", f"image {image_id} in store {self.url}"):
                fault.point("store_prune")
            self.remove_image(image_id)
        if removed:
            self.gc()
        return removed

    def gc(self, abandoned_s: float = ABANDONED_S, *, repack: bool = True) -> GcReport:
        """Removes what no image and no running upload needs. Raises StoreError."""
        return collector.collect(self, abandoned_s, repack)

    @contextlib.contextmanager
    def hold(self, image_id: str) -> Iterator[None]:
        """While inside, no gc removes a pack that is there now: for a restore that reads a long time."""
        marker = Marker(self.backend, UPLOADS, {"restore": image_id})
        try:
            self.known_chunks(marker)
            yield
        finally:
            marker.end()

    # ---- reading ----

    def fetch_file(
        self,
        refs: Iterable[ChunkRef],
        to: str | IO[bytes],
        *,
        name: str = "",
        older: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Writes the chunks one after another to a path (made 0600, or truncated) or a file object; the bytes.

        Every chunk's hash is checked before its bytes are used. Raises MissingChunk and DamagedChunk with `name` as
        the object and `older` as the image to use instead, StoreError, and OSError of the target. What was written
        until then stays: the caller's file is no good.
        """
        wanted = list(refs)
        if isinstance(to, str):
            return self.fetch_files([(wanted, to, name)], older=older, progress=progress)
        self._fetch_in_order(wanted, to, name, older, progress)
        return sum(size for _, size in wanted)

    def fetch_files(
        self,
        files: Iterable[tuple[Iterable[ChunkRef], str, str]],
        *,
        older: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """fetch_file for many at once: (refs, path, name) each. Read in the order of the packs. The bytes of all."""
        fds: list[int] = []
        parts: list[tuple[list[ChunkRef], _Put, str]] = []
        total = 0
        try:
            for refs, path, name in files:
                wanted = list(refs)
                size = sum(size for _, size in wanted)
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                fds.append(fd)
                os.ftruncate(fd, size)  # zero chunks stay holes
                parts.append((wanted, partial(_write_at, fd), name))
                total += size
            self._fetch_parts(parts, older, progress)
        finally:
            for fd in fds:
                os.close(fd)
        return total

    def fetch_into(
        self,
        refs: Iterable[ChunkRef],
        target: memoryview,
        *,
        name: str = "",
        older: str | None = None,
    ) -> int:
        """Fills a writable buffer, zeros included; the bytes. Raises as fetch_file, and ValueError if it is too small."""
        wanted = list(refs)
        total = sum(size for _, size in wanted)
        view = target.cast("B")
        if total > len(view):
            raise ValueError(f"{total} bytes do not fit into {len(view)}")

        def put(offset: int, data: bytes | memoryview) -> None:
            view[offset : offset + len(data)] = data

        offset = 0
        for chunk, size in wanted:
            if chunk == ZERO:
                for start in range(offset, offset + size, MIB):
                    end = min(start + MIB, offset + size)
                    view[start:end] = bytes(end - start)
            offset += size
        self._fetch(wanted, put, name, older)
        return total

    def fetch_bytes(
        self, refs: Iterable[ChunkRef], *, name: str = "", older: str | None = None
    ) -> bytes:
        wanted = list(refs)
        data = bytearray(sum(size for _, size in wanted))
        self.fetch_into(wanted, memoryview(data), name=name, older=older)
        return bytes(data)

    def _fetch_in_order(
        self,
        wanted: list[ChunkRef],
        to: IO[bytes],
        name: str,
        older: str | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        group: list[ChunkRef] = []
        size = 0
        for number, ref in enumerate(wanted):
            group.append(ref)
            size += ref[1]
            if size >= 4 * _READ_BYTES or number == len(wanted) - 1:
                to.write(self.fetch_bytes(group, name=name, older=older))
                if progress:
                    progress(size)
                group, size = [], 0

    def _fetch(
        self,
        refs: Iterable[ChunkRef],
        put: _Put,
        name: str = "",
        older: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """put(offset, data) is called from several threads, for all that is not zero, in pieces of any size and order."""
        self._fetch_parts([(refs, put, name)], older, progress)

    def _fetch_parts(
        self,
        parts: Iterable[tuple[Iterable[ChunkRef], _Put, str]],
        older: str | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        """Several _fetch with one pool. The memory that put is given is good until it returns."""
        wanted: list[_Wanted] = []
        for refs, put, name in parts:
            offset = 0
            for chunk, size in refs:
                if chunk != ZERO:
                    wanted.append(
                        _Wanted(_named_digest(chunk, name, older), size, offset, put, name)
                    )
                offset += size
        if not wanted:
            return
        runs = _runs(wanted, self._places(wanted, older))
        with ThreadPoolExecutor(_READERS, thread_name_prefix="devproxy-fetch") as pool:
            futures: list[Future[int]] = [pool.submit(self._read_run, run, older) for run in runs]
            try:
                for future in futures:
                    done = future.result()
                    if progress:
                        progress(done)
            finally:
                for future in futures:
                    future.cancel()

    def _places(self, wanted: list[_Wanted], older: str | None) -> list[Location]:
        merged = self._lookup()
        if any(chunk.digest not in merged for chunk in wanted):
            self._refresh()  # written since by another process
            merged = self._lookup()
        places: list[Location] = []
        for chunk in wanted:
            options = merged.get(chunk.digest)
            if not options:
                why = self._why_missing()
                raise MissingChunk(chunk.digest.hex(), why=why).about(chunk.name, older)
            if options[0].raw_bytes != chunk.bytes:
                error = DamagedChunk(chunk.digest.hex(), pack=options[0].pack)
                raise error.about(chunk.name, older)
            places.append(options[0])
        return places

    def _read_run(self, run: list[tuple[_Wanted, Location]], older: str | None) -> int:
        """Reads neighbours of one pack with one request, checks each, hands them on. Raw bytes handled."""
        first, last = run[0][1], run[-1][1]
        start, end = first.offset, last.offset + last.stored_bytes
        with named("read a chunk", f"{packs.pack_name(first.pack)} in store {self.url}"):
            fault.point("store_read_chunk")
            try:
                data = self.backend.view_range(packs.pack_name(first.pack), start, end - start)
            except FileNotFoundError:
                data = memoryview(b"")  # repacked, or lost: the other places decide
        bad: list[tuple[_Wanted, Location]] = []
        put: _Put = _nowhere
        to = begin = stop = 0  # raw neighbours that are good and not handed on yet
        for chunk, where in run:
            at = where.offset - start
            body = data[at : at + where.stored_bytes]
            whole = len(body) == where.stored_bytes
            raw = decompress(where.codec, body, chunk.bytes) if whole else None
            if raw is None or digest(raw) != chunk.digest:
                bad.append((chunk, where))
            elif raw is not body:
                chunk.put(chunk.offset, raw)
            elif chunk.put is put and at == stop and chunk.offset == to + stop - begin:
                stop += chunk.bytes
            else:
                put(to, data[begin:stop])
                put, to, begin, stop = chunk.put, chunk.offset, at, at + chunk.bytes
        put(to, data[begin:stop])
        for chunk, where in bad:  # last: reading again takes the buffer that `data` lies in
            try:
                chunk.put(chunk.offset, self._read_elsewhere(chunk.digest, chunk.bytes, where))
            except ChunkError as error:
                raise error.about(chunk.name, older) from None
        return sum(chunk.bytes for chunk, _ in run)

    def _read_elsewhere(self, hashed: bytes, size: int, bad: Location) -> bytes | memoryview:
        """Another copy of the chunk, in another pack. Raises DamagedChunk or MissingChunk."""
        self._refresh()
        for where in self._lookup().get(hashed, []):
            if where == bad:
                continue
            try:
                body = self.backend.read_range(
                    packs.pack_name(where.pack), where.offset, where.stored_bytes
                )
            except FileNotFoundError:
                continue
            raw = decompress(where.codec, body, size)
            if raw is not None and digest(raw) == hashed:
                return raw
        try:
            self.backend.read_range(packs.pack_name(bad.pack), bad.offset, 1)
        except FileNotFoundError:
            raise MissingChunk(hashed.hex(), why=f"pack {bad.pack} is not there") from None
        raise DamagedChunk(hashed.hex(), pack=bad.pack)

    # ---- indices ----

    def _pack_ids(self) -> list[str]:
        names = {entry.name for entry in self.backend.list(packs.FOLDER)}
        return sorted(
            name.removesuffix(".idx")
            for name in names
            if name.endswith(".idx") and f"{name.removesuffix('.idx')}.pack" in names
        )

    def pack_index(self, pack: str) -> PackIndex | None:
        """The index of a pack, read once. None when it is damaged or gone."""
        with self._mu:
            if pack in self._indices:
                return self._indices[pack]
        index: PackIndex | None
        try:
            index = packs.decode_index(pack, self.backend.read(packs.index_name(pack)))
        except FileNotFoundError:
            return None
        except packs.DamagedIndex:
            index = None
        with self._mu:
            self._indices[pack] = index
            self._merged = None
        return index

    def forget(self, pack: str) -> None:
        with self._mu:
            self._indices.pop(pack, None)
            self._merged = None

    def _refresh(self) -> None:
        there = self._pack_ids()
        with self._mu:
            gone = set(self._indices) - set(there)
        for pack in gone:
            self.forget(pack)
        for pack in there:
            self.pack_index(pack)

    def _lookup(self) -> dict[bytes, list[Location]]:
        with self._mu:
            if self._merged is None:
                merged: dict[bytes, list[Location]] = {}
                for index in self._indices.values():
                    for hashed, where in index.entries.items() if index else ():
                        merged.setdefault(hashed, []).append(where)
                self._merged = merged
            return self._merged

    def _why_missing(self) -> str:
        with self._mu:
            damaged = sorted(pack for pack, index in self._indices.items() if index is None)
        return f"the index of pack {damaged[0]} is damaged" if damaged else ""

    def _quick_problem(self, body: dict[str, Any]) -> str:
        """What a look at manifests, indices and sizes can find; "" when that is nothing."""
        merged = self._lookup()
        sizes = {entry.name: entry.size for entry in self.backend.list(packs.FOLDER)}
        for label, refs in manifests.chunk_lists(body):
            for chunk, size in refs:
                if chunk == ZERO:
                    continue
                try:
                    options = merged.get(_digest_of(chunk), [])
                except ChunkError as error:
                    return error.about(label, None).what
                if not options:
                    return MissingChunk(chunk, label, why=self._why_missing()).what
                if not any(
                    where.raw_bytes == size
                    and where.offset + where.stored_bytes <= sizes.get(f"{where.pack}.pack", -1)
                    for where in options
                ):
                    return MissingChunk(
                        chunk, label, why=f"pack {options[0].pack} is not whole"
                    ).what
        return ""


def _digest_of(chunk: str) -> bytes:
    try:
        hashed = bytes.fromhex(chunk)
    except ValueError:
        hashed = b""
    if len(hashed) != 32:
        raise MissingChunk(chunk, why="its name is no hash")
    return hashed


def _named_digest(chunk: str, name: str, older: str | None) -> bytes:
    try:
        return _digest_of(chunk)
    except ChunkError as error:
        raise error.about(name, older) from None


def _nowhere(offset: int, data: bytes | memoryview) -> None:
    del offset, data


def _write_at(fd: int, offset: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while len(view):
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def _runs(wanted: list[_Wanted], places: list[Location]) -> list[list[tuple[_Wanted, Location]]]:
    """Groups chunks that lie side by side in a pack, up to a request's size."""
    rows = sorted(zip(wanted, places, strict=True), key=lambda row: (row[1].pack, row[1].offset))
    runs: list[list[tuple[_Wanted, Location]]] = []
    for row in rows:
        where = row[1]
        if runs:
            first, last = runs[-1][0][1], runs[-1][-1][1]
            near = last.pack == where.pack and where.offset <= last.offset + last.stored_bytes
            # The same chunk twice, as a run of equal pages has it, is read once.
            if near and where.offset + where.stored_bytes - first.offset <= _READ_BYTES:
                runs[-1].append(row)
                continue
        runs.append([row])
    return runs


def _victims(backend: Backend, name: str) -> list[str]:
    try:
        tombstone = json.loads(backend.read(name))
        return [str(pack) for pack in tombstone["victims"]]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return []
