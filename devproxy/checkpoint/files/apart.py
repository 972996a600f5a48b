# SPDX-License-Identifier: Apache-2.0
"""A job's files in another place: what an image would put back, for a copy beside the living job."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from devproxy import folders
from devproxy.checkpoint.files.known import Known
from devproxy.checkpoint.files.look import lstat
from devproxy.checkpoint.files.owner import Owners
from devproxy.checkpoint.files.places import Places
from devproxy.checkpoint.files.plan import Plan
from devproxy.checkpoint.files.put_back import FetchMany, Restore
from devproxy.checkpoint.files.records import FileEntry, PutBack
from devproxy.checkpoint.files.undo import Undo

_NOWHERE = "/proc/devproxy-none"


def tops(folders_of_files: Iterable[str]) -> list[str]:
    """Without those that lie in another one of them."""
    found: list[str] = []
    for folder in sorted(set(folders_of_files), key=lambda f: f.split("/")):
        if not any(is_in(folder, other) for other in found):
            found.append(folder)
    return found


def is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def put(
    plan: Plan,
    base: str,
    fetch: FetchMany,
    report: Callable[[str], None],
) -> list[str]:
    """Puts every file of the plan below the empty folder `base`, at its absolute path. A file that is to be absent becomes the
    character device that hides it in an overlay. Returns the folders that need an overlay. Raises as put_back."""
    done = PutBack()
    there, absent = _wanted(plan, done, report)
    over = tops([*map(_folder_of, there), *map(os.path.dirname, absent)])
    own = Plan(Known(_NOWHERE), Undo(_NOWHERE), [_moved(entry, base) for entry in there])
    own.copies = {base + path: copy for path, copy in plan.copies.items()}
    with Places() as places:
        owners = Owners(own.known, 0, _NOWHERE, done, report, places)
        Restore(own, owners, fetch, report, done, places).run()
        for path in absent:
            folder, name = places.of(base + path, make=True)
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=folder)
    for top in over:
        _dress(base, top)
    return over


def needs(plan: Plan) -> list[str]:
    """The folders that put() would say. Changes nothing but the plan."""
    there, absent = _wanted(plan, PutBack(), lambda _: None)
    return tops([*map(_folder_of, there), *map(os.path.dirname, absent)])


def _wanted(
    plan: Plan, done: PutBack, report: Callable[[str], None]
) -> tuple[list[FileEntry], list[str]]:
    """What is to be there, and which paths are not to be."""
    plan.add_touched_since(done, report)
    wanted = [entry for entry in plan.wanted.values() if not entry.listed_only]
    there = [entry for entry in wanted if entry.kind != "absent"]
    return there, [e.path for e in wanted if e.kind == "absent" and lstat(e.path) is not None]


def _folder_of(entry: FileEntry) -> str:
    if entry.kind == "directory" and os.path.isdir(entry.path):
        return entry.path
    return os.path.dirname(entry.path)


def _moved(entry: FileEntry, base: str) -> FileEntry:
    return replace(entry, path=base + entry.path, link=base + entry.link if entry.link else "")


def _dress(base: str, top: str) -> None:
    """Folders look as those that they stand for."""
    for path, _, _ in os.walk(base + top):
        info = lstat(path.removeprefix(base))
        if info is None or not stat.S_ISDIR(info.st_mode):
            continue
        fd = folders.open_folder(path)
        try:
            with suppress(PermissionError):
                os.chown(f"/proc/self/fd/{fd}", info.st_uid, info.st_gid)
            os.chmod(f"/proc/self/fd/{fd}", stat.S_IMODE(info.st_mode))
        finally:
            os.close(fd)


def make_base(path: str) -> bool:
    """An empty folder; whether it was not there before. Raises folders.Unsafe and OSError."""
    made = not os.path.lexists(path)
    fd = folders.open_folder(path, make=True, mode=0o700)
    try:
        if folders.names_in(fd):
            raise FileExistsError(errno.EEXIST, "it is not empty", path)
    finally:
        os.close(fd)
    return made


def drop(base: str, made: bool) -> None:
    """What a restore that failed has put there, and the folder itself where it made that."""
    with suppress(OSError):
        for name in os.listdir(base):
            path = os.path.join(base, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)
        if made:
            os.rmdir(base)
