# SPDX-License-Identifier: Apache-2.0
"""What is remembered of jobs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from devproxy import records, state


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVPROXY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("DEVPROXY_SHM_DIR", str(tmp_path))


def test_a_name_keeps_the_stores_of_all_its_jobs() -> None:
    assert records.read("j") == {}
    records.begin("j", "one", ["python", "train.py"], 5.0)
    assert records.stores() == []
    records.has_image("j", "j-1", "file:///a")
    records.end("j", 7)
    assert records.read("j")["exit_code"] == 7
    records.begin("j", "two", ["true"], 6.0)
    facts = records.read("j")
    assert (facts["job_id"], facts["image"], facts["stores"]) == ("two", "", ["file:///a"])
    assert "exit_code" not in facts
    records.has_image("j", "j-2", "s3://b")
    records.has_image("j", "j-3", "file:///a")
    assert records.read("j")["stores"] == ["file:///a", "s3://b"]
    records.has_image("k", "k-1", "file:///c")
    assert records.stores() == ["file:///a", "s3://b", "file:///c"]


def test_what_cannot_be_written_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DEVPROXY_STATE_DIR", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(state, "state_dir", lambda: str(tmp_path / "file" / "below"))
    records.begin("j", "one", ["true"], 5.0)
    records.has_image("j", "j-1", "file:///a")
    assert records.stores() == []


def an_hour_passes() -> None:
    stamp = os.path.join(state.subfolder("records"), records.PRUNED)
    before = os.stat(stamp).st_mtime - records.PRUNE_EVERY_S - 1
    os.utime(stamp, (before, before))


def test_old_jobs_without_images_are_forgotten() -> None:
    for job in ("old", "kept", "young"):
        records.begin(job, "id", ["true"], 5.0)
        Path(state.log_path(job)).write_text("said")
    records.has_image("kept", "kept-1", "file:///a")
    long_ago = time.time() - records.KEEP_S - 60
    for job in ("old", "kept"):
        os.utime(records._path(job), (long_ago, long_ago))
    an_hour_passes()
    records.begin("j", "id", ["true"], 5.0)
    assert records.names() == ["j", "kept", "young"]
    assert [os.path.exists(state.log_path(job)) for job in ("old", "kept", "young")] == [
        False,
        True,
        True,
    ]


def test_starts_look_for_old_jobs_once_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of thousands of records costs a start nothing."""
    looked: list[str] = []
    monkeypatch.setattr(records, "_forget_old", looked.append)
    for job in ("a", "b", "c"):
        records.begin(job, "id", ["true"], 5.0)
    assert len(looked) == 1
    an_hour_passes()
    records.begin("d", "id", ["true"], 5.0)
    assert len(looked) == 2
    stamp = os.path.join(state.subfolder("records"), records.PRUNED)
    tomorrow = time.time() + 24 * 3600  # the clock was wrong, and has been set right
    os.utime(stamp, (tomorrow, tomorrow))
    records.begin("e", "id", ["true"], 5.0)
    records.begin("f", "id", ["true"], 5.0)
    assert len(looked) == 3
    assert records.names() == ["a", "b", "c", "d", "e", "f"]
