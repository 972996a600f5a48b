# SPDX-License-Identifier: Apache-2.0
"""What a tree answers while the ranks of its job come to a point where it may be cut (control/agreement.py, barrier.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Answer:
    """One tree's, about the reports that it was given."""

    settled: bool
    reports: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""  # a communicator that cannot go on
    debt: str = ""  # who owes what


@dataclass(frozen=True)
class Met:
    """One tree's, about a barrier in band: how many of its clients are members, and how many have acquired it."""

    members: int
    acquired: int
    reports: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Still:
    """One tree's, that withholds communication: is nothing about to begin?"""

    still: bool
    reports: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Marked:
    """One tree's servers: is all said that was to be said; each server's number, to whom it has a connection, and whose
    mark has come to it (hal.h, Device::mark_transport)."""

    still: bool
    servers: list[dict[str, Any]] = field(default_factory=list)
