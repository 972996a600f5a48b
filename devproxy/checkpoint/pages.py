# SPDX-License-Identifier: Apache-2.0
"""CRIU's images in the store: small images as they are, pages cut by virtual address.

pages-N.img is the present pages of a process back to back, in the order of its pagemap. One page more or less shifts
everything behind it, so chunks at fixed places of the file would find nothing again in the next image. A chunk here is
the present pages inside one aligned window of the address space; put together in order they are the file again.

pagemap-*.img: first pagemap_head {pages_id = 1}, then pagemap_entry {vaddr = 1, compat_nr_pages = 2, in_parent = 3,
flags = 4, nr_pages = 5} (CRIU 4.2, images/pagemap.proto; older writers have only field 2). PE_PRESENT is flag 4 (criu/include/pagemap.h).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Protocol

from devproxy.checkpoint.chunker import KIB, ChunkRef, cut
from devproxy.checkpoint.criu_image import ImageFileError, messages
from devproxy.checkpoint.staged import mapped
from devproxy.checkpoint.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Iterable

PAGE_BYTES = 4096
# Measured on two dumps of a training GPT, 230 MB, 5 s apart. 629 of 56,506 pages had changed: 341 of the heap, 209 of
# other anonymous memory, 37 of libpython's data, 31 of Python's object arenas; in two of three of them at most 8 cache
# lines (reference counts). New in the second with windows of 4, 8, 16, 32 KiB: 2.6, 4.0, 6.2, 10.3 MB. Each chunk
# costs some 10 us of Python, so small windows make the upload, which is after the thaw, and the fetch longer.
WINDOW_BYTES = 16 * KIB
_PE_PARENT, _PE_PRESENT = 1, 4


class Fetcher(Protocol):
    def fetch_file(
        self,
        refs: Iterable[ChunkRef],
        to: str | IO[bytes],
        *,
        name: str = "",
        older: str | None = None,
    ) -> int: ...


@dataclass(frozen=True, slots=True)
class Run:
    """Pages in a row: address and bytes."""

    vaddr: int
    bytes: int


def read_pagemap(path: str) -> tuple[int, list[Run]]:
    """(pages id, the runs that lie in pages-<id>.img, in order). Raises ImageFileError and OSError."""
    pages_id: int | None = None
    runs: list[Run] = []
    for entry in messages(path):
        if pages_id is None:
            pages_id = entry.integer(1)
            continue
        flags = entry.integer(4)
        present = flags & _PE_PRESENT if 4 in entry else not entry.integer(3)
        if not present or flags & _PE_PARENT:
            continue
        pages = entry.integer(5) or entry.integer(2)
        runs.append(Run(entry.integer(1), pages * PAGE_BYTES))
    if pages_id is None:
        raise ImageFileError(path, "it has no head")
    return pages_id, runs


def windows(runs: list[Run], window_bytes: int = WINDOW_BYTES) -> Iterator[int]:
    """Bytes of each chunk of a pages file: what its runs have in one aligned window after the other."""
    current, size = -1, 0
    for run in runs:
        address, left = run.vaddr, run.bytes
        while left:
            window = address // window_bytes
            if window != current and size:
                yield size
                size = 0
            current = window
            part = min(left, (window + 1) * window_bytes - address)
            size += part
            address += part
            left -= part
    if size:
        yield size


def put_pages(
    writer: Writer, images_dir: str, window_bytes: int = WINDOW_BYTES
) -> list[dict[str, Any]]:
    """All files of a CRIU dump: [{"name", "bytes", "chunks"}], by name. Raises StoreError, ImageFileError, OSError.

    A pages file whose size is not what its pagemap says (a pre-dump chain, a later CRIU) is cut by file offset: right,
    only deduplicated less.
    """
    with os.scandir(images_dir) as entries:
        names = sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
    layout: dict[str, list[Run]] = {}
    for name in names:
        if name.startswith("pagemap-") and name.endswith(".img"):
            pages_id, runs = read_pagemap(os.path.join(images_dir, name))
            layout[f"pages-{pages_id}.img"] = runs
    found: list[dict[str, Any]] = []
    for name in names:
        path = os.path.join(images_dir, name)
        size = os.stat(path).st_size
        runs = layout.get(name, [])
        if size and runs and sum(run.bytes for run in runs) == size:
            chunks = _put_windows(writer, path, size, list(windows(runs, window_bytes)))
        else:
            chunks = writer.put_file(path, kind="host")
        found.append({"name": name, "bytes": size, "chunks": chunks})
    return found


def _put_windows(writer: Writer, path: str, size: int, sizes: list[int]) -> list[ChunkRef]:
    def pieces(view: memoryview) -> Iterator[memoryview]:
        start = 0
        for part in sizes:
            yield from cut(view[start : start + part], part)
            start += part

    with open(path, "rb") as file, mapped(file.fileno(), size) as view:
        return writer.put_views(pieces(view), kind="host")


def get_pages(
    store: Fetcher, section: list[dict[str, Any]], images_dir: str, older: str | None = None
) -> None:
    """Writes the files of a dump back. Raises as Store.fetch_file."""
    os.makedirs(images_dir, mode=0o700, exist_ok=True)
    for row in section:
        name = str(row["name"])
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise ImageFileError(name, "its name in the manifest is a path")
        refs = [(str(chunk), int(size)) for chunk, size in row["chunks"]]
        store.fetch_file(refs, os.path.join(images_dir, name), name=f"CRIU's {name}", older=older)
