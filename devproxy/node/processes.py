# SPDX-License-Identifier: Apache-2.0
"""The processes of a tree out of CRIU's images, and what CRIU expects to find or not to find on the host."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from devproxy import fault, folders, state
from devproxy.checkpoint import criu, criu_image, image
from devproxy.checkpoint.overlay import Overlay
from devproxy.errors import DevproxyError
from devproxy.log import say
from devproxy.node import init, scheduling
from devproxy.node.tree import Tree

TWIN_S = 600.0  # for a restore of a twin, which makes the same names

fault.register(
    "restore_root", "CRIU has made the tree's root; the rest is not there, none of it runs"
)


def _inherited(stdio: dict[str, Any]) -> dict[str, int]:
    """The pipe that the job read is ours if we are the same supervisor, else one that has ended."""
    inode = stdio.get("stdin_pipe")
    if not inode:
        return {}
    try:
        if os.fstat(0).st_ino == inode:
            return {f"pipe:[{inode}]": 0}
    except OSError:
        pass
    read_end, write_end = os.pipe()
    os.close(write_end)
    return {f"pipe:[{inode}]": read_end}


def restore(
    tree: Tree,
    part: image.TreeImage,
    staging: str,
    namespace: int,
    overlays: Sequence[Overlay] = (),
) -> int:
    """The root's process id. Tried again where a mount went away between our look and CRIU's.

    namespace: the network namespace for a tree that had its own, else -1.
    """
    inherited = _inherited(part.stdio)
    if namespace >= 0:
        inherited[criu.NETWORK_KEY] = namespace
    tries_left = criu.MOUNT_TRIES

    def watch(root: int) -> None:
        tree.janitor.watch(root)  # should we be killed now, it ends with us
        fault.point("restore_root")

    images = os.path.join(staging, "criu")
    criu_image.wind_up_timers(images)
    if overlays:
        keys = [(one.folder, criu.overlay_key(n)) for n, one in enumerate(overlays)]
        criu_image.add_mounts(images, keys)
    while True:
        _make_mount_points(part.facts)
        try:
            with no_ghosts(images, tree.folder.path):
                return criu.find().restore(
                    images,
                    job_dir=tree.folder.path,
                    mount_at=init.mount_point(),
                    inherit_fds=inherited,
                    tcp=part.criu["tcp"],
                    log=os.path.join(staging, "criu-restore.log"),
                    overlays=overlays,
                    on_root=watch,
                    on_whole=lambda root: scheduling.restore(root, part.facts.get("threads", {})),
                )
        except criu.CriuError:
            tries_left -= 1
            gone = [p for p, _ in part.facts.get("mounts", []) if not os.path.lexists(p)]
            if not gone or not tries_left:
                raise


def _lock_byte(fd: int, place: int) -> None:
    until = time.monotonic() + TWIN_S
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise DevproxyError(
                    f"another restore of the same image has not come to its end for {TWIN_S:g} s",
                    "wait for it or end it (devproxy ps), then restore again",
                ) from None
            time.sleep(0.02)


@contextmanager
def no_ghosts(images_dir: str, job_dir: str) -> Iterator[None]:
    """The files that CRIU makes for deleted ones are not there before the block, nor behind it where it raises.

    An attempt that is ended in the middle leaves them, and with one of them there CRIU refuses to restore. Another
    restore may be making the same right now (a twin, of the same image): a byte of one file is locked for each name,
    in rising order, so that two that have names in common come one after the other and none waits in a circle.
    """
    paths = [_seen_from_here(path, job_dir) for path in criu_image.ghosts(images_dir)]
    places = {hashlib.blake2b(os.fsencode(path), digest_size=7).digest() for path in paths}

    def lay() -> None:
        for path in paths:
            # Most are not there; of one that stays CRIU will say so. Its folder may be one that another user has replaced.
            with suppress(OSError, folders.Unsafe):
                folder = folders.open_folder(os.path.dirname(path))
                try:
                    os.unlink(os.path.basename(path), dir_fd=folder)
                finally:
                    os.close(folder)

    with open(os.path.join(state.state_dir(), "ghosts.lock"), "wb") as file:
        for place in sorted(places):
            _lock_byte(file.fileno(), int.from_bytes(place, "big"))
        lay()
        try:
            yield
        except BaseException:
            lay()
            raise


def _seen_from_here(path: str, job_dir: str) -> str:
    """The job's path as the host has it: the same, but for the job's own folder."""
    inside = os.path.relpath(path, init.mount_point())
    return path if inside.startswith("..") else os.path.join(job_dir, inside)


def _make_mount_points(facts: dict[str, Any]) -> None:
    """A file system that the job saw and that is not mounted any more: CRIU is content with an empty place."""
    for path, is_folder in facts.get("mounts", []):
        if os.path.lexists(path):
            continue
        try:
            folder = folders.open_folder(path if is_folder else os.path.dirname(path), make=True)
            try:
                if not is_folder:
                    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
                    os.close(os.open(os.path.basename(path), flags, 0o600, dir_fd=folder))
            finally:
                os.close(folder)
        except OSError as error:
            raise DevproxyError(
                f"{path}, where a file system was mounted when the job started, cannot be made: {error.strerror}",
                "mount it again",
            ) from None
        say(f"{path} was a mounted file system when the job started; now it is an empty place")


def forget_end(job_dir: str) -> None:
    """How the tree ended before, which is no news any more."""
    try:
        os.unlink(os.path.join(job_dir, "init.status"))
    except FileNotFoundError:
        pass
