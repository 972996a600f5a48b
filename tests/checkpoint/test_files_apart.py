# SPDX-License-Identifier: Apache-2.0
"""`restore --files DIR`: a copy beside the living job, with files of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.checkpoint.test_files_end_to_end import FILES, STEPS, check_whole, checkpoint
from tests.checkpoint.world import SUBJECTS, World


def twin(world: World, image: str, apart: Path | str, check: bool = True, name: str = "twin"):
    return world.ctl(
        *("restore", image, "--store", str(world.store), "--name", name, "--output", name),
        *("--files", str(apart)),
        check=check,
    )


def sees(world: World, folder: Path) -> str:
    """Where the folder as the copy sees it can be looked at from here."""
    for process in world.processes():
        of_job = str(SUBJECTS / "files.py") in process.cmdline()
        if of_job and f" {folder} " in Path(f"/proc/{process.pid}/mountinfo").read_text():
            return f"/proc/{process.pid}/root{folder}"
    raise AssertionError("the copy does not run")


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.every
def test_both_go_on(world: World) -> None:
    """Each appends, renames, removes and maps its own files; both end as an undisturbed run does."""
    job = world.run(*FILES)
    world.wait_step(5)
    image, at = checkpoint(world)
    world.wait_step(at + 2)
    mounts = Path("/proc/self/mountinfo").read_text()
    apart = world.home / "apart"
    twin(world, image, apart)
    own = apart / str(world.home / "files-out").lstrip("/")
    assert (own / "train.log").stat().st_mode == (world.home / "files-out/train.log").stat().st_mode
    assert own.stat().st_mode == (world.home / "files-out").stat().st_mode
    # Which name the living job makes when depends on who is faster.
    late = world.home / "files-out" / "made-later"
    late.write_text("x")
    assert late.name not in os.listdir(sees(world, late.parent))
    late.unlink()
    refused = world.ctl("checkpoint", "twin", check=False)
    assert refused.returncode == 2
    assert f"its files lie in {apart}" in refused.stderr
    assert world.end_of(job) == 0, world.tail()
    check_whole(world, STEPS)
    world.wait_end(log="twin")
    assert world.digest("twin") == world.digest(), world.tail("twin")
    assert Path("/proc/self/mountinfo").read_text() == mounts
    here, there = content(world.home / "files-out"), content(own)
    names = {name for name in here if not name.startswith("runs.db")}
    assert names == {name for name in there if not name.startswith("runs.db")}


def test_the_places_stay_where_no_job_lives(world: World) -> None:
    """A restore that fails leaves the folder as it was; the next one fills it, and the job's places keep what they have."""
    world.run(*FILES)
    world.wait_step(5)
    image, at = checkpoint(world)
    world.wait_step(at + 2)
    world.kill_everything()
    before = content(world.home / "files-out")
    apart = world.home / "apart"
    for made in (False, True):
        if made:
            apart.mkdir()
        words = ("restore", image, "--store", str(world.store), "--name", "twin")
        failed = world.ctl(
            *words, "--files", str(apart), check=False, DEVPROXY_FAULT="restore_host"
        )
        assert failed.returncode == 1, failed.stderr
        assert apart.exists() == made
        assert not made or not list(apart.iterdir())
    twin(world, image, apart)
    world.wait_end(log="twin")
    assert world.steps("twin")[-1] == STEPS, world.tail("twin")
    assert content(world.home / "files-out") == before


def test_what_is_refused(world: World) -> None:
    """By name, with nothing changed and nothing of it left running."""
    job = world.run(*FILES)
    world.wait_step(5)
    image, at = checkpoint(world)
    world.wait_step(at + 2)
    full = world.home / "full"
    full.mkdir()
    (full / "mine").write_text("x")
    for place, why in (
        (full, "it is not empty"),
        ("/proc/apart", "cannot be given places there"),
        (world.home / "files-out" / "apart", f"has {world.home}/files-out/apart in it"),
    ):
        said = twin(world, image, place, check=False)
        assert said.returncode == 2, said.stderr
        assert why in said.stderr, said.stderr
        assert f"--files {place}" in said.stderr
    same = twin(world, image, world.home / "x", check=False, name="j")
    assert same.returncode == 2
    assert (full / "mine").read_text() == "x"
    assert not (world.home / "files-out" / "apart").exists()
    assert world.end_of(job) == 0, world.tail()
    check_whole(world, STEPS)
