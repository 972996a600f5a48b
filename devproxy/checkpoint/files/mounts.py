# SPDX-License-Identifier: Apache-2.0
"""Which file systems are shared with other hosts."""

from __future__ import annotations

import os
from collections.abc import Iterable

from devproxy import procfs

SHARED_FS = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "ceph", "9p", "virtiofs", "gpfs", "beegfs")
    + ("glusterfs", "afs", "ocfs2", "gfs2", "pvfs2")
)


class Mounts:
    """File-system types by path."""

    def __init__(self, mounts: Iterable[procfs.Mount] | None = None) -> None:
        found = procfs.mounts("self") if mounts is None else mounts
        self._types = {mount.point: mount.kind for mount in found}  # the one on top comes last
        self._folders: dict[str, str] = {}

    def type_of(self, path: str) -> str:
        folder = os.path.dirname(path) or "/"
        known = self._folders.get(folder)
        if known is None:
            at = folder
            while at not in self._types and at != "/":
                at = os.path.dirname(at)
            known = self._folders[folder] = self._types.get(at, "")
        return known

    def shared(self, path: str) -> bool:
        kind = self.type_of(path)
        return kind in SHARED_FS or kind.startswith("fuse.")
