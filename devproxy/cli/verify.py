# SPDX-License-Identifier: Apache-2.0
"""`devproxy images verify`: every chunk of the images is read, one line for each image, and which one to restore."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from devproxy.cli.output import show_json
from devproxy.control import client
from devproxy.control.stores import any_image, name_in
from devproxy.errors import Refused
from devproxy.machine import show_bytes

if TYPE_CHECKING:
    from devproxy.checkpoint.manifest import Image
    from devproxy.checkpoint.store import Store
    from devproxy.checkpoint.verify import Verdict, Verifier


def verify(arguments: argparse.Namespace, stores: list[Store]) -> int:
    """Writes no more into a whole store than which images it has read. Exit code 1 when something is damaged. Raises Refused
    where there is no such job or image."""
    limit_ms = arguments.limit_ms
    until = None if limit_ms is None else time.monotonic() + limit_ms / 1000
    job = arguments.names[0] if arguments.names else ""
    chosen = _chosen(stores, job, arguments.image)
    looks = [_Look(store, arguments.json) for store, _ in chosen]
    for look, (_, images) in zip(looks, chosen, strict=True):
        look.verify(images, alone=arguments.image is not None, until=until)
    client.tell_jobs({verdict.image.job_id for look in looks for verdict in look.verdicts})
    if arguments.json:
        show_json(
            {
                "images": [row for look in looks for row in look.as_json()],
                "stores": [look.summary() for look in looks],
            },
            indent=2,
        )
    elif not any(look.verdicts or look.left for look in looks):
        print("no images")
    return 1 if any(look.damaged() for look in looks) else 0


def _chosen(stores: list[Store], job: str, text: str | None) -> list[tuple[Store, list[Image]]]:
    if text is not None:
        store, image = any_image(stores, text)
        if job and _job(image) != job:
            raise Refused(
                f"image {image.id} is of job {_job(image)!r}, not of {job!r}",
                "leave out the job, or see: devproxy images",
            )
        return [(store, [image])]
    chosen = [(store, store.images()) for store in stores]
    if not job:
        return chosen
    of_job = [(store, [i for i in images if _job(i) == job]) for store, images in chosen]
    if not any(images for _, images in of_job):
        where = ", ".join(store.url for store in stores) or "any store"
        raise Refused(f"no image of job {job!r} in {where}", "see: devproxy images, or --store")
    return of_job


def _job(image: Image) -> str:
    """Where the manifest cannot be read, the id still tells."""
    return image.job or name_in(image.id)


class _Look:
    """At the images of one store. Says each line as soon as it is known, unless it is silent."""

    def __init__(self, store: Store, silent: bool) -> None:
        from devproxy.checkpoint.verify import Verifier  # late: blake3 is for verbs with a store

        self.verdicts: list[Verdict] = []
        self.newest: dict[
            str, str
        ] = {}  # job -> its newest whole image, "" for none; of jobs of which all were read
        self.left: list[Image] = []  # for which the time was over
        self._order: list[str] = []  # images by their age
        self._store, self._silent = store, silent
        self._verifier: Verifier = Verifier(store)

    def verify(self, images: list[Image], *, alone: bool, until: float | None) -> None:
        """alone: of its job others are read only where it is damaged. until: by time.monotonic(), no image is begun then."""
        self._order = [image.id for image in images]
        if until is not None:
            verified = self._store.verified()
            images = sorted(images, key=lambda image: verified.get(image.id, 0.0))
        for number, image in enumerate(images):
            if until is not None and time.monotonic() >= until:
                self.left = images[number:]
                break
            self._one(image)
        in_part = {_job(image) for image in self.left}
        for job in dict.fromkeys(_job(verdict.image) for verdict in self.verdicts):
            if job in in_part:
                continue
            if not alone:
                self.newest[job] = self._newest(job)
            elif not self.verdicts[0].image.whole:
                self.newest[job] = self._look_for_another(job)
        if self.verdicts or self.left:
            self._say_all()

    def _one(self, image: Image) -> None:
        verdict = self._verifier.check(image.id, image.problem)
        if verdict is None:
            self._say(f"image {image.id} was removed meanwhile")
            return
        self.verdicts.append(verdict)
        shared = verdict.stored_bytes - verdict.read_bytes
        size = f"{verdict.chunks} chunks, {show_bytes(verdict.stored_bytes)} read"
        if shared > 0:
            size += f" ({show_bytes(shared)} of them for an image before)"
        if verdict.image.whole:
            self._say(f"image {verdict.image.id} is whole: {size}")
            return
        more = f" and {n} more" if (n := verdict.damaged_chunks - 1) > 0 else ""
        self._say(f"image {verdict.image.id} is damaged: {verdict.image.problem}{more}; {size}")

    def _newest(self, job: str) -> str:
        whole = {v.image.id for v in self.verdicts if v.image.whole and _job(v.image) == job}
        return max(whole, key=self._order.index, default="")

    def _look_for_another(self, job: str) -> str:
        known = {verdict.image.id for verdict in self.verdicts}
        for image in reversed(self._store.images()):
            if image.whole and _job(image) == job and image.id not in known:
                verdict = self._verifier.check(image.id)
                if verdict is not None and verdict.image.whole:
                    return image.id
        return ""

    def _say_all(self) -> None:
        packs = self._verifier.packs()
        for pack, why in packs.items():
            self._say(f"pack {pack} is damaged: {why}")
        for job, newest in self.newest.items():
            if newest:
                self._say(f"job {job}: the newest whole image is {newest}")
            else:
                self._say(f"job {job}: no image in this store is whole")
        whole = sum(verdict.image.whole for verdict in self.verdicts)
        self._say(
            f"store {self._store.url}: {len(self.verdicts)} image(s), {whole} whole,"
            f" {len(self.verdicts) - whole} damaged; {len(packs)} damaged pack(s);"
            f" {show_bytes(self._verifier.read_bytes)} read"
        )
        if self.left:
            self._say(f"left for the next `images verify --for`: {len(self.left)} image(s)")

    def _say(self, line: str) -> None:
        if not self._silent:
            print(line, flush=True)

    def damaged(self) -> bool:
        return bool(self._verifier.packs()) or not all(v.image.whole for v in self.verdicts)

    def as_json(self) -> list[dict[str, Any]]:
        return [
            verdict.image.as_json()
            | {
                "store": self._store.url,
                "chunks": verdict.chunks,
                "stored_bytes": verdict.stored_bytes,
                "read_bytes": verdict.read_bytes,
                "damaged_chunks": verdict.damaged_chunks,
            }
            for verdict in self.verdicts
        ]

    def summary(self) -> dict[str, Any]:
        return {
            "store": self._store.url,
            "damaged_packs": self._verifier.packs(),
            "newest_whole": self.newest,
            "read_bytes": self._verifier.read_bytes,
            "left": [image.id for image in self.left],
        }
