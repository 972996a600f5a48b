# SPDX-License-Identifier: Apache-2.0
"""A job's files in another place: what an image would put back, for a copy beside the living job."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
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
_HIDES = "trusted.overlay.opaque"  # filesystems/overlayfs.rst, "whiteouts and opaque directories"


def tops(folders_of_files: Iterable[str]) -> list[str]:
    """Without those that lie in another one of them."""
    found: list[str] = []
    for folder in sorted(set(folders_of_files), key=lambda f: f.split("/")):
        if not any(is_in(folder, other) for other in found):
            found.append(folder)
    return found


def is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def listed(plan: Plan) -> dict[str, set[str]]:
    """The names in each folder that has files of the job.

    Read the journal after this, and plan anew: a process writes its line before it makes a file, so every file of the job
    among these names is in the new plan.
    """
    paths = plan.known.tracks.keys() | plan.wanted.keys()
    found: dict[str, set[str]] = {}
    for top in tops(map(os.path.dirname, paths)):
        for path in paths:
            while is_in(path, top) and path not in found:
                if _is_folder(path):
                    found[path] = set(os.listdir(path))
                path = os.path.dirname(path)
    return found


def _alone(wanted: Mapping[str, FileEntry], names: Mapping[str, set[str]]) -> set[str]:
    """The folders in which everything is to be as in the image, or not to be: nobody else has files there."""
    found: set[str] = set()
    for folder in sorted(names, key=lambda path: path.count("/"), reverse=True):
        for name in names[folder]:
            path = os.path.join(folder, name)
            if path in names:
                if path not in found:
                    break
            elif path not in wanted or wanted[path].listed_only:
                break
        else:
            if names[folder] or folder in wanted:
                found.add(folder)
    return found


def put(
    plan: Plan,
    names: Mapping[str, set[str]],
    base: str,
    fetch: FetchMany,
    report: Callable[[str], None],
) -> dict[str, bool]:
    """Puts every file of the plan below the empty folder `base`, at its absolute path. Raises as put_back. names: listed().

    Returns the folders that need an overlay, and whether each is to hide all that is in its own place. A folder that only
    the job uses does so: a file which the copy removes would come back when the living job makes one of that name. One
    below another has the kernel's mark of it. Elsewhere a character device hides what is to be absent.
    """
    done = PutBack()
    there, absent = _wanted(plan, done, report)
    over = tops([*map(_folder_of, there), *map(os.path.dirname, absent)])
    alone = _alone(plan.wanted, names)
    own = Plan(Known(_NOWHERE), Undo(_NOWHERE), [_moved(entry, base) for entry in there])
    own.copies = {base + path: copy for path, copy in plan.copies.items()}
    with Places() as places:
        owners = Owners(own.known, 0, _NOWHERE, done, report, places)
        restore = Restore(own, owners, fetch, report, done, places)
        restore.run(dress_folders=False)
        for path in absent:
            folder, name = places.of(base + path, make=True)
            if os.path.dirname(path) not in alone:
                os.mknod(name, stat.S_IFCHR, 0, dir_fd=folder)
        gone = [e.path for e in there if e.kind == "directory" and not _is_folder(e.path)]
        restore.dress_folders(own.wanted[base + path] for path in gone)
    for top in over:
        _dress(base, top, alone)
    return {top: top in alone for top in over}


def needs(plan: Plan) -> list[str]:
    """The folders that put() would say. Changes nothing but the plan."""
    there, absent = _wanted(plan, PutBack(), lambda _: None)
    return tops([*map(_folder_of, there), *map(os.path.dirname, absent)])


def _wanted(
    plan: Plan, done: PutBack, report: Callable[[str], None]
) -> tuple[list[FileEntry], list[str]]:
    """What is to be there, and which paths are not to be; of a folder, only its own."""
    plan.add_touched_since(done, report)
    wanted = [entry for entry in plan.wanted.values() if not entry.listed_only]
    there = [entry for entry in wanted if entry.kind != "absent"]
    absent = [e.path for e in wanted if e.kind == "absent" and lstat(e.path) is not None]
    return there, tops(absent)


def _is_folder(path: str) -> bool:
    info = lstat(path)
    return info is not None and stat.S_ISDIR(info.st_mode)


def _folder_of(entry: FileEntry) -> str:
    if entry.kind == "directory" and os.path.isdir(entry.path):
        return entry.path
    return os.path.dirname(entry.path)


def _moved(entry: FileEntry, base: str) -> FileEntry:
    return replace(entry, path=base + entry.path, link=base + entry.link if entry.link else "")


def _dress(base: str, top: str, alone: set[str]) -> None:
    """Folders look as those that they stand for, and hide what is there if they are in `alone`."""
    for path, _, _ in os.walk(base + top):
        info = lstat(path.removeprefix(base))
        if info is None or not stat.S_ISDIR(info.st_mode):
            continue
        fd = folders.open_folder(path)
        try:
            with suppress(PermissionError):
                os.chown(f"/proc/self/fd/{fd}", info.st_uid, info.st_gid)
            os.chmod(f"/proc/self/fd/{fd}", stat.S_IMODE(info.st_mode))
            if path.removeprefix(base) in alone:
                os.setxattr(f"/proc/self/fd/{fd}", _HIDES, b"y")
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
