# SPDX-License-Identifier: Apache-2.0
"""What only root can try of parts that have unit tests of their own: mounts, CRIU, and what is another user's."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from devproxy.checkpoint import criu, criu_image
from devproxy.errors import Refused
from devproxy.node import processes
from tests.integration.needs import missing, require_criu


def test_a_restore_that_does_not_move_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRIU waits for ever for a task that was killed while it was being made (campaign `verb-kills`)."""
    monkeypatch.setattr(criu, "_STALL_S", 0.5)
    program = tmp_path / "criu"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o700)
    (tmp_path / "images").mkdir()
    real = require_criu()
    broken = dataclasses.replace(real, program=str(program))
    with pytest.raises(criu.CriuError, match=r"has not moved for 0\.5 s"):
        broken.restore(
            str(tmp_path / "images"), job_dir=str(tmp_path), mount_at=str(tmp_path / "at")
        )


def test_a_store_that_is_read_only_can_be_read(tmp_path: Path) -> None:
    """Mounted so, in a mount namespace of its own."""
    program = """
import os, subprocess, sys
from devproxy.checkpoint.store import Store
from devproxy.checkpoint.errors import StoreError
store = Store.open(sys.argv[1])
data = os.urandom(1 << 20)
with store.writer("a") as w:
    chunks = w.put_bytes(data, kind="host")
    w.commit({"job_id": "job", "data": {"chunks": chunks}})
subprocess.run(["mount", "-o", "remount,ro", os.path.dirname(sys.argv[1])], check=True)
store = Store.open(sys.argv[1])
assert [(i.id, i.whole) for i in store.images()] == [("a", True)]
assert store.fetch_bytes(store.read_manifest("a")["data"]["chunks"]) == data
try:
    store.take_epoch("job")
except StoreError as error:
    print(error)
"""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = f'mount -t tmpfs none {mount} && exec {sys.executable} -c "$0" {mount}/s'
    prefix = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-mr"]
    done = subprocess.run(
        [*prefix, "sh", "-c", command, program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "take the epoch failed" in done.stdout and "Read-only" in done.stdout


@pytest.fixture
def replaced(tmp_path: Path) -> Iterator[Path]:
    """A folder of the job's, in one that everybody may use, is another user's link to one that is root's alone."""
    if os.geteuid() != 0:
        missing("root", "the test gives a link to another user")
    with tempfile.TemporaryDirectory(prefix="devproxy-ghosts-", dir="/tmp") as base:
        Path(base).chmod(0o1777)
        (Path(base) / "jobs").symlink_to(tmp_path)
        os.chown(Path(base) / "jobs", 4242, 4242, follow_symlinks=False)
        yield Path(base) / "jobs"


def test_no_ghost_is_removed_behind_another_users_link(
    replaced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "deleted.cr.1.ghost"
    (tmp_path / name).touch()
    monkeypatch.setenv("DEVPROXY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(criu_image, "ghosts", lambda images: [str(replaced / name)])
    with processes.no_ghosts("a", "/job"):
        pass
    assert (tmp_path / name).exists()


@pytest.mark.parametrize("is_folder", [True, False])
def test_no_mount_point_is_made_behind_another_users_link(
    replaced: Path, tmp_path: Path, is_folder: bool
) -> None:
    with pytest.raises(Refused, match="belongs to user 4242"):
        processes._make_mount_points({"mounts": [[str(replaced / "a" / "b"), is_folder]]})
    assert not list(tmp_path.iterdir())
