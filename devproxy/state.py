# SPDX-License-Identifier: Apache-2.0
"""The state folder, which outlives jobs: <state>/ = DEVPROXY_STATE_DIR or /var/tmp/devproxy-<uid>/, 0700.

    builds/<id>/       copies of devproxy's own files that a job maps or runs; images carry them
    plugins/<key>/     plugins for this machine's torches, of an installed devproxy; criu/ its CRIU
    logs/<job>.log     what a job has said; .log.1 the part before it, where that was long
    records/           what is remembered of a job by its name (records.py)
    store/             the store when none is named
    restores/          what a detached agent is to restore
    ghosts.lock        one byte for each file that a restore makes in place of a deleted one

A job runs from a copy, so that devproxy can be rebuilt or upgraded under a running job and between dump and restore:
CRIU restores a mapped file by its path, and refuses one that has changed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import time

from devproxy import config, folders, proctree
from devproxy.errors import Refused

BUILD_KEEP_S = 24 * 3600.0
COPY_TRIES = 10
COPY_AGAIN_S = 0.5
# Of the library folder, what a job needs: everything but these.
NOT_COPIED = (".pyi",)
PYLIB = "pylib"
# One of these is in each state folder that was used.
OWN = frozenset({"builds", "criu", "headers", "logs", "plugins", "records", "store"})
# Names under which a build keeps a file of the library folder. PyTorch looks for the text "libcudart.so" among its
# process's mappings, and where it finds that, loads all of NVIDIA's libraries beside it by their paths (torch 2.13,
# _load_global_deps); a mapping is listed by the file's own name.
KEPT_AS = {"libcudart.so.12": "libcudart-12.so", "libcudart.so.13": "libcudart-13.so"}
# Other names of files in a build. Links, not copies: the loader takes a second file for a second library.
LINKS = {
    # numba-cuda and others open this name first; it is no SONAME, so the preloaded shim does not answer to it.
    "libcuda.so": "libcuda.so.1",
    **KEPT_AS,
}


def state_dir() -> str:
    """The state folder, made at first use. Raises Refused where it is not ours alone or cannot be made."""
    path = os.path.abspath(config.state_dir())
    try:
        _make_ours(path)
    except OSError as error:
        raise Refused(
            f"the state folder {path} cannot be used: {error.strerror}",
            "set DEVPROXY_STATE_DIR to a folder of yours",
        ) from None
    except folders.Unsafe as error:
        raise Refused(
            f"the state folder {error.what}", f"set DEVPROXY_STATE_DIR, or {error.remedy}"
        ) from None
    return path


def _make_ours(path: str) -> None:
    """A folder of ours, closed to others, that no other user can lead elsewhere. Raises OSError and folders.Unsafe."""
    fd = folders.open_folder(path, make=True, mode=0o700)
    try:
        info = os.fstat(fd)
        if info.st_uid != os.getuid():
            raise PermissionError(
                errno.EPERM, f"it belongs to user {info.st_uid}, not to you ({os.getuid()})"
            )
        if info.st_mode & 0o077:
            own = f"/proc/self/fd/{fd}"  # fchmod(2) refuses O_PATH
            # Somebody's home, or /tmp, named by mistake: closed, it would be lost to all who use it. Scripts that install
            # something for devproxy may have made the folder as the umask said.
            there = os.listdir(own)
            if there and (info.st_mode & stat.S_IWOTH or OWN.isdisjoint(there)):
                raise Refused(
                    f"the state folder {path} is open to other users, and something is in it",
                    f"set DEVPROXY_STATE_DIR to an empty folder; if all in it is devproxy's: chmod 700 {path}",
                    object=path,
                )
            os.chmod(own, 0o700)
    finally:
        os.close(fd)


def subfolder(name: str) -> str:
    path = os.path.join(state_dir(), name)
    os.makedirs(path, mode=0o700, exist_ok=True)
    return path


def default_store() -> str:
    return os.path.join(state_dir(), "store")


def log_path(job: str) -> str:
    return os.path.join(subfolder("logs"), f"{job}.log")


def remove_log(job: str) -> None:
    path = log_path(job)
    for name in (path, f"{path}.1"):
        try:
            os.unlink(name)
        except FileNotFoundError:
            pass


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
                elif entry.is_symlink() and name in LINKS:
                    pass  # the folder is a build itself; the copy gets its own
                elif entry.is_file() and not name.endswith(NOT_COPIED):
                    found.append((name, entry.stat()))
    return sorted(found)


def build_files(folder: str) -> list[str]:
    """Names of the files in a build, relative to its folder."""
    return [name for name, _ in _files(folder)]


def ensure_build(lib: str, pylib: str, plugins: str = "") -> str:
    """Copies the library folder, the plugins where they are elsewhere, and the Python part of them; returns the build's id.

    The id is a hash over names, sizes and times, so that nothing is read when the copy is there already.
    Raises Refused where the copy cannot be made, or the files change all the time; nothing half-made stays.
    """
    for _ in range(COPY_TRIES):
        try:
            build_id = _try_build(lib, pylib, plugins or lib)
        except OSError as error:
            raise Refused(
                f"devproxy's own files cannot be kept in {state_dir()}: {error.strerror}",
                "make room there, or set DEVPROXY_STATE_DIR to another folder of yours",
                object=state_dir(),
            ) from None
        if build_id:
            return build_id
        time.sleep(COPY_AGAIN_S)
    raise Refused(f"the files in {lib} change while they are copied", "wait until they are built")


def _try_build(lib: str, pylib: str, plugins: str) -> str:
    """The build's id; empty where somebody replaced a file in the middle: the copy would be a mixture."""
    parts = [(lib, "", _files(lib)), (pylib, PYLIB, _files(pylib))]
    if plugins != lib and os.path.isdir(plugins):
        state_dir()  # they lie there: nobody else may have put them in place
        parts.append((plugins, "", _files(plugins)))
    digest = hashlib.sha256(repr((KEPT_AS, LINKS)).encode())
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
            for name, info in files:
                to = os.path.join(temporary, prefix, KEPT_AS.get(name, name))
                os.makedirs(os.path.dirname(to), mode=0o700, exist_ok=True)
                try:
                    shutil.copy2(os.path.join(source, name), to)
                except FileNotFoundError:
                    return ""
                now = os.stat(os.path.join(source, name))
                if any(
                    (i.st_size, i.st_mtime_ns) != (info.st_size, info.st_mtime_ns)
                    for i in (now, os.stat(to))
                ):
                    return ""
        make_links(temporary)
        try:
            os.rename(temporary, target)
        except OSError:
            if not os.path.isdir(target):  # else somebody else was quicker
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return build_id


def make_links(folder: str) -> None:
    """The other names of a new build's files. Images do not carry them: whoever makes a build's folder makes them."""
    for link, name in LINKS.items():
        if os.path.exists(os.path.join(folder, name)):
            os.symlink(name, os.path.join(folder, link))


def take_over_build(path: str) -> None:
    """Makes the folder above a build that an image brings, which may have been made under another state folder.

    A job finds devproxy's files where they were when it started. Raises Refused where that place is not ours.
    """
    above = os.path.dirname(os.path.dirname(path))
    try:
        _make_ours(above)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    except (OSError, folders.Unsafe) as error:
        why = error.strerror if isinstance(error, OSError) else error.what
        raise Refused(
            f"the job has devproxy's files at {path}, which cannot be made here: {why}",
            f"make {above} usable for you",
        ) from None


def _prune(builds: str) -> None:
    """Copies that no start has used for a day and no living process maps. Images carry their own."""
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
