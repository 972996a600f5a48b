# SPDX-License-Identifier: Apache-2.0
"""Where the output of a restored job goes: into files that the user names, into those that took it before, or to us.

A job that was started with `> out 2> err` goes on in those files, where they still are what they were at the cut: what it
wrote after that it will write again. Between image and restore anybody may have changed the folders, so a file counts as
the same only where nobody else could have led us to another one, and where it has the same bytes before the cut.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import Any

from devproxy import config, folders
from devproxy.errors import Refused
from devproxy.node.stdio import digest_before

STREAMS = {"stdout.fifo": (1,), "stderr.fifo": (2,), "tty.out": (1, 2)}
NAMES = {1: "stdout", 2: "stderr"}
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC


@dataclass
class Outputs:
    """fds: for our standard streams. cut: (descriptor, its file, how many bytes it had at the cut)."""

    fds: list[int]
    files: dict[int, str]
    cut: list[tuple[int, str, int]]
    said: list[str]

    def cut_back(self) -> None:
        """Right before the job writes again."""
        for fd, path, size in self.cut:
            now = os.fstat(fd).st_size
            if now > size:
                os.ftruncate(fd, size)
                self.said.append(
                    f"{path}: cut back from {now} to {size} bytes, where it was when the image was taken"
                )

    def facts(self, log: str) -> dict[str, Any]:
        """log: of a job whose output goes to us, "" where we are in the foreground."""
        found: dict[str, Any] = {}
        if log or self.files:
            found = {NAMES[n]: self.files.get(n, log) for n in NAMES if self.files.get(n, log)}
        return found | ({"outputs": self.said} if self.said else {})


def choose(
    stdio: dict[str, Any], output: str | None, for_stderr: str | None, *, again: bool
) -> Outputs:
    """stdio: what the image says of the streams. again: the job is itself, and nobody else has these files.

    Raises Refused for a file that was named and cannot be opened.
    """
    found = Outputs([0, 1, 2], {}, [], [])
    streams = {stream["name"]: stream for stream in stdio["outputs"]}
    if for_stderr and "stdout.fifo" in streams and stdio["modes"][2] == "fifo:stdout.fifo":
        raise Refused(
            f"--output-stderr {for_stderr}: the job's stdout and stderr are one stream (2>&1)",
            "name one file for both: --output",
        )
    if for_stderr and "tty" in stdio["modes"][1:]:
        raise Refused(
            f"--output-stderr {for_stderr}: the job writes to a terminal, which is one stream",
            "name one file for both: --output",
        )
    named = {1: output, 2: for_stderr or output}
    opened: dict[str, int] = {}
    for number, path in named.items():
        if path:
            fd = (
                opened[path]
                if path in opened
                else _named(path, "" if path == output else "-stderr")
            )
            opened[path] = found.fds[number] = fd
            found.files[number] = path
    for name in filter(streams.get, STREAMS):
        file = streams[name].get("file")
        if not file:
            continue
        numbers = STREAMS[name]
        chosen = named[numbers[0]]
        if chosen:
            if os.path.realpath(file["path"]) == os.path.realpath(chosen):
                found.cut.append((opened[chosen], chosen, file["bytes"]))
        elif again and not _is_ours(file["path"]):
            _go_on(found, numbers, file)
    return found


def _named(path: str, option: str) -> int:
    try:
        return os.open(path, _FLAGS | os.O_CREAT, 0o666)
    except OSError as error:
        raise Refused(
            f"--output{option} {path}: {error.strerror}", "name a file that you may write"
        ) from None


def _is_ours(path: str) -> bool:
    """The log of a job that was restored before: it is where our own output goes."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(1))
    except OSError:
        return False


def _go_on(found: Outputs, numbers: tuple[int, ...], file: dict[str, Any]) -> None:
    path, size = file["path"], file["bytes"]
    names = " and ".join(NAMES[n] for n in numbers)
    try:
        fd = _open_again(path)
    except (Refused, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        found.said.append(f"its {names} does not go on in {path}: {why}")
        return
    if why := _other_than(fd, file):
        os.close(fd)
        found.said.append(f"its {names} does not go on in {path}: {why}; --output names another")
        return
    for number in numbers:
        found.fds[number] = fd
        found.files[number] = path
    found.cut.append((fd, path, size))


def _open_again(path: str) -> int:
    folder = folders.open_folder(os.path.dirname(path))
    try:
        # NONBLOCK: a FIFO may stand there now.
        flags = _FLAGS | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(os.path.basename(path), flags, dir_fd=folder)
    finally:
        os.close(folder)


def _other_than(fd: int, file: dict[str, Any]) -> str:
    """Why it is not the file that took the output, to be cut back now; "" where it is."""
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        return "it is no regular file"
    if info.st_uid not in {0, os.geteuid(), *config.sudo_users()}:
        return f"it belongs to user {info.st_uid}"
    if info.st_nlink != 1:
        return "it has another name, which may be somebody else's"
    before = digest_before(fd, file["bytes"])
    if "before" not in file or before != file["before"]:
        return "it no longer begins with what the job had written at the cut"
    return ""
