# SPDX-License-Identifier: Apache-2.0
"""What is remembered of a job by its name, also after its end: <state>/records/<job>.json.

    job, job_id, command, started_unix_s     of the last job of that name
    ended_unix_s, exit_code                  when it has ended; absent while it lives, and after a kill -9 of its supervisor
    image                                    its last whole image; "" before the first
    stores                                   where jobs of that name have images, the newest first

<state>/records/.pruned is as old as the last look for jobs that ended long ago.

Only the job's supervisor writes a record. One that cannot be written is no error: without it the user gives --store.
"""

from __future__ import annotations

import json
import os
import threading
import time

from devproxy import runtime, state
from devproxy.errors import DevproxyError

TYPE_CHECKING = False  # typing itself costs every start 10 ms
if TYPE_CHECKING:
    from typing import Any

KEEP_S = 7 * 24 * 3600.0  # of a job without images: its record and its log
MOST_STORES = 8
PRUNED = ".pruned"
PRUNE_EVERY_S = (
    3600.0  # a look at thousands of records takes tens of milliseconds, which each start would pay
)

_lock = threading.Lock()  # a supervisor's threads


def read(job: str) -> dict[str, Any]:
    """{} where nothing is remembered. Raises Refused for a name that is none."""
    return _load(_path(runtime.check_job_name(job)))


def names() -> list[str]:
    try:
        found = os.listdir(state.subfolder("records"))
    except (OSError, DevproxyError):
        return []
    return sorted(name.removesuffix(".json") for name in found if name.endswith(".json"))


def stores() -> list[str]:
    """Where any job of this user has images, as far as it is remembered."""
    found: dict[str, None] = {}
    if all_names := names():
        folder = state.subfolder("records")  # once: each call looks at every folder on the way
        for name in all_names:
            found.update(dict.fromkeys(_stores(_load(os.path.join(folder, f"{name}.json")))))
    return list(found)


def begin(job: str, job_id: str, command: list[str], started_unix_s: float) -> None:
    """A job of that name starts. Where one had images before it, that is not forgotten."""
    _prune()
    facts = {"job": job, "job_id": job_id, "command": command, "started_unix_s": started_unix_s}
    with _lock:
        _save(
            job, facts | {"image": "", "stores": _stores(_load(_path(job)))}
        )  # no end of the last


def has_image(job: str, image: str, store: str) -> None:
    """That image of it is whole, in that store (its URL, which holds from any folder)."""
    with _lock:
        facts = _load(_path(job))
        rest = [url for url in _stores(facts) if url != store]
        _save(job, facts | {"job": job, "image": image, "stores": [store, *rest][:MOST_STORES]})


def end(job: str, exit_code: int) -> None:
    with _lock:
        facts = _load(_path(job))
        _save(job, facts | {"ended_unix_s": round(time.time(), 3), "exit_code": exit_code})


def _path(job: str) -> str:
    return os.path.join(state.state_dir(), "records", f"{job}.json")


def _stores(facts: dict[str, Any]) -> list[str]:
    found = facts.get("stores", [])
    return [str(url) for url in found] if isinstance(found, list) else []


def _load(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            facts = json.load(file)
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _save(job: str, facts: dict[str, Any]) -> None:
    """Under another name first, so that nobody reads half of it."""
    try:
        path = os.path.join(state.subfolder("records"), f"{job}.json")
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(facts, file)
        os.rename(f"{path}.new", path)
    except (OSError, DevproxyError):
        pass


def _prune() -> None:
    """Forgets old jobs, where nobody has looked for them within the hour."""
    try:
        folder = state.subfolder("records")
        if _is_due(os.path.join(folder, PRUNED)):
            _forget_old(folder)
    except (OSError, DevproxyError):
        pass


def _is_due(stamp: str) -> bool:
    """Is the stamp older than an hour? Then it is new: a second start does not look as well."""
    try:
        # A stamp of the future was made while the clock was wrong.
        if 0 <= time.time() - os.stat(stamp).st_mtime < PRUNE_EVERY_S:
            return False
        os.utime(stamp)
    except FileNotFoundError:
        open(stamp, "w").close()
    return True


def _forget_old(folder: str) -> None:
    """Jobs that ended long ago and have no image: nobody can ask for more than their output."""
    before = time.time() - KEEP_S
    with os.scandir(folder) as entries:
        records = [entry for entry in entries if entry.name.endswith(".json")]
    for entry in records:
        name = entry.name.removesuffix(".json")
        try:
            if entry.stat().st_mtime > before or _stores(_load(entry.path)):
                continue
            if runtime.is_alive(os.path.join(runtime.root_path(), name)):
                continue
            os.unlink(entry.path)
            state.remove_log(name)
        except OSError:
            pass
