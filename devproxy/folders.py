# SPDX-License-Identifier: Apache-2.0
"""Folders opened part by part, so that no other user leads us to a place of theirs.

A path is safe when nobody but root, us and who called us by sudo can change where it leads: each folder on it belongs to
one of them, and others may not write there (in a sticky folder they may: they can replace only what is theirs). A link is
followed where it stands in such a folder and belongs to one of them: /var/run, or a home that lies elsewhere.

Everything goes by descriptors of folders that were looked at: to exchange a folder behind us changes nothing. So
openat2(2)'s RESOLVE_NO_SYMLINKS would add nothing: it says nothing about owners.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence

from devproxy import config
from devproxy.errors import Refused

_LINKS_MAX = 40  # as the kernel, path_resolution(7)
_PART = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC

UNSAFE_REMEDY = (
    "take that right from them (chown, chmod go-w),"
    f" or name the folders whose users you trust: {config.TRUST_FOLDERS}=DIR:DIR"
)


class Unsafe(Refused):
    """Another user can change where a path leads. folder: which one on it."""

    def __init__(self, path: str, folder: str, why: str) -> None:
        super().__init__(
            f"{path} is not safe: {folder} {why}, who could lead devproxy elsewhere",
            UNSAFE_REMEDY,
            object=folder,
        )
        self.folder = folder


def open_folder(path: str, *, make: bool = False, mode: int = 0o777) -> int:
    """An O_PATH descriptor of the folder, for dir_fd=; missing ones are made, with that mode, where make says so.

    Raises Unsafe, FileNotFoundError, NotADirectoryError and other OSErrors.
    """
    trusted = _trusted()
    trusted_folders = config.trust_folders()
    todo = _parts(path)
    links = 0
    at, here = os.open("/", _PART), "/"

    def safe(name: str, fd: int) -> None:
        if not _is_in(name, trusted_folders) and (why := _who_else(fd, trusted)):
            raise Unsafe(path, name, why)

    try:
        safe(here, at)
        while todo:
            part = todo.pop()
            found = _open_part(part, at, make, mode)
            try:
                kind = os.fstat(found).st_mode
                name = os.path.dirname(here) if part == ".." else os.path.join(here, part)
                if stat.S_ISLNK(kind):
                    links += 1
                    if links > _LINKS_MAX:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
                    safe(name, found)
                    target = os.readlink("", dir_fd=found)
                    todo += _parts(target)
                    if not target.startswith("/"):
                        continue
                    os.close(found)
                    found, name = os.open("/", _PART), "/"
                elif not stat.S_ISDIR(kind):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name)
                else:
                    safe(name, found)
                at, found, here = found, at, name
            finally:
                os.close(found)
    except BaseException:
        os.close(at)
        raise
    return at


def check(path: str) -> None:
    """Raises Unsafe for a folder that others may lead elsewhere. One that is not there will be in one that is safe."""
    try:
        os.close(open_folder(path))
    except (FileNotFoundError, NotADirectoryError):
        pass


def check_owner(path: str, fd: int) -> None:
    """Raises Unsafe for a folder, open, of a user who is not trusted. Who else may write in it is not asked."""
    uid = os.fstat(fd).st_uid
    if uid not in _trusted() and not _is_in(path, config.trust_folders()):
        raise Unsafe(path, path, f"belongs to user {uid}")


def names_in(folder: int) -> list[str]:
    """What is in a folder that is open with O_PATH."""
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def _trusted() -> set[int]:
    return {0, os.geteuid(), os.stat("/").st_uid, *config.sudo_users()}


def _is_in(path: str, those: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in those)


def _parts(path: str) -> list[str]:
    """The last one first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _open_part(part: str, at: int, make: bool, mode: int) -> int:
    try:
        return os.open(part, _PART, dir_fd=at)
    except FileNotFoundError:
        if not make:
            raise
    try:
        os.mkdir(part, mode, dir_fd=at)
    except FileExistsError:
        pass
    return os.open(part, _PART, dir_fd=at)


def _who_else(fd: int, trusted: set[int]) -> str:
    """Who else may change a folder or link, in words; "" when nobody may."""
    info = os.fstat(fd)
    if info.st_uid not in trusted:
        return f"belongs to user {info.st_uid}"
    if stat.S_ISLNK(info.st_mode) or info.st_mode & stat.S_ISVTX:
        return ""
    if info.st_mode & 0o002:
        return "may be changed by everybody"
    # Where there is an ACL, these bits are its mask: any user may be in it.
    if info.st_mode & 0o020 and (_has_acl(fd) or not _is_private(info.st_gid, info.st_uid)):
        return f"may be changed by group {info.st_gid}"
    return ""


def _has_acl(fd: int) -> bool:
    try:
        return bool(os.getxattr(f"/proc/self/fd/{fd}", "system.posix_acl_access"))
    except OSError:
        return False


def _is_private(gid: int, uid: int) -> bool:
    """A group of the user's own name without other members, as most distributions make one for each user."""
    import grp  # rarely needed
    import pwd

    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(uid).pw_name
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}
