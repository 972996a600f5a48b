# SPDX-License-Identifier: Apache-2.0
"""What files held before the job's first change: copies by the library, `<state>/jobs/<job>.undo/<hash of the path>`.

`<hash>.x` beside one has the file's extended attributes and ACLs (csrc/hostlib/note.c); without any there is none.
"""

from __future__ import annotations

import os
import shutil
import stat
import struct
from collections.abc import Callable

from devproxy.checkpoint.files.known import Track

LINK = "files.undo"  # in the job folder; csrc/hostlib
_CAPABILITY = "security.capability"


def path_hash(path: str) -> str:
    """FNV-1a of 64 bits, as csrc/hostlib/note.c names its undo copies."""
    value = 0xCBF29CE484222325
    for byte in os.fsencode(path):
        value = (value ^ byte) * 0x100000001B3 & 0xFFFF_FFFF_FFFF_FFFF
    return f"{value:016x}"


class Undo:
    """The folder of the copies. A marker beside a copy, `<hash>.m`, tells the library that none is wanted any more."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def copy_of(self, path: str) -> str:
        """Where the copy lies, if there is one."""
        return os.path.join(self.folder, path_hash(path))

    def attributes_of(self, path: str, report: Callable[[str], None]) -> dict[str, str]:
        """Of the copy of that path, as in FileEntry. Raises OSError and ValueError."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(f"{self.copy_of(path)}.x", flags)
        except FileNotFoundError:
            return {}
        with open(fd, "rb") as file:
            st = os.fstat(fd)
            if not stat.S_ISREG(st.st_mode):
                raise ValueError("it is not a regular file")
            found = _attributes(file.read())
        # Only root may give one: another user's word is not enough for root, and the kernel refuses it to others.
        if _CAPABILITY in found and st.st_uid != 0 and os.geteuid() == 0:
            del found[_CAPABILITY]
            report(
                f"{path} comes back without the file capabilities that it had: user {st.st_uid} has written them down, "
                "and may not give any; set them again with setcap"
            )
        return found

    def exists(self) -> bool:
        return os.path.isdir(self.folder)

    def mark(self, path: str, track: Track) -> None:
        """Tells the library that no undo copy of this name is wanted any more."""
        if track.marked:
            return
        track.marked = True
        name = self.copy_of(path)
        try:
            os.close(os.open(f"{name}.m", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError:
            pass  # then it copies once in vain
        if track.first == "C":
            self.drop(path, marker=False)

    def drop(self, path: str, *, marker: bool) -> None:
        name = self.copy_of(path)
        for victim in (name, f"{name}.x", *([f"{name}.m"] if marker else [])):
            try:
                os.unlink(victim)
            except IsADirectoryError:
                os.rmdir(victim)
            except OSError:
                pass

    def open(self, job_dir: str) -> None:
        """From now on the library keeps what a file held before the job's first change."""
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        link = os.path.join(job_dir, LINK)
        try:
            os.symlink(self.folder, link)
        except FileExistsError:
            if os.readlink(link) != self.folder:
                os.unlink(link)
                os.symlink(self.folder, link)

    def keep_only(self, wanted: set[str]) -> None:
        """The copies of these hashes, and no marker."""
        for name in os.listdir(self.folder) if self.exists() else []:
            if name.partition(".")[0] not in wanted or name.endswith(".m"):
                victim = os.path.join(self.folder, name)
                is_folder = os.path.isdir(victim) and not os.path.islink(victim)
                (os.rmdir if is_folder else os.unlink)(victim)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _attributes(data: bytes) -> dict[str, str]:
    """Name, NUL, length, value. Raises ValueError: a power cut leaves an empty file, or half of one."""
    found: dict[str, str] = {}
    at = 0
    while at < len(data) or not found:
        end = data.find(b"\0", at)
        value = end + 1 + struct.calcsize("=I")
        if end < 0 or value > len(data):
            raise ValueError("it is cut off")
        (size,) = struct.unpack_from("=I", data, end + 1)
        if value + size > len(data):
            raise ValueError("it is cut off")
        found[os.fsdecode(data[at:end])] = data[value : value + size].hex()
        at = value + size
    return found
