# SPDX-License-Identifier: Apache-2.0
"""Extended attributes of files, POSIX ACLs and file capabilities among them (xattr(7))."""

from __future__ import annotations

import os

# A security module's labels and the kernel's own are the machine's, not the job's.
_KEPT = ("user.", "system.posix_acl_access", "security.capability")


def read(fd: int) -> dict[str, str]:
    """Those that are kept: name and value, in hex. Empty where the file system has none."""
    try:
        names = [name for name in os.listxattr(fd) if name.startswith(_KEPT)]
        return {name: os.getxattr(fd, name).hex() for name in names}
    except OSError:
        return {}


def write(fd: int, wanted: dict[str, str]) -> list[str]:
    """Sets those that differ; what could not be set, and why."""
    there = read(fd) if wanted else {}
    failed = []
    for name, value in wanted.items():
        if there.get(name) != value and name.startswith(_KEPT):
            try:
                os.setxattr(fd, name, bytes.fromhex(value))
            except (OSError, ValueError) as error:
                failed.append(f"{name}: {getattr(error, 'strerror', None) or error}")
    return failed
