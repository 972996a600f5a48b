# SPDX-License-Identifier: Apache-2.0
"""Cuts that take back what has not begun (hal/pending.h), as often as they go, while ranks do all there is."""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
from pathlib import Path

import pytest

from devproxy.proxy.control_channel import ControlChannel
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


def test_a_device_that_takes_nothing_over() -> None:
    """The recording device wraps the software GPU, and must not pass on to it what waits behind a collective. Its
    successor refuses by name, and the server that dumped goes on."""
    with Trees("00") as trees:
        process = trees.popen("stages.py", 1)
        trees.wait_attached()
        channels = [ControlChannel(str(trees.folder(0)), gpu) for gpu in range(2)]
        while not any(report["counts"] for report in channels[0].ranks()):
            pass
        while not all(channel.withhold()["still"] for channel in channels):
            pass
        into = Path(tempfile.mkdtemp(dir=trees.root))
        for channel in channels:
            channel.cut()
        channels[0].dump(str(into))
        other = ("--other-gpu", "--device", "record")
        refused = trees.start(0, 0, "--restore", str(into), "--ledger", f"{into}/ledger", *other)
        with os.fdopen(refused.ready) as ready:
            said = ready.read()
        assert "the image has collectives that had not begun, which this device cannot" in said
        assert refused.process.wait(10) != 0
        for channel in channels:
            channel.resume()
            channel.close()
        (trees.notes / "go0").touch()
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, f"{out}\n{err}\n{trees.logs()}"
