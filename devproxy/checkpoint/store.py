# SPDX-License-Identifier: Apache-2.0
"""The store of images: content-addressed chunks in packs, manifests that name them.

docs/checkpoint-format.md has the layout. Every error is a StoreError (the store), an ImageError (an image) or Refused.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from devproxy import fault
from devproxy.checkpoint import gc as collector
from devproxy.checkpoint import key as keys
from devproxy.checkpoint import manifest as manifests
from devproxy.checkpoint import packs
from devproxy.checkpoint import writer as writers
from devproxy.checkpoint.backend import named
from devproxy.checkpoint.backends import open_backend
from devproxy.checkpoint.chunker import KINDS, ZERO
from devproxy.checkpoint.errors import (
    ChunkError,
    DamagedChunk,
    ImageError,
    MissingChunk,
    NoSuchImage,
)
from devproxy.checkpoint.gc import GcReport
from devproxy.checkpoint.manifest import Image
from devproxy.checkpoint.markers import ABANDONED_S, UPLOADS, Marker
from devproxy.checkpoint.reader import Reader, digest_of
from devproxy.checkpoint.verify import Verifier
from devproxy.log import say

SAID_BYTES = 1 << 30  # to read so many takes seconds


class Store(Reader):
    """An open store. Any number of threads and processes may use one at the same time."""

    @classmethod
    def open(cls, url: str, *, reads: bool = False, looks: bool = False) -> Store:
        """Opens, and makes it when it is not there. Raises Refused (another user's, no bucket) and StoreError.

        reads: it is opened for images that are there: without a key none of them can be, and no new key helps.
        looks: nothing will be written, and so nothing is made.
        """
        backend = open_backend(url)
        with named("open", f"store {backend.url}"):
            fault.point("store_open")
        backend.prepare(make=not looks)
        foreign = not os.path.lexists(keys.path()) and bool(backend.list("images"))
        if looks and not foreign and not os.path.lexists(keys.path()):
            return cls(
                backend, os.urandom(keys.KEY_BYTES)
            )  # there is nothing that a key has signed
        key = keys.load(create=not (foreign and (reads or looks)))
        if foreign:
            say(
                f"key file {keys.path()} was not there, and is made now: images that are in store {backend.url} already"
                " are of another key, and cannot be restored with it"
            )
        return cls(backend, key)

    def writer(self, image_id: str) -> writers.Writer:
        """Begins an upload. Raises Refused when there is such an image."""
        return writers.begin(self, image_id)

    def images(self) -> list[Image]:
        """All images, oldest first, each quickly verified. Damaged ones are among them, with what is wrong."""
        self.refresh()
        noted = self.noted_chunks()
        found: list[Image] = []
        for image_id in self.image_ids():
            try:
                body = self.read_manifest(image_id)
                with manifests.understood(image_id):
                    found.append(self._quick_look(body, noted))
            except NoSuchImage:
                continue  # an upload that has not come so far, or one removed since
            except ImageError as error:
                found.append(Image.unread(image_id, error))
        return manifests.in_order(found)

    def verify(self, image_id: str, *, full: bool = False) -> Image:
        """quick: the manifest is ours, each chunk lies inside a pack that is long enough, and nobody has found it damaged there.
        full: each chunk's hash.

        What is wrong with the image is in the result; only the store's own errors are raised.
        """
        if full:
            return Verifier(self).verdict(image_id).image
        try:
            body = self.read_manifest(image_id)
            self.refresh()
            with manifests.understood(image_id):
                return self._quick_look(body, self.noted_chunks())
        except ImageError as error:
            return Image.unread(image_id, error)

    def older_whole(self, image_id: str, say: Callable[[str], None] = lambda _: None) -> str | None:
        """The newest whole image of the same job that is older: what to offer when this one is damaged.

        Images of a job share most of their packs, so each one is read before it is named. say gets a line about each that
        takes long.
        """
        images = self.images()
        at = next((n for n, image in enumerate(images) if image.id == image_id), None)
        this = images[at] if at is not None and images[at].job_id else None
        older = [
            image
            for image in (images[:at] if this else images)
            if image.whole
            and image.id != image_id
            and (this is None or image.job_id == this.job_id)
        ]
        verifier = Verifier(self)
        for other in reversed(older):
            if sum(other.sizes.get(kind, 0) for kind in KINDS) >= SAID_BYTES:
                say(f"reading image {other.id}, which is older: is it whole?")
            if verifier.verdict(other.id).image.whole:
                return other.id
        return None

    def remove_image(self, image_id: str) -> None:
        """Removes the manifest; its chunks go with the next gc."""
        manifests.check_image_id(image_id)
        self.backend.remove(f"images/{image_id}/manifest.json")

    def remove_unless(self, image_id: str, needed: Callable[[], str]) -> str:
        """Removes the image, asks, and puts it back where somebody needs it after all; returns why, or "".

        needed() is asked behind the removal: whoever removed another image in between, since this one was there, is then
        seen to have done so. Meanwhile no gc takes a chunk.
        """
        manifest = self._manifest_bytes(image_id)
        with self.hold(image_id):
            self.remove_image(image_id)
            why = "it cannot be found out who needs it"
            try:
                why = needed()
            finally:
                if why:
                    name = f"images/{image_id}/manifest.json"
                    self.backend.write(name, manifest, stage="put back", durable=True)
        return why

    def images_of(self, job_id: str) -> list[Image]:
        return [image for image in self.images() if image.job_id == job_id]

    def prune(
        self, job_id: str, keep: int, *, committed: str = "", images: list[Image] | None = None
    ) -> list[str]:
        """Removes the oldest images of the job but `keep` whole ones, then what nobody needs. The ids removed.

        Images of the job that are not whole do not count, and go when a newer whole one is there; where only a note says so,
        when `keep` newer ones are: the damage may be mended yet. committed: an image that stays whatever the order says.
        images: images_of(job_id), where the caller has just asked.
        """
        collector.check_keep(keep)
        if images is None:
            images = self.images_of(job_id)
        whole = [number for number, image in enumerate(images) if image.whole]
        removed = [images[number].id for number in whole[:-keep]]
        last = whole[-1] if whole else 0
        first = whole[-keep] if len(whole) >= keep else 0
        removed += [
            image.id
            for number, image in enumerate(images)
            if not image.whole and number < (first if image.noted else last)
        ]
        removed = [image_id for image_id in removed if image_id != committed]
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

    def _quick_look(self, body: dict[str, Any], noted: dict[str, set[bytes]]) -> Image:
        """What can be seen of manifests, indices, sizes and notes of damage (noted_chunks)."""
        merged = self.lookup()
        sizes = {entry.name: entry.size for entry in self.backend.list(packs.FOLDER)}
        damage = ""
        for label, refs in manifests.chunk_lists(body):
            for chunk, size in refs:
                if chunk == ZERO:
                    continue
                try:
                    hashed = digest_of(chunk)
                except ChunkError as error:
                    return manifests.summary(body, error.about(label, None).what)
                options = merged.get(hashed, [])
                if not options:
                    why = self.why_missing()
                    return manifests.summary(body, MissingChunk(chunk, label, why=why).what)
                places = [
                    where.pack
                    for where in options
                    if where.raw_bytes == size
                    and where.offset + where.stored_bytes <= sizes.get(f"{where.pack}.pack", -1)
                ]
                if not places:
                    why = f"pack {options[0].pack} is not whole"
                    return manifests.summary(body, MissingChunk(chunk, label, why=why).what)
                if not damage and all(hashed in noted.get(pack, ()) for pack in places):
                    damage = DamagedChunk(chunk, label, pack=places[0]).what
                    damage += ", as was found before (devproxy images verify looks again)"
        return manifests.summary(body, damage, noted=bool(damage))
