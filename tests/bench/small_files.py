# SPDX-License-Identifier: Apache-2.0
"""What many small files of a job cost: how long they keep it frozen, and how long a restore takes to put them back.

    python -m tests.bench.small_files [FILES [BYTES]]

Without a job: the freeze's part is FilesTracker.snapshot, the restore's is FilesTracker.put_back from a store in a folder.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from devproxy.checkpoint.files.records import FileEntry
from devproxy.checkpoint.files.tracker import FilesTracker
from devproxy.checkpoint.store import Store
from tests.bench.table import Row

PER_FOLDER = 1000
CHANGED_BETWEEN = 10  # between the second look and the freeze
FILES = 200_000
FREEZE_TARGET_S, RESTORE_TARGET_S = 1.0, 30.0


def measure(files: int, size: int, root: Path) -> dict[str, float]:
    """Seconds: `new` of a freeze in which all are new, `same` when none has changed since the last image, `gone` of a
    restore that finds none of them, `there` of one that finds all as the restore before left them; NAME_cpu: of the processor. Raises AssertionError
    where a byte is wrong."""
    paths = [root / "data" / f"{n // PER_FOLDER}" / f"file-{n}" for n in range(files)]
    for folder in {path.parent for path in paths}:
        folder.mkdir(parents=True)
    job = root / "job"
    job.mkdir()
    tracker = FilesTracker(str(job), str(root / "state"))
    for n, path in enumerate(paths):
        path.write_bytes(content(n, size))
        tracker.mention(str(path), "C")
    time.sleep(0.1)
    tracker.note_state()
    seconds: dict[str, float] = {}

    processor = [0.0]

    def started() -> float:
        processor[0] = time.process_time()
        return time.monotonic()

    def timed(name: str, begin: float) -> None:
        seconds[name] = round(time.monotonic() - begin, 3)
        seconds[f"{name}_cpu"] = round(time.process_time() - processor[0], 3)

    begin = started()
    cut = tracker.prepare(str(root / "one"))
    timed("prepare", begin)
    begin = started()
    entries = tracker.snapshot(str(root / "one"), cut=cut)
    timed("new", begin)
    store = Store.open(f"file://{root}/store")
    writer = store.writer("i1")
    for entry in entries:
        if entry.staged:
            entry.refs = list(writer.put_file(entry.staged, kind="file"))
            entry.staged = ""
    writer.flush()
    tracker.note_state()
    cut = tracker.prepare(str(root / "two"), previous=entries)
    for n in range(min(files, CHANGED_BETWEEN)):
        paths[n].write_bytes(content(n + 1, size))
    begin = started()
    second = tracker.snapshot(str(root / "two"), cut=cut)
    timed("same", begin)
    if size:
        assert sum(bool(entry.staged) for entry in second) == min(files, CHANGED_BETWEEN)
    for path in paths:
        path.unlink()

    def fetch_one(entry: FileEntry, fd: int) -> None:
        store.fetch_file(entry.refs, fd, name=entry.path)

    def fetch_many(wanted: Sequence[tuple[FileEntry, int]]) -> None:
        store.fetch_files((entry.refs, fd, entry.path) for entry, fd in wanted)

    for name in ("gone", "there"):
        begin = started()
        tracker.put_back(entries, fetch_one, print, image_time=time.time(), fetch_many=fetch_many)
        timed(name, begin)
        for n, path in enumerate(paths):
            assert path.read_bytes() == content(n, size), path
    return seconds


def content(n: int, size: int) -> bytes:
    return b"%0*d" % (size, n) if size else b""


def small_files(quick: bool) -> list[Row]:
    """The rows of `make bench`. With fewer files the targets are as much smaller."""
    files = FILES // 20 if quick else FILES
    rows = []
    for size in (0, 5):
        with tempfile.TemporaryDirectory() as root:
            seconds = measure(files, size, Path(root))
        for key, what, target in (
            ("same", "freeze", FREEZE_TARGET_S),
            ("gone", "restore", RESTORE_TARGET_S),
        ):
            value = seconds[key]
            row = Row(
                f"{what}, {files} files of {size} B",
                value,
                "s",
                None,
                "",
                value,
                target * files / FILES,
            )
            row.note = (
                f"all new {seconds['new']} s"
                if key == "same"
                else f"all there {seconds['there']} s"
            )
            rows.append(row)
    return rows


def main() -> None:
    given = [int(word) for word in sys.argv[1:3]]
    files, size = given + [FILES, 5][len(given) :]
    with tempfile.TemporaryDirectory() as root:
        print(json.dumps(measure(files, size, Path(root))))


if __name__ == "__main__":
    main()
