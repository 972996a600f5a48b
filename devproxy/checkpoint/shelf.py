# SPDX-License-Identifier: Apache-2.0
"""An open store as all parts of it see it: its packs by their indices, its manifests, its epochs.

It writes nothing but epochs. Uploads (writer.py), reading (reader.py) and removal (gc.py) stand on it, and store.py on them.
"""

from __future__ import annotations

import json
import threading
from typing import Any

from devproxy.checkpoint import key as keys
from devproxy.checkpoint import manifest as manifests
from devproxy.checkpoint import packs
from devproxy.checkpoint.backend import Backend
from devproxy.checkpoint.errors import NoSuchImage, StaleJob
from devproxy.checkpoint.markers import TOMBSTONES, Marker
from devproxy.checkpoint.packs import Location, PackIndex


class Shelf:
    """url, key: as the store was opened. Any number of threads and processes may use one at the same time."""

    def __init__(self, backend: Backend, key: bytes) -> None:
        self.backend = backend
        self.url = backend.url
        self.key = key
        self._mu = threading.Lock()  # the two below
        self._indices: dict[str, PackIndex | None] = {}  # None: damaged
        self._merged: dict[bytes, list[Location]] | None = None
        self.damaged: dict[str, str] = {}  # packs -> a chunk of it that was not as it was written

    # ---- chunks ----

    def known_chunks(self, marker: Marker) -> dict[bytes, Location]:
        """The chunks an upload may rely on: those of indices that are signed with our key. The order of the steps matters: U2 to U4 of gc.py."""
        doomed: set[str] = set()
        for entry in self.backend.list(TOMBSTONES):
            if entry.name.endswith(".json"):
                doomed.update(_victims(self.backend, f"{TOMBSTONES}/{entry.name}"))
        found: dict[bytes, Location] = {}
        pinned: list[str] = []
        for pack in self.pack_ids():
            if pack not in doomed and (index := self.pack_index(pack)):
                pinned.append(pack)
                if index.ours:
                    found.update(index.entries)
        marker.pin(pinned)
        return found

    def pack_ids(self) -> list[str]:
        """Packs that have an index."""
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

    def forget(self, pack: str) -> None:
        """The pack was removed."""
        with self._mu:
            self._indices.pop(pack, None)
            self._merged = None

    def note_damage(self, pack: str, hashed: bytes) -> None:
        """A chunk in the pack is not what the index says."""
        with self._mu:
            self.damaged.setdefault(pack, hashed.hex())

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


def _victims(backend: Backend, name: str) -> list[str]:
    try:
        tombstone = json.loads(backend.read(name))
        return [str(pack) for pack in tombstone["victims"]]
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return []
