# SPDX-License-Identifier: Apache-2.0
"""Bit for bit: everything a training run has become, compared tensor by tensor with a run that nobody disturbed.

Parameters, gradients, optimizer and schedule, every loss and gradient norm, the order of samples, and the state of every
random generator; after many cuts, many moves between GPUs, and kills of everything.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.checkpoint.world import SUBJECTS, World, without_pauses
from tests.living import matching

STEPS = 60
RUN = (
    sys.executable,
    str(SUBJECTS / "whole_state.py"),
    *("--steps", str(STEPS), "--seconds-per-step", "0.1"),
)


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(path, tensor, array or plain value) of everything inside."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from leaves(one, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            yield from leaves(one, f"{name}[{number}]")
    else:
        yield name, value


def differences(left: Any, right: Any) -> list[str]:
    """Names of what is not the same, down to the last bit."""
    a, b = dict(leaves(left)), dict(leaves(right))
    found = sorted(set(a) ^ set(b))
    for name in sorted(set(a) & set(b)):
        x, y = a[name], b[name]
        if isinstance(x, torch.Tensor):
            same = (
                isinstance(y, torch.Tensor)
                and (x.dtype, x.shape, x.device.type) == (y.dtype, y.shape, y.device.type)
                and x.cpu().contiguous().flatten().view(torch.uint8).equal(
                    y.cpu().contiguous().flatten().view(torch.uint8)
                )
            )  # fmt: skip
        elif isinstance(x, numpy.ndarray):
            same = (
                isinstance(y, numpy.ndarray) and x.dtype == y.dtype and x.tobytes() == y.tobytes()
            )
        else:
            same = type(x) is type(y) and repr(x) == repr(y)
        if not same:
            found.append(name)
    return found


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The state at the end of a run of which no image is taken, without namespaces even."""
    path = tmp_path_factory.mktemp("bitwise") / "undisturbed.pt"
    world = World()
    try:
        job = world.run(*without_pauses(RUN), "--save", str(path), options=("--plain",))
        assert job.wait(200) == 0, world.tail()
        assert world.steps() == list(range(1, STEPS + 1))
    finally:
        world.close()
    state = load(path)
    named = dict(leaves(state))
    tensors = [v for v in named.values() if isinstance(v, torch.Tensor)]
    assert len(tensors) > 300
    assert len(state["losses"]) == len(state["order"]) == STEPS
    assert state["cuda"], "the run was not on a device"
    return state


def check_same(world: World, undisturbed: dict[str, Any]) -> None:
    assert len(world.nonces()) == 1, world.tail()
    assert world.steps() == list(range(1, STEPS + 1)), world.tail()
    assert differences(load(world.home / "state.pt"), undisturbed) == []


@pytest.mark.every
def test_the_comparison_sees_one_bit(undisturbed: dict[str, Any]) -> None:
    other = {**undisturbed, "losses": [loss.clone() for loss in undisturbed["losses"]]}
    assert differences(other, undisturbed) == []
    other["losses"][7].view(torch.int32).bitwise_xor_(1)
    assert differences(other, undisturbed) == [".losses[7]"]
    assert differences({**undisturbed, "more": 1}, undisturbed) == [".more"]


@pytest.mark.every
def test_many_cuts(world: World, undisturbed: dict[str, Any]) -> None:
    job = world.run(*RUN, options=("--checkpoint-every", "300ms", "--keep", "100"))
    world.committed(4)
    assert world.end_of(job) == 0, world.tail()
    check_same(world, undisturbed)
    images = world.images()
    assert len(images) >= 4, images
    assert all(image["whole"] for image in images)


def test_many_cuts_with_chaos(world: World, undisturbed: dict[str, Any]) -> None:
    """The software GPU delays and reorders what it may: what a cut forgets to drain would show."""
    options = ("--checkpoint-every", "300ms", "--cut-wait", "0", "--chaos", "5")
    job = world.run(*RUN, options=options)
    world.committed(5)
    assert world.end_of(job) == 0, world.tail()
    check_same(world, undisturbed)
    assert len(world.images()) in (3, 4)  # the job may end between a commit and its pruning


def test_moving_all_the_time(world: World, undisturbed: dict[str, Any]) -> None:
    job = world.run(*RUN)
    world.wait_step(2)
    moves: list[dict[str, object]] = []
    failures: list[BaseException] = []
    ended = threading.Event()

    def move() -> None:
        gpu = 0
        while not ended.wait(0.5):
            gpu = (gpu + 1) % 4
            try:
                moves.append(world.ctl_json("migrate", "j", "--to", str(gpu)))
            except BaseException as error:
                if len(moves) < 4:  # later the job may end at any time
                    failures.append(error)
                return

    mover = threading.Thread(target=move)
    mover.start()
    world.wait(lambda: len(moves) >= 4 or failures, 120, "four moves")
    code = world.end_of(job)
    ended.set()
    mover.join()
    assert not failures, failures
    assert code == 0, world.tail()
    check_same(world, undisturbed)
    assert len(moves) >= 4, moves


def test_killed_again_and_again(world: World, undisturbed: dict[str, Any]) -> None:
    """kill -9 of everything, restored from the newest image, under chaos and on another GPU each time."""
    options = ("--checkpoint-every", "500ms", "--chaos", "5")
    world.run(*RUN, options=options)
    for round_number, step in enumerate((12, 24, 36)):
        world.wait(lambda: matching(world.store, "images/*/manifest.json"), what="an image")
        world.wait_step(step)
        world.kill_everything()
        world.ctl(
            *("restore", "j", "--store", str(world.store), "--output", "log"),
            *("--gpu", str(round_number + 1)),
        )
    world.wait_end(timeout_s=200)
    check_same(world, undisturbed)


def test_a_restart_would_be_seen(world: World, undisturbed: dict[str, Any]) -> None:
    """The file would be equal, since the program is deterministic: the nonce and the steps are what tells."""
    world.run(*RUN)
    world.wait_step(10)
    world.kill_everything()
    world.run(*RUN)
    world.wait_end()
    with pytest.raises(AssertionError):
        check_same(world, undisturbed)
