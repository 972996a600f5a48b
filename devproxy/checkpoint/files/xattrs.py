# SPDX-License-Identifier: Apache-2.0
"""Extended attributes of files, POSIX ACLs and file capabilities among them (xattr(7)).

`at` is a descriptor, or /proc/self/fd/N of one that is open with O_PATH.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Callable
from contextlib import suppress

# A security module's labels and the kernel's own are the machine's, not the job's. csrc/hostlib/note.c has the same list.
_ACL = "system.posix_acl_access"
_KEPT = ("user.", _ACL, "system.posix_acl_default", "security.capability")
_GROUP_OBJ = 4  # <linux/posix_acl.h>


def read(at: int | str) -> dict[str, str] | None:
    """Those that are kept: name and value, in hex. None where that cannot be told."""
    try:
        names = [name for name in os.listxattr(at) if name.startswith(_KEPT)]
        return {name: os.getxattr(at, name).hex() for name in names}
    except OSError as error:
        return {} if error.errno == errno.EOPNOTSUPP else None


def dress(at: int | str, mode: int, wanted: dict[str, str] | None) -> list[str]:
    """Gives it the mode and these attributes, and no others of the kept kinds; what could not be done, and why.

    wanted: None for an image that does not say; what is there stays. Nobody but the owner gets a right for a moment that
    they had neither before nor get in the end: with an ACL the group's bits of the mode are its mask, which is more than
    the group may do.
    """
    before = stat.S_IMODE(os.stat(at).st_mode)
    failed: dict[str, str] = {}
    if wanted is not None and read(at) != wanted:
        # A user. attribute needs the right to write. The owner may take that at any time.
        meanwhile = before & mode | 0o600
        if before != meanwhile:
            with suppress(PermissionError):  # not ours: what cannot be set is said
                os.chmod(at, meanwhile)
        failed = _write(at, wanted)
    if wanted and _ACL in failed:
        mode &= ~0o070 | _group_rights(wanted[_ACL]) << 3
    if stat.S_IMODE(os.stat(at).st_mode) != mode:
        os.chmod(at, mode)
    return [f"{name}: {why}" for name, why in failed.items()]


def _write(at: int | str, wanted: dict[str, str]) -> dict[str, str]:
    failed: dict[str, str] = {}
    there = read(at) or {}

    def attempt(name: str, change: Callable[[], None]) -> None:
        try:
            change()
        except (OSError, ValueError) as error:
            if getattr(error, "errno", 0) != errno.ENODATA:  # somebody else has removed it
                failed[name] = getattr(error, "strerror", None) or str(error)

    for name in there.keys() - wanted.keys():
        attempt(name, lambda n=name: os.removexattr(at, n))  # type: ignore[misc]
    # The ACL last: it may take the right to write.
    for name, value in sorted(wanted.items(), key=lambda item: item[0] == _ACL):
        if there.get(name) != value and name.startswith(_KEPT):
            attempt(name, lambda n=name, v=value: os.setxattr(at, n, bytes.fromhex(v)))  # type: ignore[misc]
    return failed


def _group_rights(acl: str) -> int:
    """What the owning group itself may do; nothing where the ACL cannot be read."""
    try:
        entries = struct.iter_unpack("<HHI", bytes.fromhex(acl)[4:])
        return next((rights & 7 for tag, rights, _ in entries if tag == _GROUP_OBJ), 0)
    except (ValueError, struct.error):
        return 0
