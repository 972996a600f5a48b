# SPDX-License-Identifier: Apache-2.0
"""The stores that this user's jobs have used, and which image a word means."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from devproxy import records, state
from devproxy.checkpoint.errors import StoreError
from devproxy.errors import Refused
from devproxy.log import say

if TYPE_CHECKING:
    from devproxy.checkpoint.manifest import Image
    from devproxy.checkpoint.store import Store


# -- stores ---------------------------------------------------------------------------------------------------------


def name_in(image_id: str) -> str:
    """The job's name in an image's id (image.new_id)."""
    return image_id.rsplit("-", 2)[0]


def _is_folder(url: str) -> bool:
    return "://" not in url.removeprefix("file://")


def _open(url: str, looks: bool) -> Store:
    # Late: blake3 and zstandard are not for verbs without a store.
    from devproxy.checkpoint.store import Store

    place = os.path.abspath(url.removeprefix("file://")) if _is_folder(url) else url
    return Store.open(place, reads=True, looks=looks)


def open_stores(given: str | None, *, looks: bool = False) -> list[Store]:
    """The store that is named; else the default one and all that are remembered, as far as they are there.

    looks: nothing will be written, so a store that cannot be written serves as well. Raises Refused and StoreError for the
    one that is named. Of the others one that does not answer is said.
    """
    if given:
        if _is_folder(given) and not os.path.isdir(given.removeprefix("file://")):
            raise Refused(f"there is no store {given}", "name the one that the job writes to")
        return [_open(given, looks)]
    found: dict[str, Store] = {}
    for url in (state.default_store(), *records.stores()):
        if _is_folder(url) and not os.path.isdir(url.removeprefix("file://")):
            continue  # never used, or removed by now
        try:
            store = _open(url, looks)
            found[store.url] = store
        except (Refused, StoreError) as error:
            say(f"left out: {error}", "devproxy")
    return list(found.values())


_FOREIGN = "bring the key file of the user who took the image, and name it with DEVPROXY_KEY_FILE"

# -- which image is meant -------------------------------------------------------------------------------------------


def images_of(stores: Sequence[Store]) -> list[tuple[Store, Image]]:
    """All images of the stores, oldest first. Of one job in one store in the order in which they were taken. Between jobs, also
    of one name, and between stores there is nothing but the clocks."""
    from devproxy.checkpoint import manifest  # late, as in _open

    by_url = {store.url: store for store in stores}
    found = [(url, image) for url, store in by_url.items() for image in store.images()]
    return [(by_url[url], image) for url, image in manifest.in_order_of_stores(found)]


def find_image(stores: Sequence[Store], text: str) -> tuple[Store, Image]:
    """By id, `latest` (the last of images_of), job (its newest whole image) or the beginning of an id. Raises Refused."""
    found = images_of(stores)
    whole = [pair for pair in found if pair[1].whole]
    named = [pair for pair in found if pair[1].id == text]
    if named and not any(image.whole for _, image in named):
        store, image = named[0]
        if image.foreign:
            raise Refused(f"image {text} cannot be used: {image.problem}", _FOREIGN)
        older = store.older_whole(text, partial(say, program="devproxy"))
        raise Refused(
            f"image {text} is not whole: {image.problem}",
            f"use an older one: devproxy restore {older}" if older else "no older one is whole",
        )
    if text == "latest":
        matches = whole[-1:]
    else:
        matches = (
            [pair for pair in whole if pair[1].id == text][:1]
            or [pair for pair in whole if pair[1].job == text][-1:]
            or [pair for pair in whole if pair[1].id.startswith(text)]
        )
    if not matches:
        import difflib  # for this alone

        known = [name for _, image in whole for name in (image.job, image.id)]
        near = difflib.get_close_matches(text, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        where = ", ".join(store.url for store in stores)
        foreign = [image for _, image in found if image.foreign]
        if foreign and not hint:
            from devproxy.checkpoint import key  # late, as in _open

            raise Refused(
                f"no whole image {text!r} in store {where} is signed with the key in {key.path()}; "
                f"{len(foreign)} there {'is' if len(foreign) == 1 else 'are'} not",
                _FOREIGN,
            )
        damaged = [i for _, i in found if text in ("latest", i.job) or i.id.startswith(text)]
        why = f": image {damaged[-1].id} is not whole: {damaged[-1].problem}" if damaged else ""
        raise Refused(
            f"no whole image {text!r} in store {where}{why}",
            f"{hint}see: devproxy images, or --store",
        )
    if len(matches) > 1:
        names = ", ".join(image.id for _, image in matches[:5])
        raise Refused(f"{text!r} is the beginning of {len(matches)} images: {names}", "write more")
    if text in ("latest", matches[0][1].job):
        _say_newer(found, matches[0], text)
    return matches[0]


def _say_newer(found: list[tuple[Store, Image]], chosen: tuple[Store, Image], text: str) -> None:
    """Whoever asks for the newest gets the newest whole one, and hears what is missing."""
    newer = [image for _, image in found[found.index(chosen) + 1 :] if not image.whole]
    for image in newer[-1:] if text == "latest" else [i for i in newer if i.job == text][-1:]:
        say(
            f"image {image.id} is newer than {chosen[1].id}, and not whole: {image.problem}",
            "devproxy",
        )


def any_image(stores: list[Store], text: str) -> tuple[Store, Image]:
    """By its id or the beginning of it; also one that is not whole. Raises Refused."""
    found = [(store, image) for store in stores for image in store.images()]
    exact = [pair for pair in found if pair[1].id == text]
    matches = exact or [pair for pair in found if text and pair[1].id.startswith(text)]
    if not matches:
        raise Refused(f"there is no image {text!r}", "see: devproxy images, or --store")
    if len(matches) > 1:
        names = ", ".join(f"{image.id} ({store.url})" for store, image in matches[:5])
        raise Refused(
            f"{text!r} is one of {len(matches)} images: {names}", "write more, or --store"
        )
    return matches[0]
