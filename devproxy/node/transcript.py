# SPDX-License-Identifier: Apache-2.0
"""A copy of what a job says, for `devproxy logs`, wherever its output goes.

One file, and the part before it as FILE.1 where it gets long. A copy that cannot be written is given up; the job and its
real output do not notice.
"""

from __future__ import annotations

import os
import threading

LIMIT_BYTES = 64 << 20


class Transcript:
    """Written by the relays of stdout and stderr, each in a thread of its own. Locks: _lock, a leaf."""

    def __init__(self, path: str, *, fresh: bool) -> None:
        """fresh: of what an earlier job of that name said, nothing stays."""
        self._path = path
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._opened_bytes = 0
        try:
            if fresh:
                for old in (path, f"{path}.1"):
                    if os.path.exists(old):
                        os.unlink(old)
            self._open()
            self._opened_bytes = self._size()
        except OSError:
            pass

    def place(self) -> dict[str, int] | None:
        """Where the next byte goes, for an image."""
        with self._lock:
            if self._fd is None:
                return None
            return {"inode": os.fstat(self._fd).st_ino, "bytes": self._size()}

    def cut_back(self, place: dict[str, int]) -> None:
        """The job goes on from there: what it said since, it says again. What a restore has said meanwhile stays."""
        with self._lock:
            try:
                if self._fd is None or place["inode"] != os.fstat(self._fd).st_ino:
                    return  # another part by now, or another job's
                with open(self._path, "r+b") as file:
                    file.seek(self._opened_bytes)
                    meanwhile = file.read()
                    file.truncate(min(place["bytes"], self._opened_bytes))
                os.write(self._fd, meanwhile)
            except (OSError, KeyError):
                pass

    def _size(self) -> int:
        assert self._fd is not None
        return os.fstat(self._fd).st_size

    def is_file(self, fd: int) -> bool:
        """Does the output go to this very file?"""
        if self._fd is None:
            return False
        mine, other = os.fstat(self._fd), os.fstat(fd)
        return (mine.st_dev, mine.st_ino) == (other.st_dev, other.st_ino)

    def write(self, piece: bytes) -> None:
        with self._lock:
            if self._fd is None:
                return
            try:
                while piece:
                    piece = piece[os.write(self._fd, piece) :]
                if self._size() >= LIMIT_BYTES:
                    os.rename(self._path, f"{self._path}.1")
                    os.close(self._fd)
                    self._open()
            except OSError:
                self._fd = None

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, 0o600)
