# SPDX-License-Identifier: Apache-2.0
"""Which place an address of a store names."""

from __future__ import annotations

import os

from devproxy.checkpoint.backend import Backend
from devproxy.checkpoint.folder_backend import LocalBackend
from devproxy.checkpoint.object_backend import FsspecBackend


def open_backend(url: str) -> Backend:
    """A plain path or file:// is a folder; everything else goes through fsspec."""
    if url.startswith("file://"):
        return LocalBackend(os.path.abspath(url.removeprefix("file://")))
    if "://" not in url:
        return LocalBackend(os.path.abspath(os.path.expanduser(url)))
    return FsspecBackend(url)


def try_to_write(url: str) -> None:
    """Makes the store where there is none, writes an object and removes it. Raises StoreError or Refused."""
    backend = open_backend(url)
    backend.prepare()
    name = f"uploads/{os.urandom(8).hex()}.try"  # gc looks at its .json alone
    backend.write(name, b"", stage="try")
    backend.remove(name)
