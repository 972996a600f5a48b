# SPDX-License-Identifier: Apache-2.0
"""The journal: a line for each file that a process of the job was about to change (csrc/hostlib/note.c)."""

from __future__ import annotations

import os
from typing import IO

from devproxy import runtime
from devproxy.checkpoint.files.known import Known
from devproxy.errors import DevproxyError

ROTATE_BYTES = 8 << 20


def _unescape(raw: bytes) -> str:
    if b"\\" in raw:
        parts = raw.split(b"\\x")
        raw = parts[0] + b"".join(bytes([int(p[:2], 16)]) + p[2:] for p in parts[1:])
    return os.fsdecode(raw)


class Journal:
    """The journal in one job folder. What it says goes into `known`, and how far it has been read."""

    def __init__(self, job_dir: str, known: Known) -> None:
        self.path = os.path.join(job_dir, runtime.JOURNAL)
        self.known = known

    def poll(self) -> None:
        """Reads on. Raises DevproxyError where it cannot."""
        try:
            with open(self.path, "rb") as file:
                ino = os.fstat(file.fileno()).st_ino
                if ino != self.known.journal_ino and self.known.journal_ino:
                    self._finish_rotated(f"{self.path}.1")
                if (
                    ino != self.known.journal_ino
                    or os.fstat(file.fileno()).st_size < self.known.journal_offset
                ):
                    self.known.journal_ino, self.known.journal_offset = ino, 0
                self.known.journal_offset = self._read(file, self.known.journal_offset)
        except FileNotFoundError:
            self._finish_rotated(f"{self.path}.1")  # nothing was changed since
        except OSError as e:
            raise DevproxyError(
                f"the journal {self.path} of changed files cannot be read: {e.strerror}",
                "the job goes on, but no image can be taken of it",
                object=self.path,
            ) from e

    def _finish_rotated(self, path: str) -> None:
        """A process that had opened the journal before it was renamed may have written to it since."""
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_ino == self.known.journal_ino:
                    self.known.journal_offset = self._read(file, self.known.journal_offset)
        except FileNotFoundError:
            pass

    def _read(self, file: IO[bytes], offset: int) -> int:
        """Whole lines from `offset` on; where to go on. A line that is not understood was cut by a full tmpfs."""
        file.seek(offset)
        data = file.read()
        whole = data.rfind(b"\n") + 1
        for line in data[:whole].split(b"\n")[:-1]:
            words = line.split(b" ", 3)
            if len(words) != 4 or words[0] not in (b"C", b"W", b"M", b"R"):
                continue
            if words[0] == b"R":
                old, tab, new = words[3].partition(b"\t")
                if tab:
                    self.known.directory_renamed(_unescape(old), _unescape(new))
                continue
            name = _unescape(words[3])
            track = self.known.add(name, "C" if words[0] == b"C" else "W")
            track.mapped |= words[0] == b"M"
        return offset + whole

    def rotate(self) -> None:
        """A writer that opened the journal just before may write to the old file: the next poll reads its end too."""
        if self.known.journal_offset < ROTATE_BYTES:
            return
        # poll() finds another inode then, reads the rest of this one, and goes on with the new one.
        os.replace(self.path, f"{self.path}.1")

    def last_write_ns(self) -> int | None:
        """None: there is no journal."""
        try:
            return os.stat(self.path).st_mtime_ns
        except FileNotFoundError:
            return None

    def begin_anew(self) -> None:
        """Removes what is there, and forgets how far it was read: the job that starts now has written none of it."""
        for path in (self.path, f"{self.path}.1"):
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass
        self.known.journal_ino = self.known.journal_offset = 0
