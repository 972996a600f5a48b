# SPDX-License-Identifier: Apache-2.0
"""Where a restore puts files back: folders by descriptors, so that a folder that is exchanged meanwhile leads nowhere.

devproxy.folders says which folders are safe.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType

from devproxy import folders
from devproxy.errors import Refused

_OPEN_MAX = 64
_NAMED = 5  # how many unsafe folders an error names


class Places:
    """A name is used beside the descriptor of its folder: os.unlink(name, dir_fd=folder). Close with `with`."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}

    def __enter__(self) -> Places:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.forget()

    def of(self, path: str, *, make: bool = False) -> tuple[int, str]:
        """(the folder's descriptor, the name in it). Those that were asked for last stay open.

        Raises as folders.open_folder.
        """
        folder, name = os.path.split(path)
        fd = self._open.pop(folder, None)
        if fd is None:
            fd = folders.open_folder(folder, make=make)
        self._open[folder] = fd
        if len(self._open) > _OPEN_MAX:
            os.close(self._open.pop(next(iter(self._open))))
        return fd, name

    def lstat(self, path: str) -> os.stat_result | None:
        try:
            fd, name = self.of(path)
            return os.lstat(name, dir_fd=fd)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def rename(self, old: str, new: str) -> None:
        """Of a folder: what was open below it has another path now."""
        self.forget()
        source, name = self.of(old)
        target, other = self.of(new, make=True)
        os.rename(name, other, src_dir_fd=source, dst_dir_fd=target)
        self.forget()

    def forget(self) -> None:
        """A folder was removed or renamed: each is looked up anew."""
        while self._open:
            os.close(self._open.popitem()[1])


def unsafe(paths: Iterable[str]) -> list[folders.Unsafe]:
    """What is wrong with the folders of these files, each folder once."""
    found: dict[str, folders.Unsafe] = {}
    for folder in sorted({os.path.dirname(path) for path in paths}):
        try:
            folders.check(folder)
        except folders.Unsafe as error:
            found.setdefault(error.folder, error)
    return list(found.values())


def refuse_unsafe(paths: Iterable[str]) -> None:
    """Raises Refused, which names the folders."""
    if found := unsafe(paths):
        raise Refused(
            "; ".join(error.what for error in found[:_NAMED]),
            folders.UNSAFE_REMEDY,
            object=found[0].folder,
        )
