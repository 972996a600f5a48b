# SPDX-License-Identifier: Apache-2.0
"""Whether images are whole: every chunk that they rely on is read, and its hash compared.

Nothing is written but a note for each damaged pack, and one for each whole image (shelf.py), where the store can be
written.
"""

from __future__ import annotations

from dataclasses import dataclass

from devproxy.checkpoint import manifest as manifests
from devproxy.checkpoint.chunker import ZERO
from devproxy.checkpoint.errors import ImageError, NoSuchImage
from devproxy.checkpoint.manifest import Image
from devproxy.checkpoint.reader import Examined, Reader


@dataclass(frozen=True)
class Verdict:
    """image.problem names the first thing that is wrong with it, and its pack. Bytes are those in packs."""

    image: Image
    chunks: int = 0  # that it relies on, each counted once
    stored_bytes: int = 0  # of these
    read_bytes: int = 0  # of these, without chunks that an image before has too
    damaged_chunks: int = 0


class Verifier:
    """Of the images of one store. A chunk of several images is read once."""

    def __init__(self, store: Reader) -> None:
        self._store = store
        self._found = Examined()
        store.refresh()

    @property
    def read_bytes(self) -> int:
        return sum(self._found.stored_bytes.values())

    def packs(self) -> dict[str, str]:
        """Those that were read and are not as they were written, and why."""
        problems = self._store.pack_problems()
        return {pack: why for pack, why in sorted(problems.items()) if pack in self._found.packs}

    def check(self, image_id: str, problem: str = "") -> Verdict | None:
        """None: the image was removed meanwhile. problem: what is known to be wrong with it. Raises StoreError."""
        verdict = self.verdict(image_id, problem)
        if not verdict.image.whole and image_id not in self._store.image_ids():
            return None
        return verdict

    def verdict(self, image_id: str, problem: str = "") -> Verdict:
        """check() that takes what is not there for damaged."""
        try:
            body = self._store.read_manifest(image_id)
            with manifests.understood(image_id):
                lists = manifests.chunk_lists(body)
                refs = [(label, chunk, size) for label, part in lists for chunk, size in part]
                image = manifests.summary(body)
        except NoSuchImage as error:
            return Verdict(Image.unread(image_id, error))
        except ImageError as error:
            return Verdict(Image.unread(image_id, error, problem))
        before = self.read_bytes
        self._store.examine(((chunk, size) for _, chunk, size in refs), self._found)
        chunks = {chunk for _, chunk, _ in refs if chunk != ZERO}
        wrong = self._found.wrong
        for label, chunk, _ in refs:
            if not image.problem and chunk in wrong:
                image = manifests.summary(body, wrong[chunk].about(label, None).what)
        if image.whole:
            self._store.note_whole(image_id)
        else:
            self._store.drop_whole([image_id])
        return Verdict(
            image,
            chunks=len(chunks),
            stored_bytes=sum(self._found.stored_bytes[chunk] for chunk in chunks),
            read_bytes=self.read_bytes - before,
            damaged_chunks=len(chunks & wrong.keys()),
        )
