"""The state folder, which outlives jobs: <state>/ = DEVPROXY_STATE_DIR or /var/tmp/devproxy-<uid>/, 0700.

    builds/<id>/       copies of devproxy's own files that a job maps or runs; images carry them
    logs/<job>.log     output of jobs that were restored without a terminal or a file
    store/             the store when none is named
    restores/          what a detached agent is to restore

A job runs from a copy, so that devproxy can be rebuilt or upgraded under a running job and between dump and restore:
CRIU restores a mapped file by its path, and refuses one that has changed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time

from devproxy import config
from devproxy.errors import Refused

BUILD_KEEP_S = 24 * 3600.0
# Of the library folder, what a job needs: everything but these.
NOT_COPIED = (".pyi",)
PYLIB = "pylib"


def state_dir() -> str:
    """The state folder, made at first use. Raises Refused where it is not ours or cannot be made."""
    path = config.state_dir()
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        info = os.stat(path)
    except OSError as error:
        raise Refused(
            f"the state folder {path} cannot be used: {error.strerror}",
            "set DEVPROXY_STATE_DIR to a folder of yours",
        ) from None
    if info.st_uid != os.getuid():
        raise Refused(
            f"the state folder {path} belongs to user {info.st_uid}, not to you ({os.getuid()})",
            "set DEVPROXY_STATE_DIR to a folder of yours",
        )
    if info.st_mode & 0o077:
        os.chmod(path, 0o700)
    return path


def subfolder(name: str) -> str:
    path = os.path.join(state_dir(), name)
    os.makedirs(path, mode=0o700, exist_ok=True)
    return path


def default_store() -> str:
    return os.path.join(state_dir(), "store")


def log_path(job: str) -> str:
    return os.path.join(subfolder("logs"), f"{job}.log")


def build_path(build_id: str) -> str:
    return os.path.join(state_dir(), "builds", build_id)


def _files(folder: str) -> list[tuple[str, os.stat_result]]:
    """(path relative to folder, stat) of every regular file below it, sorted."""
    found = []
    todo = [""]
    while todo:
        relative = todo.pop()
        with os.scandir(os.path.join(folder, relative)) as entries:
            for entry in entries:
                name = os.path.join(relative, entry.name)
                if entry.is_dir():
                    if entry.name != "__pycache__":
                        todo.append(name)
                elif entry.is_file() and not name.endswith(NOT_COPIED):
                    found.append((name, entry.stat()))
    return sorted(found)


def build_files(build_id: str) -> list[str]:
    """Names of the files in a build, relative to its folder."""
    return [name for name, _ in _files(build_path(build_id))]


def ensure_build(lib: str, pylib: str) -> str:
    """Copies the library folder and the Python part of the plugin; returns the build's id.

    The id is a hash over names, sizes and times, so that nothing is read when the copy is there already.
    Raises OSError where the copy cannot be made; nothing half-made stays.
    """
    parts = [(lib, "", _files(lib)), (pylib, PYLIB, _files(pylib))]
    digest = hashlib.sha256()
    for _, prefix, files in parts:
        for name, info in files:
            digest.update(f"{prefix}/{name} {info.st_size} {info.st_mtime_ns}\n".encode())
    build_id = digest.hexdigest()[:16]
    target = build_path(build_id)
    if os.path.isdir(target):
        os.utime(target)
        return build_id
    builds = subfolder("builds")
    _prune(builds)
    temporary = f"{target}.{os.getpid()}"
    try:
        for source, prefix, files in parts:
            for name, _ in files:
                to = os.path.join(temporary, prefix, name)
                os.makedirs(os.path.dirname(to), mode=0o700, exist_ok=True)
                shutil.copy2(os.path.join(source, name), to)
        try:
            os.rename(temporary, target)
        except OSError:
            if not os.path.isdir(target):  # else somebody else was quicker
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return build_id


def _prune(builds: str) -> None:
    """Copies that no start has used for a day and no living process maps. Images carry their own."""
    from devproxy import proctree

    now = time.time()
    for name in os.listdir(builds):
        path = os.path.join(builds, name)
        try:
            if now - os.stat(path).st_mtime < BUILD_KEEP_S:
                continue
        except OSError:
            continue
        if not proctree.mapping(path):
            shutil.rmtree(path, ignore_errors=True)
