# SPDX-License-Identifier: Apache-2.0
"""Living arrays, texture and surface objects through checkpoint, death and restore, and over to another server.

tests/subjects/driver/arrays.c compares every array in each step. Its objects are numbers that the device gave: they must be the
same after a restore, or there is none.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpoint.world import World
from tests.integration.test_programs import build_program


@pytest.fixture
def world(fake_driver: dict[str, str]) -> Iterator[World]:
    made = World(**fake_driver)
    made.env["FAKE_OBJECTS_AT"] = str(made.home / "objects-at")
    (made.home / "objects-at").write_text("1")
    yield made
    made.close()


def begin(world: World, device: str, *options: str, objects: str = "") -> None:
    if device == "soft":
        objects = "none"  # the software GPU has no texture units
    world.run(
        *build_program("arrays"), "loop", "20",
        options=("--device", device, *options),
        ARRAYS_OBJECTS=objects,
        ARRAYS_STOP=str(world.home / "stop"),
        ARRAYS_HEAL=str(world.home / "heal"),
    )  # fmt: skip
    world.wait_step(5)


def go_on(world: World, steps: int = 5) -> None:
    world.wait_step(max(world.steps()) + steps)


def end(world: World) -> None:
    go_on(world)
    (world.home / "stop").touch()
    world.wait_end("digest done")


def restore(world: World, check: bool = True) -> str:
    words = ("restore", "j", "--store", str(world.store), "--output", "log")
    return world.ctl(*words, check=check).stderr


@pytest.mark.parametrize("device", ["soft", "record", "cuda"])
def test_arrays_keep_their_contents(device: str, world: World) -> None:
    begin(world, device)
    world.ctl("checkpoint", "j")
    go_on(world)
    assert world.kill_everything()
    restore(world)
    end(world)


def test_objects_must_be_the_same_numbers(world: World) -> None:
    """A driver that begins to count elsewhere: refused by name, and the image is as good as before."""
    begin(world, "cuda")
    world.ctl("checkpoint", "j")
    go_on(world)
    assert world.kill_everything()
    (world.home / "objects-at").write_text("1000")
    said = restore(world, check=False)
    assert "the job was told that its texture or surface object is 0x3 and is 0x" in said, said
    assert "nothing of it runs" in said
    assert world.kill_everything() >= 0
    (world.home / "objects-at").write_text("1")
    restore(world)
    end(world)


def test_migrate(world: World) -> None:
    begin(world, "record", "--gpus", "1")
    world.ctl("migrate", "j", "--to", "1")
    end(world)


@pytest.mark.parametrize(
    ("objects", "why"),
    [
        ("array", "a texture or surface object shows an array that was destroyed"),
        ("memory", "a texture object shows device memory that was freed"),
    ],
)
def test_what_could_not_be_made_again_is_refused_before_anything_stops(
    objects: str, why: str, world: World
) -> None:
    begin(world, "cuda", objects=objects)
    refused = world.ctl("checkpoint", "j", check=False)
    assert refused.returncode != 0
    assert why in refused.stderr, refused.stderr
    (world.home / "heal").touch()
    world.wait(lambda: "healed" in world.text(), what="healed")
    world.ctl("checkpoint", "j")
    assert world.kill_everything()
    restore(world)
    end(world)
