# SPDX-License-Identifier: Apache-2.0
"""The devproxy files that a job has mapped: an image brings its own, so a restore needs no devproxy of the same version."""

from __future__ import annotations

import os
import shutil

from devproxy import state
from devproxy.checkpoint import image
from devproxy.checkpoint.store import Store


def ensure(store: Store, whole: image.Image) -> str:
    """Their folder; fetched where it is not there any more. Raises StoreError or OSError."""
    build = whole.build
    path: str = build.get("path") or state.build_path(build["id"])
    state.take_over_build(path)
    if os.path.isdir(path):
        os.utime(path)  # so that no start takes it for unused
        return path
    temporary = f"{path}.{os.getpid()}"
    try:
        for name, entry in build["files"].items():
            to = os.path.join(temporary, name)
            os.makedirs(os.path.dirname(to), mode=0o700, exist_ok=True)
            store.fetch_file(entry["chunks"], to, name=f"image {whole.id}: build file {name}")
            os.chmod(to, entry["mode"])
            os.utime(to, ns=(entry["mtime_ns"], entry["mtime_ns"]))
        state.make_links(temporary)
        try:
            os.rename(temporary, path)
        except OSError:
            if not os.path.isdir(path):  # else another restore was quicker
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path
