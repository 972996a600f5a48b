# SPDX-License-Identifier: Apache-2.0
"""The cases of points.py that are like no other; the campaign `fault-points` of scripts/soak.py runs the rest, too."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from devproxy import fault
from tests.checkpoint.world import ROOT
from tests.fault import points
from tests.fault.scene import Scene


@pytest.mark.every
def test_the_table_is_complete() -> None:
    assert set(points.POINTS) == set(fault.FAULTS) | set(points.SERVER_POINTS)


@pytest.mark.every
def test_the_campaign_runs_all() -> None:
    spec = importlib.util.spec_from_file_location("soak", ROOT / "scripts" / "soak.py")
    assert spec is not None and spec.loader is not None
    soak = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = soak  # its dataclass looks itself up there
    spec.loader.exec_module(soak)
    (campaign,) = (c for c in soak.CAMPAIGNS if c.name == "fault-points")
    assert campaign.runs == len(points.CASES)


@pytest.mark.every
def test_each_point_kills_here() -> None:
    """And those that may fail without harm, or whose error has lines of its own, fail here."""
    assert {case.point for case in points.IN_CI if case.action == "kill"} == set(points.POINTS)


@pytest.mark.parametrize("case", points.IN_CI, ids=str)
def test_point(shared_scene: Scene, case: points.Case) -> None:
    points.run(shared_scene, case)
