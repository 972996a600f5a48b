# SPDX-License-Identifier: Apache-2.0
"""One file at the cut, and what putting files back did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Two changes within one tick of the kernel's clock show the same time (4 ms at HZ=250); a file as young as this when it
# was copied is copied again next time.
YOUNG_NS = 50_000_000


@dataclass(slots=True)
class FileEntry:
    """A file, as a manifest lists it. The coordinator stores what lies at `staged` and fills `refs`."""

    path: str
    # present | directory | symlink | absent; listed only: too-large | shared-fs | special. "mark" is no file: `size`
    # is the number of directory renames before the cut.
    kind: str
    first: str  # C: the job made it; W: it was there before the job touched it; ?: not known
    dev: int = 0
    ino: int = 0
    size: int = 0  # bytes
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    taken_ns: int = 0  # wall clock of the stat
    nlink: int = 0  # hard links
    mapped: bool = False  # was mapped shared and writable: its time stamps do not show every change
    target: str = ""  # of a symbolic link
    link: str = ""  # another entry's path, whose inode this is
    why: str = ""  # of a listed one
    staged: str = ""  # copy in the staging folder, to be stored
    refs: list[Any] = field(default_factory=list)
    # The extended attributes of the kinds that are kept: name and value, in hex. None: not known, as in older images.
    xattrs: dict[str, str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """For the manifest, without `staged`; `refs` as they are."""
        found = {k: getattr(self, k) for k in self.__slots__ if k != "staged" and getattr(self, k)}
        # None at all is not the same as not known.
        return found if self.xattrs is None else found | {"xattrs": self.xattrs}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> FileEntry:
        """Fields of later versions are left out. Raises KeyError without path, kind or first."""
        known = {k: v for k, v in data.items() if k in cls.__slots__}
        return cls(known.pop("path", ""), known.pop("kind"), known.pop("first", "?"), **known)

    @property
    def listed_only(self) -> bool:
        return self.kind in ("too-large", "shared-fs", "special")


@dataclass(slots=True)
class PutBack:
    """What put_back did, by path."""

    restored: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # names under which somebody else's versions are
    replaced: list[str] = field(default_factory=list)  # the same in the state folder: unsure
    unchanged: int = 0
    not_rolled_back: list[str] = field(default_factory=list)


def unchanged(old: FileEntry, new: FileEntry) -> bool:
    """True when the content stored for `old` is that of `new`."""
    if old.kind != "present" or new.mapped or old.mapped:
        return False
    same = (old.dev, old.ino, old.size, old.mtime_ns, old.ctime_ns) == (
        new.dev,
        new.ino,
        new.size,
        new.mtime_ns,
        new.ctime_ns,
    )
    return same and old.taken_ns - max(old.mtime_ns, old.ctime_ns) > YOUNG_NS
