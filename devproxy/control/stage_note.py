# SPDX-License-Identifier: Apache-2.0
"""Which stage a verb has reached, in a file: known even where kill -9 ended the process that ran it.

News on their way to a caller are lost with the process. Written in place, so whoever opened the file before its
folder was removed can still read it.
"""

from __future__ import annotations

import io
import os

NAME = "stage"  # in the job's folder
MEET = "meet"  # this node waits for the others, and nothing of the job runs here
_BYTES = 64


class StageNote:
    """The writer's end. Without a path, or where the file cannot be made, it notes nothing."""

    def __init__(self, path: str | None) -> None:
        self._fd = -1
        if path:
            try:
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError:
                pass  # a full disk must not be in the way of a verb

    def write(self, stage: str) -> None:
        if self._fd >= 0:
            try:
                os.pwrite(self._fd, stage.encode()[:_BYTES].ljust(_BYTES), 0)
            except OSError:
                pass

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def note_that_it_waits(job_dir: str, waits: bool) -> None:
    """A job without an agent yet: does it wait for its other nodes? An agent writes its own notes over this one."""
    note = StageNote(os.path.join(job_dir, NAME))
    note.write(MEET if waits else "")
    note.close()


class NoteReader:
    """The reader's end: opened while the file is there, read when its writer is dead."""

    def __init__(self, path: str) -> None:
        self._file: io.FileIO | None = None  # closed with us
        try:
            self._file = io.FileIO(path)
        except OSError:
            pass

    def read(self) -> str:
        if self._file is None:
            return ""
        try:
            return os.pread(self._file.fileno(), _BYTES, 0).decode(errors="replace").strip()
        except OSError:
            return ""
