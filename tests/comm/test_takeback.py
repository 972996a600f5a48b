"""Cuts that take back what has not begun (hal/pending.h), as often as they go, while ranks do all there is."""

from __future__ import annotations

import random
import subprocess

import pytest

from tests import sweeps
from tests.comm.trees import Trees

PARTS = 10


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("program", "places", "chaos", "gpus"),
    [
        ("collectives.py", "0000", None, 0),
        ("collectives.py", "000", 3, 2),
        ("scenarios.py", "000", None, 0),
        ("scenarios.py", "0000", 5, 2),
        ("collectives.py", "0101", None, 0),
        ("collectives.py", "010", 7, 0),
        ("scenarios.py", "0011", None, 0),
        ("scenarios.py", "0120", 9, 0),
    ],
)
def test_cut_in_the_middle(program: str, places: str, chaos: int | None, gpus: int) -> None:
    """Some servers are replaced, others go on, each time others."""
    dice = random.Random(f"{sweeps.seed()} {program} {places}")
    with Trees(places, chaos=chaos, gpus=gpus) as trees:
        arguments = (dice.randrange(PARTS), PARTS) if program == "collectives.py" else ()
        process = trees.popen(program, *arguments)
        cuts = 0
        try:
            trees.wait_attached()
            while process.poll() is None and cuts < 200:
                all_servers = [(s.tree, s.gpu) for s in trees.servers]
                some = dice.sample(all_servers, dice.randrange(len(all_servers) + 1))
                trees.cut(some if dice.random() < 0.6 else [])
                cuts += 1
            out, err = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it stands still after {cuts} cuts: {trees.logs()}") from None
        finally:
            process.kill()
        assert process.returncode == 0, f"{out[-2000:]}\n{err[-4000:]}\n{trees.logs()}"
        assert out.splitlines()[-1] == "PASS", out
        assert cuts > 5
        assert trees.moves > 3
