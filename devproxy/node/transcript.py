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
        try:
            if fresh:
                for old in (path, f"{path}.1"):
                    if os.path.exists(old):
                        os.unlink(old)
            self._open()
        except OSError:
            pass

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
                if os.fstat(self._fd).st_size >= LIMIT_BYTES:
                    os.rename(self._path, f"{self._path}.1")
                    os.close(self._fd)
                    self._open()
            except OSError:
                self._fd = None

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, 0o600)
