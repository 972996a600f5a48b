# SPDX-License-Identifier: Apache-2.0
"""`devproxy images`: what is in the stores, and its removal."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from devproxy import runtime
from devproxy.cli.output import show_json
from devproxy.cli.progress import fact_rows
from devproxy.cli.table import show_table
from devproxy.cli.verify import verify
from devproxy.control import client
from devproxy.control import coordinator_api as api
from devproxy.control.stores import any_image, open_stores
from devproxy.errors import Refused
from devproxy.log import say
from devproxy.machine import show_bytes, show_time

if TYPE_CHECKING:
    from devproxy.checkpoint.manifest import Image
    from devproxy.checkpoint.store import Store

AT_REST = (api.RUNNING, api.STOPPED, api.SUSPENDED, api.ENDING, api.GONE)
VERB_ENDS_S = 60.0


# -- the verb -------------------------------------------------------------------------------------------------------


def images(arguments: argparse.Namespace) -> int:
    """The images in the stores; `images gc` removes what none of them needs, `images rm` one of them, `images verify`
    reads them."""
    action, names = arguments.action, arguments.names
    if names and action not in ("rm", "verify"):
        raise Refused(f"images {action} takes no image", "see: devproxy help images")
    if not names and action == "rm":
        raise Refused("images rm needs an image", "devproxy images rm IMAGE; see: devproxy images")
    if len(names) > 1 and action == "verify":
        raise Refused("images verify takes one job", "see: devproxy help images")
    if arguments.image is not None and action != "verify":
        raise Refused(f"images {action} takes no --image", "see: devproxy help images")
    if arguments.limit_ms is not None and (action != "verify" or arguments.image is not None):
        what = "images verify --image" if action == "verify" else f"images {action}"
        raise Refused(f"{what} takes no --for", "see: devproxy help images")
    stores = open_stores(arguments.store, looks=action == "verify")
    if action == "gc":
        return _gc(arguments, stores)
    if action == "rm":
        return _rm(arguments, stores)
    _say_strange(stores)
    if action == "verify":
        return verify(arguments, stores)
    found = [(store, image) for store in stores for image in store.images()]
    if arguments.verify:
        found = [(store, store.verify(image.id, full=True)) for store, image in found]
        client.tell_jobs({image.job_id for _, image in found})
    read = {store: store.verified() for store in stores}
    if arguments.json:
        listed = [
            image.as_json() | {"store": store.url, "verified": read[store].get(image.id, 0.0)}
            for store, image in found
        ]
        show_json({"images": listed}, indent=2)
    elif not found:
        print("no images")
    for store in [] if arguments.json else stores:
        if rows := [_row(image, read[store]) for place, image in found if place is store]:
            show_table(
                f"store {store.url}",
                ["IMAGE", "JOB", "GPUS", "RANKS", "CREATED", "DEVICE", "HOST", "FILES", "NEW", "WHOLE", "VERIFIED"],
                rows,
            )  # fmt: skip
    return 1 if arguments.verify and not all(image.whole for _, image in found) else 0


def _say_strange(stores: list[Store]) -> None:
    for store in stores:
        for kind, strange in (("images", store.strange()), ("packs", store.strange_packs())):
            names = ", ".join(map(ascii, strange[:5]))
            if strange:
                say(
                    f"{len(strange)} thing(s) among the {kind} of {store.url} are none: {names}",
                    "devproxy",
                )


def _row(image: Image, verified: dict[str, float]) -> list[str]:
    def size(name: str) -> str:
        value = image.sizes.get(name)
        return show_bytes(value) if isinstance(value, int) else "?"

    return [
        image.id,
        image.job or "?",
        "+".join(map(str, image.gpus)),
        "+".join(map(str, image.ranks)) if any(image.ranks) else "",
        show_time(image.created) or "?",
        size("device"),
        size("host"),
        size("file"),
        size("new"),
        "yes" if image.whole else f"no: {image.problem}",
        show_time(verified.get(image.id, 0.0)),
    ]


def _gc(arguments: argparse.Namespace, stores: list[Store]) -> int:
    reports = [asdict(store.gc()) | {"store": store.url} for store in stores]
    if arguments.json:
        show_json({"stores": reports})
    elif not reports:
        print("no images")
    for report in [] if arguments.json else reports:
        rows = fact_rows({k: v for k, v in report.items() if v != [] and k != "store"})
        show_table(f"gc of store {report['store']}", ["", ""], rows)
        for reason in report["busy"]:
            say(f"left for the next gc: {reason}", "devproxy")
    return 0


# -- images rm ------------------------------------------------------------------------------------------------------


def _rm(arguments: argparse.Namespace, stores: list[Store]) -> int:
    """Each is looked up before the first is removed."""
    chosen = [any_image(stores, text) for text in arguments.names]
    removed: list[dict[str, Any]] = []
    for store, image in chosen:
        needed = partial(_needed, store, image, arguments.force)
        if why := needed() or store.remove_unless(image.id, needed):
            raise Refused(f"image {image.id} stays: {why}", "--force removes it all the same")
        removed.append({"image": image.id, "job": image.job, "store": store.url})
        if not arguments.json:
            print(f"removed image {image.id} of job {image.job or '?'} from store {store.url}")
    client.tell_jobs({image.job_id for _, image in chosen})
    freed = 0
    for store in dict.fromkeys(store for store, _ in chosen):
        report = store.gc()
        freed += report.removed_bytes
        for reason in report.busy:
            say(f"left for the next gc: {reason}", "devproxy")
    if arguments.json:
        show_json({"removed": removed, "freed_bytes": freed})
    else:
        print(f"freed {show_bytes(freed)}; what other images need as well stays")
    return 0


def _needed(store: Store, image: Image, force: bool) -> str:
    """Why a living job of this user here needs the image, or ""."""
    if force:
        return ""
    for name, path, alive in runtime.list_jobs():
        if not alive or not image.job_id or client.job_file(path).get("job_id") != image.job_id:
            continue
        status = _at_rest(name, path)
        if status is None:
            return f"a verb of job {name} is under way, or its supervisor does not answer"
        if status.phase == api.SUSPENDED and status.last_image == image.id:
            return f"job {name} is suspended in it"
        others = (one for one in store.images() if one.job_id == image.job_id and one.whole)
        if image.whole and all(one.id == image.id for one in others):
            return f"it is the only whole image of job {name}, which lives"
    return ""


def _at_rest(name: str, path: str) -> api.JobStatus | None:
    """The job when no verb is under way, which may remove images itself. None where that does not come."""
    deadline = time.monotonic() + VERB_ENDS_S
    while True:
        status = client.agent_status(name, path, runtime.is_alive(path))
        if status.phase in AT_REST and (status.checkpointable or status.phase == api.GONE):
            return status
        if time.monotonic() > deadline:
            return None
        time.sleep(0.1)
