# SPDX-License-Identifier: Apache-2.0
"""A restore touches no file of the job before everything that can be known to fail was tried."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from devproxy.errors import DevproxyError
from devproxy.node import restore, staging

STEPS = (
    "_check",
    "_fetch_device",
    "_start_servers",
    "_check_open_files",
    "_put_files",
    "_restore_processes",
)


@pytest.mark.parametrize("failing", STEPS)
def test_no_file_is_touched_before_servers_run(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    done: list[str] = []

    def step(name: str) -> None:
        done.append(name)
        if name == failing:
            raise DevproxyError("it fails")

    for name in STEPS:
        monkeypatch.setattr(restore.TreeRestore, name, lambda self, name=name: step(name))
    for name in ("_drop_files", "_keep_log", "_end_servers", "_kill_processes"):
        monkeypatch.setattr(restore.TreeRestore, name, lambda self: None)
    monkeypatch.setattr(staging, "remove", lambda *folders: None)
    one = object.__new__(restore.TreeRestore)
    one.__dict__.update(_begun=[], _tree=SimpleNamespace(gpus=[0]), _before=[0], _staging="")
    with pytest.raises(DevproxyError, match="it fails"):
        one.prepare()
    assert done == list(STEPS[: STEPS.index(failing) + 1])
    assert ("_put_files" in done) == (failing in STEPS[4:])
