# SPDX-License-Identifier: Apache-2.0
"""Which images a job has in its store, which of them matters to it now, and the epoch that makes older copies of it stale.

Threads: a verb's thread adds and removes; any thread counts. `_lock` is held from a look at the store to what follows
from it: an image that is committed meanwhile is added behind that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from devproxy import records
from devproxy.checkpoint import store
from devproxy.checkpoint.errors import StoreError
from devproxy.checkpoint.manifest import Image as StoredImage
from devproxy.errors import DevproxyError
from devproxy.log import say
from devproxy.node.spec import JobSpec


class Images:
    """opened: the job's store, where that is open already."""

    def __init__(self, spec: JobSpec, opened: store.Store | None) -> None:
        self._spec = spec
        self._opened = opened
        self._lock = threading.Lock()
        self._whole: set[str] = set()
        self.last = ""  # the last whole one
        self.asleep_in = ""  # of a suspended job
        self.problem = ""  # of the newest one
        self.epoch: int | None = None
        self._sequence = 0  # of images within the epoch, also of those that came to nothing
        self._created_unix_s = 0.0  # what the last image's clock said

    def __len__(self) -> int:
        return len(self._whole)

    def store(self) -> store.Store:
        if self._opened is None:
            self._opened = store.Store.open(self._spec.store)
        return self._opened

    # -- the epoch ----------------------------------------------------------------------------------------------

    def hold_epoch(self) -> None:
        """Before an image is taken. Raises where another copy of the job has gone on from a later image."""
        if self.epoch is None:
            self.epoch = self.store().take_epoch(self._spec.job_id)
        self.check_epoch()

    def check_epoch(self) -> None:
        if self.epoch is not None:
            self.store().check_epoch(self._spec.job_id, self.epoch)

    def take_new_epoch(self) -> None:
        """The job was brought back from an image. A store that cannot be written to is read all the same."""
        try:
            self.epoch = self.store().take_epoch(self._spec.job_id)
        except StoreError as error:  # read-only, or full
            say(
                f"{error.what}: until this job's first image, a copy that runs elsewhere goes on taking images of it"
            )

    def next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    # -- what there is ------------------------------------------------------------------------------------------

    def came_from(self, image_id: str, created_unix_s: float) -> None:
        self.last, self._created_unix_s = image_id, created_unix_s

    def count(self) -> None:
        """Those of the job that its store has: somebody else may have removed some, or found damage. Raises StoreError, OSError."""
        with self._lock:
            self._note(self.store().images_of(self._spec.job_id))

    def add(self, image_id: str) -> None:
        """It is committed."""
        with self._lock:
            self._whole.add(image_id)
            self.problem = ""
        self.record(image_id)

    def record(self, image_id: str) -> None:
        """For those who ask for the job's image when the job is gone."""
        records.has_image(self._spec.job, image_id, self.store().url)

    def prune(self, committed: str) -> None:
        """Removes old ones. Raises OSError, DevproxyError."""
        spec = self._spec
        with self._lock:
            found = self.store().images_of(spec.job_id)
            gone = self.store().prune(
                spec.job_id, keep=spec.keep, committed=committed, images=found
            )
            self._note([one for one in found if one.id not in gone])

    def older_whole(self, image_id: str, say_stage: Callable[[str], None]) -> str | None:
        """The one to use where this one is damaged."""
        try:
            older = self.store().older_whole(image_id, say_stage)
            self.count()
        except (DevproxyError, OSError):
            return None
        return older

    def clock_warning(self, created_unix_s: float) -> str:
        """Of a new image, of which the last one's time is no longer needed; "" where the clock went on."""
        before, self._created_unix_s = self._created_unix_s, created_unix_s
        if created_unix_s >= before:
            return ""
        return (
            f"the clock was set back: this image's time is {before - created_unix_s:.0f} s before that of the image"
            " before it; images are kept in the order in which they were taken"
        )

    def _note(self, of_job: list[StoredImage]) -> None:
        """The newest last. _lock is held."""
        whole = [one.id for one in of_job if one.whole]
        gone = self._whole.difference(whole)
        self._whole = set(whole)
        newest = of_job[-1] if of_job and not of_job[-1].whole else None
        self.problem = f"image {newest.id} is not whole: {newest.problem}" if newest else ""
        if self.last in gone and not self.asleep_in:
            self.last = whole[-1] if whole else ""
