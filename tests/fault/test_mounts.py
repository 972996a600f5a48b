# SPDX-License-Identifier: Apache-2.0
"""The host's mounts come and go, as container runtimes make them do all the time; the job's namespace has copies of them,
which vanish with the folder below them. A checkpoint or restore that meets one in that moment is done again."""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fault.scene import Scene
from tests.fault.test_named import restore_words

MOUNTS = 30


@pytest.fixture
def mounts() -> Iterator[list[Path]]:
    """File systems that nobody uses."""
    with tempfile.TemporaryDirectory(prefix="dp-mounts-", dir="/tmp") as home:
        made = [Path(home) / str(n) for n in range(MOUNTS)]
        for path in made:
            path.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "none", str(path)], check=True)
        yield made
        for path in made:
            take_away(path)


def take_away(path: Path) -> None:
    """As often as it takes: umount may lose against somebody who copies a namespace."""
    deadline = time.monotonic() + 20
    while path.exists():
        done = subprocess.run(["umount", "-l", str(path)], check=False, capture_output=True, text=True)  # fmt: skip
        try:
            path.rmdir()
        except OSError:
            assert time.monotonic() < deadline, done.stderr
            time.sleep(0.02)


def when(seen: Callable[[], object], do: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        deadline = time.monotonic() + 30
        while not seen() and time.monotonic() < deadline:
            time.sleep(0.0002)
        do()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_mounts_vanish_below_a_dump_and_are_gone_at_the_restore(
    scene: Scene, mounts: list[Path]
) -> None:
    scene.start()
    left = list(mounts)
    log = scene.folder / "staging" / "criu-dump.log"
    for _ in range(5):  # not each of them meets CRIU in the middle
        gone = [left.pop() for _ in range(MOUNTS // 6)]
        thread = when(log.exists, lambda gone=gone: [take_away(path) for path in gone])
        scene.ctl("checkpoint", "j")
        thread.join()
        # A folder may be there again: another test's job has a copy of the mount, and its restore makes an empty place.
        assert not any(path.is_mount() for path in gone)
    scene.check_nothing_left()
    for path in left:
        take_away(path)
    scene.kill_everything()
    scene.ctl(*restore_words(scene, scene.latest()))
    scene.check_goes_on()


def test_mounts_vanish_below_a_restore(scene: Scene, mounts: list[Path]) -> None:
    scene.start()
    scene.ctl("checkpoint", "j")
    scene.kill_everything()
    for path in mounts[:-3]:
        take_away(path)
    log = scene.folder / "staging" / "criu-restore.log"
    thread = when(log.exists, lambda: [take_away(path) for path in mounts[-3:]])
    scene.ctl(*restore_words(scene, scene.latest()))
    thread.join()
    scene.check_goes_on()
