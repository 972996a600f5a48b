# SPDX-License-Identifier: Apache-2.0
"""The state folder, and what another user of the host puts in its way. Needs root."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from devproxy import config, state
from devproxy.errors import Refused
from devproxy.node import burial
from tests.integration.needs import missing


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that anybody may use, with a link of user 4242 in it where the state folder should be."""
    if os.geteuid() != 0:
        missing("root", "the test gives files to another user")
    with tempfile.TemporaryDirectory(prefix="devproxy-state-", dir="/tmp") as base:
        folder = Path(base)
        folder.chmod(0o1777)
        (folder / "victim").mkdir(mode=0o755)
        (folder / "state").symlink_to("victim")
        os.chown(folder / "state", 4242, 4242, follow_symlinks=False)
        monkeypatch.setenv("DEVPROXY_STATE_DIR", str(folder / "state"))
        yield folder


def test_a_link_of_another_user_is_no_state_folder(others: Path) -> None:
    with pytest.raises(Refused, match="state belongs to user 4242"):
        state.state_dir()
    assert (others / "victim").stat().st_mode & 0o777 == 0o755


def test_a_dead_jobs_staging_is_not_looked_for_behind_a_link(others: Path, tmp_path: Path) -> None:
    of_another = others / "victim" / "staging" / "abc"
    of_another.mkdir(parents=True)
    (tmp_path / "job.json").write_text('{"job_id": "abc"}')
    burial.bury(str(tmp_path))
    assert of_another.is_dir()


def test_each_folder_on_the_way_is_looked_at(others: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("victim/own", "state/own"):
        monkeypatch.setenv("DEVPROXY_STATE_DIR", str(others / name))
        os.chown(others / "victim", 4242, 4242)
        with pytest.raises(Refused, match="belongs to user 4242"):
            state.state_dir()
        assert not (others / "victim" / "own").exists()


def test_a_folder_of_another_user_is_refused(others: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(others / "victim", 4242, 4242)
    monkeypatch.setenv(config.TRUST_FOLDERS, str(others))
    monkeypatch.setenv("DEVPROXY_STATE_DIR", str(others / "victim"))
    with pytest.raises(Refused, match="it belongs to user 4242, not to you"):
        state.state_dir()


def test_an_own_state_folder_is_closed_to_others(others: Path) -> None:
    os.chown(others / "state", 0, 0, follow_symlinks=False)  # a link of root's own is followed
    assert state.state_dir() == str(others / "state")
    assert (others / "victim").stat().st_mode & 0o777 == 0o700


def test_an_open_folder_with_something_in_it_stays_as_it_is(others: Path) -> None:
    """Somebody's home, or /tmp: that with what root's devproxy has put there."""
    os.chown(others / "state", 0, 0, follow_symlinks=False)
    victim = others / "victim"
    for mode, name in ((0o755, "theirs"), (0o1777, "logs")):
        (victim / name).write_text("")
        victim.chmod(mode)
        with pytest.raises(Refused, match="state is open to other users, and something is in it"):
            state.state_dir()
        assert victim.stat().st_mode & 0o7777 == mode
