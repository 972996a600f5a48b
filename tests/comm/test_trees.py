"""Communicators whose ranks are in several process trees, each with a job folder and servers of its own (trees.py)."""

from __future__ import annotations

import random

import pytest

from tests import sweeps
from tests.comm.trees import Trees

PARTS = 40
# The tree of each rank.
PLACES = ("01", "001", "012", "010", "0001", "0011", "0101", "0120")


def a_part(*of: object) -> int:
    return random.Random(f"{sweeps.seed()} {of}").randrange(PARTS)


@pytest.mark.parametrize("places", PLACES)
def test_collectives(places: str) -> None:
    """A part of all cases, another one after each commit. All of them are the sweep below."""
    with Trees(places) as trees:
        output = trees.run("collectives.py", a_part(places), PARTS)
    assert int(output.split()[0]) > 100


@pytest.mark.parametrize("places", ["01", "0120"])
def test_collectives_in_chaos(places: str) -> None:
    with Trees(places, chaos=a_part("chaos", places)) as trees:
        trees.run("collectives.py", a_part(places), 2 * PARTS)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("part", range(0, PARTS, 8))
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("chaos", [None, 3])
def test_every_collective(places: str, part: int, chaos: int | None) -> None:
    with Trees(places, chaos) as trees:
        for one in range(part, part + 8):
            trees.run("collectives.py", one, PARTS)


@pytest.mark.parametrize(
    ("places", "gpus", "chaos"),
    [
        pytest.param("0011", 0, None, id="2 and 2"),
        pytest.param("0101", 1, None, id="2 and 2 on a GPU each"),
        pytest.param("0001", 0, 5, id="3 and 1 in chaos"),
        pytest.param("012", 0, 11, id="three trees in chaos"),
    ],
)
def test_scenarios(places: str, gpus: int, chaos: int | None) -> None:
    with Trees(places, chaos, gpus=gpus) as trees:
        trees.run("scenarios.py")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("seed", range(200, 210))
def test_scenarios_in_chaos(seed: int) -> None:
    with Trees(random.Random(seed).choice(PLACES), seed) as trees:
        trees.run("scenarios.py")
