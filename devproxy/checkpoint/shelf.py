# SPDX-License-Identifier: Apache-2.0
"""An open store as all parts of it see it: its packs by their indices, its manifests, its epochs.

It writes nothing but epochs and notes: of damaged packs, and of images that somebody has read whole. Uploads (writer.py), reading (reader.py) and removal (gc.py) stand on it, and store.py on them.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

from devproxy.checkpoint import key as keys
from devproxy.checkpoint import manifest as manifests
from devproxy.checkpoint import packs
from devproxy.checkpoint.backend import Backend, Entry
from devproxy.checkpoint.chunker import decompress, digest
from devproxy.checkpoint.errors import NoSuchImage, StaleJob, StoreError
from devproxy.checkpoint.markers import TOMBSTONES, Marker
from devproxy.checkpoint.packs import Location, PackIndex

DISTRUSTED = "distrusted"
VERIFIED = "verified"
NOTE_CHUNKS_MAX = 10_000  # then a restore says the rest
NOTE_BYTES_MAX = 80 * NOTE_CHUNKS_MAX


class KnownChunks(NamedTuple):
    """doubted: those in packs that are not as they were written, as far as one can see. going: those in packs that a gc may be
    about to remove. They may be in `good` too."""

    good: dict[bytes, Location]
    doubted: dict[bytes, Location]
    going: dict[bytes, Location]


class Shelf:
    """url, key: as the store was opened. Any number of threads and processes may use one at the same time."""

    def __init__(self, backend: Backend, key: bytes) -> None:
        self.backend = backend
        self.url = backend.url
        self.key = key
        self._mu = threading.Lock()  # the three below
        self._indices: dict[str, PackIndex | None] = {}  # None: damaged
        self._listed: dict[str, Entry] = {}  # pack -> its index, as it was before it was read
        self._merged: dict[bytes, list[Location]] | None = None
        self.damaged: dict[str, str] = {}  # pack -> a chunk of it that was not as it was written
        self._bad: dict[str, set[bytes]] = {}  # pack -> all such chunks that this process has met
        self._notes: dict[Entry, frozenset[bytes]] = {}  # as they were read

    # ---- chunks ----

    def known_chunks(self, marker: Marker) -> KnownChunks:
        """The chunks an upload may rely on: those of indices that are signed with our key, in packs that nobody doubts. The
        order of the steps matters: U2 to U4 of gc.py."""
        doomed: set[str] = set()
        for entry in self.backend.list(TOMBSTONES):
            if entry.name.endswith(".json"):
                doomed.update(_victims(self.backend, f"{TOMBSTONES}/{entry.name}"))
        found = KnownChunks({}, {}, {})
        pinned: list[str] = []
        for pack in self.pack_ids():
            index = self.pack_index(pack)
            if index and pack not in doomed:
                pinned.append(pack)
            elif index and index.ours:
                found.going.update(index.entries)
        doubted = self.doubted_packs()
        for pack in pinned:
            if (index := self.pack_index(pack)) and index.ours:
                (found.doubted if pack in doubted else found.good).update(index.entries)
        marker.pin(pinned)
        return found

    def pack_ids(self) -> list[str]:
        """Packs that have an index. One that was written since it was read will be read again."""
        there = {entry.name: entry for entry in self.backend.list(packs.FOLDER)}
        found = {
            name.removesuffix(".idx"): entry
            for name, entry in there.items()
            if name.endswith(".idx") and packs.file_name(name.removesuffix(".idx")) in there
        }
        with self._mu:
            changed = {pack for pack, entry in found.items() if self._listed.get(pack) != entry}
            self._listed.update(found)
        for pack in changed:
            self.forget(pack)
        return sorted(found)

    def pack_index(self, pack: str) -> PackIndex | None:
        """The index of a pack, read once. None when it is damaged or gone."""
        with self._mu:
            if pack in self._indices:
                return self._indices[pack]
        index: PackIndex | None
        try:
            data = self.backend.read(packs.index_name(pack), packs.INDEX_BYTES_MAX)
            index = packs.decode_index(pack, data, self.key)
        except FileNotFoundError:
            return None
        except packs.DamagedIndex:
            index = None
        with self._mu:
            self._indices[pack] = index
            self._merged = None
        return index

    def has_bad_index(self, pack: str, *, again: bool = False) -> bool:
        """Whether it is damaged, or another key's; not when it is gone. again: it is read once more."""
        if again:
            self.forget(pack)
        index = self.pack_index(pack)
        with self._mu:
            damaged = index is None and pack in self._indices
        return damaged or (index is not None and not index.ours)

    def forget(self, pack: str) -> None:
        """Its index is read when it is asked for again."""
        with self._mu:
            self._indices.pop(pack, None)
            self._merged = None

    def note_damage(self, pack: str, *chunks: bytes) -> None:
        """These in the pack are not what the index says: from now on no upload relies on the pack.

        Whoever opens the store later is told by an object of the pack's name. A store that cannot be written keeps no note;
        then only this process knows. What is met behind the pack's first goes into the note with keep_notes().
        """
        with self._mu:
            self._bad.setdefault(pack, set()).update(chunks)
            if pack in self.damaged:
                return
            self.damaged[pack] = chunks[0].hex()
        with contextlib.suppress(StoreError):
            name = f"{DISTRUSTED}/{pack}"
            self.backend.create(name, _note(set(chunks)), stage="note a damaged pack")

    def noted_chunks(self) -> dict[str, set[bytes]]:
        """Pack -> chunks in it that somebody has found damaged. Of a note that cannot be read none is known."""
        found = {entry.name: set(self._noted(entry)) for entry in self.backend.list(DISTRUSTED)}
        with self._mu:
            for pack, chunks in self._bad.items():
                found.setdefault(pack, set()).update(chunks)
        return found

    def _noted(self, entry: Entry) -> frozenset[bytes]:
        with self._mu:
            if entry in self._notes:
                return self._notes[entry]
        try:
            note = json.loads(self.backend.read(f"{DISTRUSTED}/{entry.name}", NOTE_BYTES_MAX))
            chunks = frozenset(map(bytes.fromhex, [note["chunk"], *note.get("more", ())]))
        except (FileNotFoundError, StoreError):
            return frozenset()
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            chunks = frozenset()
        with self._mu:
            self._notes[entry] = chunks
        return chunks

    def keep_notes(self, good: Iterable[tuple[str, bytes]]) -> None:
        """After a look at many chunks: what is damaged is noted chunk by chunk, and what was read `good` (pack, chunk) no more.

        So a pack that was put back from elsewhere, or a disk that reads again, is trusted once somebody has looked.
        """
        mended: dict[str, set[bytes]] = {}
        for pack, chunk in good:
            mended.setdefault(pack, set()).add(chunk)
        there = {entry.name: set(self._noted(entry)) for entry in self.backend.list(DISTRUSTED)}
        with self._mu:
            for pack, chunks in mended.items():
                left = self._bad.pop(pack, set()) - chunks
                self.damaged.pop(pack, None)
                if left:
                    self._bad[pack], self.damaged[pack] = left, min(left).hex()
            bad = {pack: set(chunks) for pack, chunks in self._bad.items()}
        for pack in (bad.keys() | mended.keys()) & there.keys():
            now = (there[pack] | bad.get(pack, set())) - mended.get(pack, set())
            if now == there[pack]:
                continue
            with contextlib.suppress(StoreError):
                if now:
                    name = f"{DISTRUSTED}/{pack}"
                    self.backend.write(name, _note(now), stage="note a damaged pack")
                else:
                    self.drop_notes([pack])

    def doubted_packs(self) -> set[str]:
        """Packs, as of the last refresh, that no upload may rely on.

        Somebody has found a damaged chunk in it, its size differs from its index, or it was written after its index; or the
        index was written after it was read.
        """
        there = {entry.name: entry for entry in self.backend.list(packs.FOLDER)}
        noted = {entry.name for entry in self.backend.list(DISTRUSTED)}
        with self._mu:
            indices = dict(self._indices)
            listed = dict(self._listed)
            noted.update(self.damaged)
        doubted: set[str] = set()
        for pack, index in indices.items():
            body = there.get(packs.file_name(pack))
            if index is None or body is None:
                continue
            written = there.get(packs.index_file_name(pack))
            after_ns = body.written_ns - written.written_ns if written else 0
            late = after_ns > self.backend.clocks_ns or listed.get(pack, written) != written
            if pack in noted or body.size != index.pack_bytes or late:
                doubted.add(pack)
        return doubted

    def drop_notes(self, gone: Iterable[str]) -> None:
        """Removes the notes of packs that are gone. Names of packs are not used again."""
        for pack in gone:
            self.backend.remove(f"{DISTRUSTED}/{pack}")

    def noted_packs(self) -> list[str]:
        """Those in which somebody has found damage."""
        return sorted(entry.name for entry in self.backend.list(DISTRUSTED))

    # ---- images that were read whole ----

    def note_whole(self, image_id: str) -> None:
        """Every chunk of it has been read now and was right. A store that cannot be written keeps no note."""
        with contextlib.suppress(StoreError):
            self.backend.write(f"{VERIFIED}/{image_id}", b"{}", stage="note a whole image")

    def drop_whole(self, gone: Iterable[str]) -> None:
        """Of images that are gone, or damaged after all."""
        for image_id in gone:
            with contextlib.suppress(StoreError):
                self.backend.remove(f"{VERIFIED}/{image_id}")

    def verified(self) -> dict[str, float]:
        """Image -> when somebody last read every chunk of it and all were right: seconds since 1970, by the store's clock.

        Empty where that cannot be listed: it says when to look again, and is in nobody's way.
        """
        with contextlib.suppress(StoreError):
            return {entry.name: entry.written_ns / 1e9 for entry in self.backend.list(VERIFIED)}
        return {}

    # ---- reading ----

    def read_chunk(self, hashed: bytes, where: Location) -> bytes | memoryview | None:
        """The stored body, when it is that chunk; else None, and the pack is noted as damaged."""
        try:
            body = self.backend.read_range(
                packs.pack_name(where.pack), where.offset, where.stored_bytes
            )
        except FileNotFoundError:
            return None
        except StoreError as error:
            if not self.backend.has_lost(error):
                raise
            body = b""
        raw = None
        if len(body) == where.stored_bytes:
            raw = decompress(where.codec, body, where.raw_bytes)
        if raw is None or digest(raw) != hashed:
            self.note_damage(where.pack, hashed)
            return None
        return body

    def pack_problems(self) -> dict[str, str]:
        """Packs that are there and are not as they were written, as far as it is known by now; and why."""
        found = {
            pack: f"chunk {chunk[:16]} of it is damaged" for pack, chunk in self.damaged.items()
        }
        sizes = {entry.name: entry.size for entry in self.backend.list(packs.FOLDER)}
        with self._mu:
            indices = dict(self._indices)
        for pack, index in indices.items():
            size = sizes.get(packs.file_name(pack))
            if index and size is not None and size != index.pack_bytes:
                found[pack] = f"it has {size} bytes, and {index.pack_bytes} were written"
        return found

    def refresh(self) -> None:
        """Looks which packs there are now."""
        there = self.pack_ids()
        with self._mu:
            gone = set(self._indices) - set(there)
        for pack in gone:
            self.forget(pack)
        for pack in there:
            self.pack_index(pack)

    def lookup(self) -> dict[bytes, list[Location]]:
        """Every place of every chunk, in the packs that were there at the last refresh."""
        with self._mu:
            if self._merged is None:
                merged: dict[bytes, list[Location]] = {}
                for index in self._indices.values():
                    for hashed, where in index.entries.items() if index else ():
                        merged.setdefault(hashed, []).append(where)
                self._merged = merged
            return self._merged

    def why_missing(self) -> str:
        """What may explain a chunk without a place; "" where nothing does."""
        with self._mu:
            damaged = sorted(pack for pack, index in self._indices.items() if index is None)
        return f"the index of pack {damaged[0]} is damaged" if damaged else ""

    # ---- epochs ----

    def take_epoch(self, job_id: str) -> int:
        """The next fencing number of the job: whoever has it is the job, all before are stale.

        jobs/<job id>/epoch-<n> is made exclusively (a link; on S3 a put with If-None-Match), so two takers never get the
        same number. None is ever removed: a taker that listed long ago could make it a second time.
        """
        manifests.check_image_id(job_id)
        epoch = 0
        while True:
            # A name that is taken is passed over, also one that no listing shows: a link to nowhere.
            epoch = max(epoch, self.epoch(job_id)) + 1
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
        numbers = (name.removeprefix("epoch-") for name in names)
        return [int(number) for number in numbers if number.isascii() and number.isdigit()]

    # ---- manifests ----

    def image_ids(self) -> list[str]:
        found = (entry.name for entry in self.backend.list("images"))
        return sorted(name for name in found if manifests.is_image_id(name))

    def strange(self) -> list[str]:
        """What lies among the images and is none: names that no image has, and files."""
        found = self.backend.list("images")
        return sorted(e.name for e in found if e.size or not manifests.is_image_id(e.name))

    def strange_packs(self) -> list[str]:
        """What lies among the packs and is neither a pack nor an index."""
        found = (entry.name for entry in self.backend.list(packs.FOLDER))
        return sorted(name for name in found if not name.endswith((".pack", ".idx")))

    def read_manifest(self, image_id: str) -> dict[str, Any]:
        """Raises NoSuchImage, TruncatedManifest, UnknownFormat, WrongChecksum, WrongAuthentication, StoreError."""
        return manifests.decode(image_id, self._manifest_bytes(image_id), self.key, keys.path())

    def read_unauthenticated(self, image_id: str) -> dict[str, Any]:
        """For gc, which keeps what another key's image needs as well."""
        return manifests.decode(image_id, self._manifest_bytes(image_id), None)

    def _manifest_bytes(self, image_id: str) -> bytes:
        manifests.check_image_id(image_id)
        try:
            return self.backend.read(f"images/{image_id}/manifest.json")
        except FileNotFoundError:
            raise NoSuchImage(image_id, self.url) from None


def _note(chunks: set[bytes]) -> bytes:
    first, *more = sorted(chunk.hex() for chunk in chunks)[:NOTE_CHUNKS_MAX]
    return json.dumps({"chunk": first, "more": more}).encode()


def _victims(backend: Backend, name: str) -> list[str]:
    try:
        tombstone = json.loads(backend.read(name))
        return [str(pack) for pack in tombstone["victims"]]
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return []
