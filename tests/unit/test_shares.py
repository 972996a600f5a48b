# SPDX-License-Identifier: Apache-2.0
"""Several hosts put their parts of an image side by side: what all of them hold goes into the store once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from devproxy.checkpoint.store import Store

MIB = 1 << 20
ALIKE, OWN = 6 * MIB, 3 * MIB


@pytest.mark.parametrize("parts", [2, 3])
def test_each_block_is_stored_by_one_part(tmp_path: Path, parts: int) -> None:
    alike = random.Random(0).randbytes(ALIKE)
    contents = [alike + random.Random(n + 1).randbytes(OWN) + bytes(MIB) for n in range(parts)]
    files = [tmp_path / f"gpu0-{n}.dev" for n in range(parts)]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    ranges = [(0, ALIKE), (ALIKE, OWN), (ALIKE + OWN, MIB)]
    url = str(tmp_path / "store")
    first = Store.open(url).writer("j-20260101-000000-0000")
    writers = [first, *(Store.open(url).writer(first.image_id) for _ in range(parts - 1))]
    for n, writer in enumerate(writers):
        writer.put_share(str(files[n]), ranges, n, parts)
        writer.flush()
    stored = [writer.sizes()["stored"] for writer in writers]
    # A hash names each part as often as the others.
    assert max(stored[:-1]) < ALIKE + OWN and sum(stored) < (ALIKE + parts * OWN) * 1.01
    for writer in writers:
        writer.look_again()
    found = [
        writer.put_ranges(str(file), ranges) for writer, file in zip(writers, files, strict=True)
    ]
    for writer in writers:
        writer.flush()
    counts = [writer.sizes()["per_kind"]["device"] for writer in writers]
    assert sum(count["new"] for count in counts) == ALIKE + parts * OWN
    for count in counts:
        assert (
            count["new"] + count["deduplicated"] + count["zero"] == count["raw"] == len(contents[0])
        )
    first.look_again()
    body = {"job": "j", "job_id": "0123456789abcdef", "epoch": 1, "sequence": 1}
    first.commit(body | {"device": [row.as_json() for rows in found for row in rows]})
    for writer in writers[1:]:
        writer.abort()
    store = Store.open(url)
    assert store.verify(first.image_id, full=True).whole
    for rows, content in zip(found, contents, strict=True):
        store.fetch_file([ref for row in rows for ref in row.chunks], str(tmp_path / "back"))
        assert (tmp_path / "back").read_bytes() == content
