# SPDX-License-Identifier: Apache-2.0
"""`devproxy top`: what it makes of the jobs' own counters."""

from __future__ import annotations

from typing import Any

import pytest

from devproxy.cli import jobs, top
from devproxy.errors import Refused


def job(launches: int, **more: Any) -> dict[str, Any]:
    server = {"totals": {"launches": launches}, "memory": {"used": 1 << 20, "total": 4 << 20}}
    facts: dict[str, Any] = {
        "job": "j", "alive": True, "phase": "running", "device": "soft", "gpus": [0, 1], "steps": 7, "step_s": 0.25,
        "images": 2, "last_image": "j-20261125T002107-1353", "next_checkpoint_unix_s": None, "servers": [server, server],
    }  # fmt: skip
    return facts | more


def test_rates_are_over_the_time_between_two_looks() -> None:
    at = 1795566067.0 + 9
    before, now = top.sample(job(100), 10.0), top.sample(job(350), 12.0)
    facts = top.row(job(350, next_checkpoint_unix_s=at + 3.21), before, now, at)
    assert facts["launches_per_s"] == 250.0  # of both servers
    assert facts["memory_used_bytes"] == 2 << 20
    assert (facts["last_image_age_s"], facts["next_image_s"]) == (9.0, 3.2)
    assert top.cells(facts) == ["j", "running", "0,1 soft", "2.0 MiB", "250", "0.250 s", "7", "9 s ago", "in 3 s"]  # fmt: skip


def test_what_is_not_known_is_not_guessed() -> None:
    fresh = job(5, last_image="", step_s=0.0, next_checkpoint_unix_s=50.0)
    before, now = top.sample(job(100), 10.0), top.sample(fresh, 12.0)
    facts = top.row(fresh, before, now, 100.0)
    assert facts["launches_per_s"] is None  # other servers count for it now
    assert (facts["last_image_age_s"], facts["step_s"], facts["next_image_s"]) == (None, None, 0.0)
    lost = job(5, servers=[{"gpu": 0, "lost": "it does not answer"}])
    assert top.row(lost, None, top.sample(lost, 1.0), 100.0)["state"] == "server lost"


def test_scripts_get_one_look(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from types import SimpleNamespace

    monkeypatch.setattr(jobs, "all_jobs", lambda: [job(5)])
    given = {"once": False, "json": False, "interval": 0.2}
    with pytest.raises(Refused, match="on a terminal: give --once"):
        top.top(SimpleNamespace(**given))  # type: ignore[arg-type]
    with pytest.raises(Refused, match="out of range"):
        top.top(SimpleNamespace(**given | {"interval": 0.0}))  # type: ignore[arg-type]
    assert top.top(SimpleNamespace(**given | {"once": True})) == 0  # type: ignore[arg-type]
    assert "LAUNCHES/S" in capsys.readouterr().out
