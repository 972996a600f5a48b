# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a store, one class each. Every text names stage, object and cause."""

from __future__ import annotations

from devproxy.errors import DevproxyError

_PREVIOUS_WHOLE = "images that were whole before are whole still"


class StoreError(DevproxyError):
    """A stage of work on the store failed."""

    def __init__(self, stage: str, obj: str, cause: str, remedy: str = _PREVIOUS_WHOLE) -> None:
        self.stage = stage
        self.cause = cause
        super().__init__(f"{stage} failed on {obj}: {cause}", remedy, object=obj)


class StoreFull(StoreError):
    """No space, or no quota, is left."""

    def __init__(self, stage: str, obj: str, cause: str) -> None:
        super().__init__(
            stage, obj, f"the store is full ({cause})",
            "free space (devproxy images gc) and try again, what was stored is used again; "
            + _PREVIOUS_WHOLE,
        )  # fmt: skip


class StoreGone(StoreError):
    """The store's folder or server does not answer any more."""

    def __init__(self, stage: str, obj: str, cause: str) -> None:
        super().__init__(
            stage, obj, f"the store is gone ({cause})",
            "bring it back and try again, what was stored is used again; " + _PREVIOUS_WHOLE,
        )  # fmt: skip


class StaleJob(StoreError):
    """The job was restored elsewhere: this one must not write images any more."""

    def __init__(self, job_id: str, mine: int, newest: int) -> None:
        self.job_id, self.mine, self.newest = job_id, mine, newest
        super().__init__(
            "commit", f"job {job_id}", f"epoch {mine} is over, the store says {newest}",
            "this job was restored elsewhere; end it there or here",
        )  # fmt: skip


class UploadLost(StoreError):
    """A gc took this upload for dead (its heartbeat was too old) or something it needs has been removed."""

    def __init__(self, image_id: str, cause: str) -> None:
        super().__init__(
            "commit", f"image {image_id}", cause, "take the image again; " + _PREVIOUS_WHOLE
        )


class DamagedPack(StoreError):
    """An image was to rely on a pack that is not as it was written. Whoever puts everything again stores it anew."""

    def __init__(self, image_id: str, pack: str, url: str) -> None:
        self.pack = pack
        super().__init__(
            "commit",
            f"image {image_id}",
            f"pack {pack} of store {url}, on which it relies, is damaged",
            "take the image again: nothing relies on that pack any more; devproxy images verify says which images are whole",
        )


class ImageError(DevproxyError):
    """An image cannot be used."""


class NoSuchImage(ImageError):
    def __init__(self, image_id: str, url: str) -> None:
        super().__init__(
            f"image {image_id} is not in store {url}", "devproxy images lists those that are"
        )


class TruncatedManifest(ImageError):
    def __init__(self, image_id: str, have: int, want: int | None) -> None:
        wanted = f" of {want}" if want is not None else ""
        super().__init__(
            f"the manifest of image {image_id} ends after {have}{wanted} bytes",
            "use an older image",
        )


class WrongChecksum(ImageError):
    def __init__(self, image_id: str, what: str = "its checksum is wrong") -> None:
        super().__init__(
            f"the manifest of image {image_id} is damaged: {what}", "use an older image"
        )


class WrongAuthentication(ImageError):
    def __init__(self, image_id: str, key_file: str) -> None:
        super().__init__(
            f"the manifest of image {image_id} was not signed with the key in {key_file}",
            "an image is restored by the user who took it; bring that user's key file (DEVPROXY_KEY_FILE)",
        )  # fmt: skip


class UnknownFormat(ImageError):
    def __init__(self, image_id: str, version: object) -> None:
        self.version = version
        super().__init__(
            f"image {image_id} has format {version}, which this devproxy does not know",
            "restore it with the version of devproxy that took it, or a newer one",
        )


class ChunkError(ImageError):
    """A chunk of an image cannot be had. `older` is an image to use instead, when there is one."""

    def __init__(self, what: str, chunk: str, obj: str, older: str | None) -> None:
        self.chunk, self.older = chunk, older
        self._what = what
        of = f" of {obj}" if obj else ""
        super().__init__(
            f"chunk {chunk[:16]}{of} {what}",
            f"use the older whole image: {older}" if older else "use an older image",
            object=obj,
        )

    def about(self, obj: str, older: str | None) -> ChunkError:
        """The same error, with the object it belongs to and the image to use instead."""
        fresh = type(self).__new__(type(self))
        ChunkError.__init__(fresh, self._what, self.chunk, obj or self.object, older or self.older)
        return fresh


class MissingChunk(ChunkError):
    def __init__(self, chunk: str, obj: str = "", older: str | None = None, why: str = "") -> None:
        super().__init__("is not in the store" + (f" ({why})" if why else ""), chunk, obj, older)


class DamagedChunk(ChunkError):
    def __init__(self, chunk: str, obj: str = "", older: str | None = None, pack: str = "") -> None:
        super().__init__("is damaged" + (f" in pack {pack}" if pack else ""), chunk, obj, older)
