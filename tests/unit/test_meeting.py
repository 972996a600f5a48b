# SPDX-License-Identifier: Apache-2.0
"""Node 0 waits for the others: whoever looks at it learns for whom."""

from __future__ import annotations

import threading

import pytest

from devproxy.control import meeting
from devproxy.errors import Refused


@pytest.fixture
def waiting() -> meeting.Meeting:
    """Of three nodes, where no other one has come. It listens nowhere."""
    made = meeting.Meeting.__new__(meeting.Meeting)
    made._own = meeting.Hello("j", 0, 3, "soft", "abi")
    made._meet, made._mu, made._ready = "here:1", threading.Lock(), {}
    return made


def test_nodes_that_have_not_come_are_named(
    waiting: meeting.Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(meeting, "say", said.append)
    monkeypatch.setattr(meeting, "NAME_S", 0.01)
    with pytest.raises(Refused, match=r"node 1, 2 of job j did not come within 0\.2 s"):
        waiting.wait(0.2, lambda: None)
    assert said == ["node 1, 2 of job j has not come to here:1 yet; see what it says there"]
