# SPDX-License-Identifier: Apache-2.0
"""Packs are damaged between two checkpoints of a job: the second image brings the job back, bit for bit."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.world import SUBJECTS, World, without_pauses

STEPS = 150
GPT = (
    sys.executable,
    str(SUBJECTS / "gpt.py"),
    "--steps",
    str(STEPS),
    "--seconds-per-step",
    "0.25",
)


def flip(path: Path) -> None:
    """A bit in each MiB."""
    data = bytearray(path.read_bytes())
    for place in range(0, len(data), 1 << 20):
        data[place] ^= 1
    path.write_bytes(data)


def rot(path: Path) -> None:
    """As a bad disk has it: all is wrong, and no time changes."""
    before = path.stat()
    path.write_bytes(os.urandom(before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("damage", [flip, rot, halve, empty])
def test_the_next_image_is_whole(world: World, damage: Callable[[Path], None]) -> None:
    world.run(*GPT)
    world.wait_step(5)
    first = world.ctl_json("checkpoint", "j")
    packs = sorted((world.store / "packs").glob("*.pack"))
    for pack in packs:
        damage(pack)
    world.wait_step(max(world.steps()) + 2)
    second = world.ctl_json("checkpoint", "j")
    if (
        damage is not rot
    ):  # which is found in the middle: what the first try has stored serves the next
        assert second["new_bytes"] > first["new_bytes"] * 0.9, "nothing of the first was relied on"
    assert any("is damaged, or was changed" in text for text in second["warnings"]), second
    third = world.ctl_json("checkpoint", "j")
    assert third["new_bytes"] < second["new_bytes"] / 2, "the second is relied on"
    verified = world.ctl("images", "verify", "j", "--store", str(world.store), check=False)
    assert f"image {third['id']} is whole" in verified.stdout
    world.kill_everything()
    world.ctl("restore", str(second["id"]), "--store", str(world.store), "--output", "log")
    world.wait_end()
    assert world.steps() == list(range(world.steps()[0], world.steps()[0] + STEPS)), world.tail()
    alone = world.run(*without_pauses(GPT), name="alone", log="alone")
    assert alone.wait(200) == 0, world.tail("alone")
    assert world.digest() == world.digest("alone")
