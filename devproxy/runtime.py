# SPDX-License-Identifier: Apache-2.0
"""The runtime folder /dev/shm/devproxy-<uid>/ and the job folders in it.

    devproxy-<uid>/        0700, ours, not a link
      .lock                flock: held while job folders are made or removed
      .job/                empty; each job sees its own folder here
      .devproxyd.lock      flock: held for life by devproxyd
      .devproxyd.sock      where it serves
      ledger-*             device memory accounting, shared by the servers of one GPU; goes with the last job
      <job>/               0700
        lock               flock: held for life by devproxy-run and, by inheritance, by each of its servers
        job.json           what runs here
        gpu<K>.{sock,log}  gpu<K>-<n>.{seg,pinned}  slots      the server's

A folder whose `lock` can be taken belongs to nobody that lives, and is removed by whoever starts or ends next.
Locks: .lock < <job>/lock, .devproxyd.lock; the second is only ever tried, never waited for, while the first is held.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from devproxy import config, procfs
from devproxy.errors import Refused

JOB_NAME_LIMIT = 64
LOCK_S = 10.0  # for a lock whose holders do nothing in it that takes long
SOCKET_PATH_LIMIT = 107  # unix(7): sun_path, less its NUL
JOURNAL = "files.journal"  # csrc/hostlib
MOUNT_NAME = ".job"  # where every job sees its own folder, by a mount of its own
DAEMON_LOCK = ".devproxyd.lock"
DAEMON_SOCKET = ".devproxyd.sock"
NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


# What is saved of a dead job's folder before it is removed (node/burial.py, set by whoever sweeps).
before_removal: Callable[[str], None] | None = None


class JobFolder:
    """A job's folder and the descriptor whose lock says that the job lives."""

    def __init__(self, name: str, path: str, lock_fd: int) -> None:
        self.name = name
        self.path = path
        self.lock_fd = lock_fd


def root_path() -> str:
    return os.path.join(config.shm_dir(), f"devproxy-{os.getuid()}")


def check_job_name(name: str) -> str:
    """Raises Refused for a name that is no plain file name of at most 64 of A-Z a-z 0-9 . _ -"""
    if not name or len(name) > JOB_NAME_LIMIT or not NAME_CHARACTERS.issuperset(name):
        raise Refused(
            f"{name!r} is not a job name", "use up to 64 letters, digits, '.', '_' and '-'"
        )
    if not name[0].isalnum() or name.startswith("ledger-"):
        raise Refused(
            f"{name!r} is not a job name", "begin with a letter or digit, and not with 'ledger-'"
        )
    return name


def default_job_name(command: str) -> str:
    """The command's base name and our process id: unique among the living."""
    stem = "".join(c for c in os.path.basename(command) if c in NAME_CHARACTERS).lstrip("._-")
    return f"{stem[:40] or 'job'}-{os.getpid()}"


def check_owned_folder(path: str) -> None:
    """Raises Refused unless path is a folder of ours, not a link, closed to others (which we mend if it is ours)."""
    info = os.lstat(path)
    if stat.S_ISLNK(info.st_mode) or not stat.S_ISDIR(info.st_mode):
        raise Refused(f"{path} is not a folder", f"somebody put it there; remove it: rm {path}")
    if info.st_uid != os.getuid():
        raise Refused(
            f"{path} belongs to user {info.st_uid}, not to you ({os.getuid()})",
            "ask that user or root to remove it",
        )
    if stat.S_IMODE(info.st_mode) != 0o700:
        os.chmod(path, 0o700)


@contextmanager
def _root_locked(create: bool) -> Iterator[str | None]:
    """Holds the root's lock; yields its path, or None when it is not there and create is False."""
    root = root_path()
    while True:
        try:
            if create:
                try:
                    os.mkdir(root, 0o700)
                except FileExistsError:
                    pass
            check_owned_folder(root)
            path = os.path.join(root, ".lock")
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            if not create:
                yield None
                return
            if not os.path.isdir(config.shm_dir()):
                raise Refused(
                    f"{config.shm_dir()} is not there", "mount a tmpfs there first"
                ) from None
            continue  # the last job of another run removed the root in between
        except OSError as error:
            raise Refused(
                f"{root} cannot be used: {error.strerror}", f"remove it: rm -r {root}"
            ) from None
        try:
            _lock(fd, path)
            if _is_at(fd, path):
                yield root
                return
        finally:
            os.close(fd)


class Locked(Refused):
    """Somebody holds a lock that everybody gives back at once, and does not."""


def _lock(fd: int, path: str) -> None:
    """Raises Locked, by name of its holder, after LOCK_S."""
    deadline = time.monotonic() + LOCK_S
    pause = 0.0005
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        if time.monotonic() > deadline:
            holder = procfs.lock_holder(fd)
            status = procfs.status(holder) if holder else None
            name = f" ({status.name})" if status else ""
            who = f"process {holder}{name}" if holder else "somebody"
            remedy = f"kill -CONT {holder}" if status and status.state in "Tt" else "end it"
            raise Locked(
                f"{path} is locked by {who} for more than {LOCK_S:g} s",
                f"is it stopped? {remedy}",
                object=path,
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def _is_at(fd: int, path: str) -> bool:
    """Is the open file still the one at that path? Otherwise its lock protects nothing."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


def _job_names(root: str) -> list[str]:
    try:
        entries = sorted(os.scandir(root), key=lambda e: e.name)
    except FileNotFoundError:
        return []
    return [e.name for e in entries if e.is_dir(follow_symlinks=False) and e.name[0] != "."]


def is_alive(path: str) -> bool:
    """Does devproxy-run, or a server of this job folder, still live?"""
    try:
        fd = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    finally:
        os.close(fd)
    return False


def _remove_tree(path: str) -> None:
    """Removes a job folder: flat but for what a crashed job may have put there. Follows no link.

    A verb that the job's end has overtaken may be removing its staging folder at the same time.
    """
    try:
        found = os.scandir(path)
    except FileNotFoundError:
        return
    with found as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _remove_tree(entry.path)
            else:
                _unlink(entry.path)
    try:
        os.rmdir(path)
    except OSError:
        pass


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _sweep(root: str) -> list[str]:
    """Removes the folders of the dead, and the ledgers when nobody lives. Returns the living. Needs the root's lock."""
    living = []
    for name in _job_names(root):
        path = os.path.join(root, name)
        if is_alive(path):
            living.append(name)
        else:
            if before_removal:
                before_removal(path)
            _remove_tree(path)
    if not living:
        with os.scandir(root) as entries:
            for entry in entries:
                if entry.name.startswith("ledger-"):
                    _unlink(entry.path)
    return living


def create_job(name: str) -> JobFolder:
    """Makes the job's folder and takes its lock. Raises Refused where a living job has that name."""
    check_job_name(name)
    longest = os.path.join(root_path(), name, "gpu63.sock")
    if len(os.fsencode(longest)) > SOCKET_PATH_LIMIT:
        raise Refused(
            f"{longest} is too long for a socket", "give a shorter --name or DEVPROXY_SHM_DIR"
        )
    with _root_locked(create=True) as root:
        assert root is not None
        if name in _sweep(root):
            raise Refused(
                f"job {name!r} is already running", "give another --name (see: devproxy ps)"
            )
        path = os.path.join(root, name)
        os.mkdir(path, 0o700)
        lock_fd = os.open(
            os.path.join(path, "lock"), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        _lock(
            lock_fd, os.path.join(path, "lock")
        )  # at most the moment of a `devproxy ps` that looks
        return JobFolder(name, path, lock_fd)


def remove_job(job: JobFolder) -> None:
    """Gives the lock back and removes the folder; the root too when this was the last job.

    A server that still lives keeps the folder: then the next sweep removes it.
    """
    _unlink(os.path.join(job.path, JOURNAL))  # an end of its own: whoever needed it has read it
    os.close(job.lock_fd)
    sweep()


def sweep() -> None:
    """Removes what dead runs left behind. Safe at any time, from any process of the user.

    Where somebody holds the root's lock for long, all stays for the next sweep.
    """
    try:
        with _root_locked(create=False) as root:
            if root is not None:
                _sweep_all(root)
    except Locked:
        pass


def _sweep_all(root: str) -> None:
    if _sweep(root):
        return
    _sweep_daemon(root)
    _unlink(os.path.join(root, ".lock"))
    try:
        os.rmdir(os.path.join(root, MOUNT_NAME))
    except OSError:
        pass  # it was never made
    try:
        os.rmdir(root)
    except OSError:
        pass  # a daemon, or something of the user's, is in there


def daemon_socket() -> str:
    return os.path.join(root_path(), DAEMON_SOCKET)


def take_daemon_lock() -> int | None:
    """The descriptor that makes the caller this user's devproxyd, or None: another one lives. Makes the root."""
    with _root_locked(create=True) as root:
        assert root is not None
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(os.path.join(root, DAEMON_LOCK), flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd


def give_daemon_lock_back(fd: int) -> None:
    """The daemon is over: removes its files, and the root with them when no job lives."""
    with _root_locked(create=False) as root:
        if root is not None:
            _unlink(os.path.join(root, DAEMON_SOCKET))
            _unlink(os.path.join(root, DAEMON_LOCK))
    os.close(fd)
    sweep()


def _sweep_daemon(root: str) -> None:
    """Removes what a killed daemon left. Needs the root's lock, so no daemon is starting meanwhile."""
    path = os.path.join(root, DAEMON_LOCK)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _unlink(os.path.join(root, DAEMON_SOCKET))
        _unlink(path)
    except BlockingIOError:
        pass
    finally:
        os.close(fd)


def wait_until_dead(path: str) -> None:
    """Blocks until devproxy-run and all servers of the job folder are gone."""
    try:
        fd = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.close(fd)


def ledger_path(job: JobFolder, device: str, gpu: int) -> str:
    """The file in which all servers of that GPU account the device memory they gave away."""
    return os.path.join(os.path.dirname(job.path), f"ledger-{device}-gpu{gpu}")


def list_jobs() -> list[tuple[str, str, bool]]:
    """(name, folder, alive) of every job folder of this user. Raises Refused where the root is not ours."""
    root = root_path()
    if not os.path.lexists(root):
        return []
    check_owned_folder(root)
    return [
        (name, os.path.join(root, name), is_alive(os.path.join(root, name)))
        for name in _job_names(root)
    ]
