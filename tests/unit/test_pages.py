# SPDX-License-Identifier: Apache-2.0
"""CRIU's pages: cut by address, back byte for byte, and a shift of the stream does not lose the deduplication."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devproxy.checkpoint.criu_image import ImageFileError
from devproxy.checkpoint.pages import (
    PAGE_BYTES,
    WINDOW_BYTES,
    Run,
    get_pages,
    put_pages,
    read_pagemap,
    windows,
)
from devproxy.checkpoint.store import Store
from tests.unit.wire import message

PRESENT, PARENT, LAZY = 4, 1, 2


def pagemap(pages_id: int, entries: list[bytes]) -> bytes:
    return struct.pack("<II", 0x54564319, 0x56084025) + message(f1=pages_id) + b"".join(entries)


def dump(folder: Path, memory: dict[int, bytes]) -> None:
    """A process's memory (page address -> page) as CRIU writes it."""
    folder.mkdir(parents=True)
    runs: list[list[int]] = []
    for address in sorted(memory):
        if runs and runs[-1][0] + runs[-1][1] * PAGE_BYTES == address:
            runs[-1][1] += 1
        else:
            runs.append([address, 1])
    entries = [message(f1=vaddr, f2=count, f4=PRESENT, f5=count) for vaddr, count in runs]
    (folder / "pagemap-1.img").write_bytes(pagemap(1, entries))
    (folder / "pages-1.img").write_bytes(b"".join(memory[a] for a in sorted(memory)))
    (folder / "core-1.img").write_bytes(b"core" * 100)
    (folder / "empty.img").write_bytes(b"")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("DEVPROXY_KEY_FILE", str(tmp_path / "key"))
    return Store.open(str(tmp_path / "store"))


def put(store: Store, image: str, folder: Path) -> tuple[list, dict]:
    with store.writer(image) as writer:
        section = put_pages(writer, str(folder))
        sizes = writer.commit({"criu": section}).sizes
    return section, sizes


def test_back_byte_for_byte_and_a_shift_deduplicates(store: Store, tmp_path: Path) -> None:
    noise = random.Random(7)
    memory = {0x7F0000000000 + i * PAGE_BYTES: noise.randbytes(PAGE_BYTES) for i in range(2000)}
    dump(tmp_path / "a", memory)
    section, first = put(store, "a", tmp_path / "a")
    # One page more at the front, one less in the middle: the whole stream shifts.
    memory[0x7F0000000000 - PAGE_BYTES] = noise.randbytes(PAGE_BYTES)
    del memory[0x7F0000000000 + 1000 * PAGE_BYTES]
    dump(tmp_path / "b", memory)
    section, second = put(store, "b", tmp_path / "b")
    assert second["new"] <= 2 * WINDOW_BYTES + 4096 < first["new"] / 50
    get_pages(store, store.read_manifest("b")["criu"], str(tmp_path / "back"))
    for file in (tmp_path / "b").iterdir():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes(), file.name
    assert {row["name"] for row in section} == {f.name for f in (tmp_path / "b").iterdir()}


def test_flags_and_old_entries(tmp_path: Path) -> None:
    path = tmp_path / "pagemap-5.img"
    entries = [
        message(f1=0x1000, f2=1, f4=PRESENT),  # before nr_pages was 64 bits
        message(f1=0x3000, f2=2, f4=PARENT),
        message(f1=0x5000, f2=2, f3=1),  # in_parent, before there were flags
        message(f1=0x7000, f2=2),
        message(f1=0x9000, f2=0, f4=LAZY),
        message(f1=0xB000, f2=0, f4=PRESENT | LAZY, f5=1 << 20),
    ]
    path.write_bytes(pagemap(9, entries))
    mib4 = (1 << 20) * PAGE_BYTES
    assert read_pagemap(str(path)) == (9, [Run(0x1000, 4096), Run(0x7000, 8192), Run(0xB000, mib4)])


def test_a_damaged_pagemap_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pagemap-5.img"
    data = pagemap(1, [message(f1=0x1000, f2=1, f4=PRESENT)])
    for size in (0, 4, 7, 9, 10, 13, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(ImageFileError, match=r"pagemap-5\.img cannot be understood"):
            read_pagemap(str(path))


def test_pages_that_do_not_fit_their_map_are_stored_all_the_same(
    store: Store, tmp_path: Path
) -> None:
    dump(tmp_path / "a", {0x1000: b"x" * PAGE_BYTES})
    (tmp_path / "a" / "pages-1.img").write_bytes(b"y" * 3 * PAGE_BYTES)
    section, _ = put(store, "a", tmp_path / "a")
    get_pages(store, section, str(tmp_path / "back"))
    assert (tmp_path / "back" / "pages-1.img").read_bytes() == b"y" * 3 * PAGE_BYTES


def test_a_name_that_is_a_path_is_refused(store: Store, tmp_path: Path) -> None:
    for name in ("../x", "/x", "", "..", "a/b"):
        with pytest.raises(ImageFileError):
            get_pages(store, [{"name": name, "chunks": []}], str(tmp_path / "o"))


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 70)), max_size=40),
    st.sampled_from([4096, 16384, 65536]),
)
@settings(max_examples=300, deadline=None)
def test_windows_cover_the_stream_and_respect_the_address(gaps: list, window: int) -> None:
    runs, address = [], 0x7000_0000_0000
    for gap, pages in gaps:
        address += gap * PAGE_BYTES
        runs.append(Run(address, pages * PAGE_BYTES))
        address += pages * PAGE_BYTES
    sizes = list(windows(runs, window))
    owners = [(run.vaddr + at) // window for run in runs for at in range(0, run.bytes, PAGE_BYTES)]
    assert sum(sizes) == len(owners) * PAGE_BYTES
    start = 0
    for size in sizes:
        pages = owners[start : start + size // PAGE_BYTES]
        assert len(set(pages)) == 1
        start += len(pages)
    assert len(sizes) == len(set(owners))
