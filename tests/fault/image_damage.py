# SPDX-License-Identifier: Apache-2.0
"""One run of the campaign `image-damage`: a store with two images of a job, damage in one to three of its objects, restores.

The seed gives the objects and what happens to them, as a bad disk, a broken copy or a stranger does it. An image is then
restored to the very end that the job has undisturbed, or it is refused in one sentence. `images verify` calls no image
whole that is not, and `images gc` spoils none. In every fourth run the job lives beside the damage, and its next image is
right. There the damage of a pack shows in its size or time: docs/security.md says what a commit cannot see.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.checkpoint.world import SUBJECTS
from tests.fault.scene import Scene

STEPS = 60
JOB = (sys.executable, str(SUBJECTS / "cheap.py"), "--steps", str(STEPS), "--seconds-per-step", "0.05")  # fmt: skip


def _bytes(change: Callable[[random.Random, bytearray], None]) -> Callable[..., None]:
    def damage(dice: random.Random, path: Path, _others: list[Path]) -> None:
        data = bytearray(path.read_bytes())
        if data:
            change(dice, data)
        path.write_bytes(data)

    return damage


def _flip(dice: random.Random, data: bytearray) -> None:
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def _flips(dice: random.Random, data: bytearray) -> None:
    for _ in range(100):
        _flip(dice, data)


def _part(dice: random.Random, data: bytearray) -> slice:
    begin = dice.randrange(len(data))
    return slice(begin, begin + 1 + dice.randrange(min(1 << dice.randrange(22), len(data) - begin)))


def _zeros(dice: random.Random, data: bytearray) -> None:
    part = _part(dice, data)
    data[part] = bytes(part.stop - part.start)


def _noise(dice: random.Random, data: bytearray) -> None:
    part = _part(dice, data)
    data[part] = dice.randbytes(part.stop - part.start)


def _moved(dice: random.Random, data: bytearray) -> None:
    """A part stands where another one should: every byte is one of ours."""
    part = _part(dice, data)
    cut = bytes(data[part])
    del data[part]
    at = dice.randrange(len(data) + 1)
    data[at:at] = cut


def _shorter(dice: random.Random, data: bytearray) -> None:
    del data[dice.randrange(len(data)) :]


def _longer(dice: random.Random, data: bytearray) -> None:
    data += dice.randbytes(1 + dice.randrange(5000))


def _gone(_dice: random.Random, path: Path, _others: list[Path]) -> None:
    path.unlink()


def _empty(_dice: random.Random, path: Path, _others: list[Path]) -> None:
    path.write_bytes(b"")


def _another(dice: random.Random, path: Path, others: list[Path]) -> None:
    """Another object's content under this name."""
    path.write_bytes(dice.choice(others).read_bytes())


def _odd(dice: random.Random, path: Path, others: list[Path]) -> None:
    """No file at all."""
    path.unlink()
    kind = dice.choice(["folder", "pipe", "link", "nowhere"])
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(dice.choice(others) if kind == "link" else "/devproxy-none")


def _older(_dice: random.Random, path: Path, _others: list[Path]) -> None:
    """The same bytes, and a time of long ago."""
    os.utime(path, (1, 1))


DAMAGE: dict[str, Callable[[random.Random, Path, list[Path]], None]] = {
    "flip": _bytes(_flip),
    "flips": _bytes(_flips),
    "zeros": _bytes(_zeros),
    "noise": _bytes(_noise),
    "moved": _bytes(_moved),
    "shorter": _bytes(_shorter),
    "longer": _bytes(_longer),
    "gone": _gone,
    "empty": _empty,
    "another": _another,
    "odd": _odd,
    "older": _older,
}


class Damaged(Scene):
    """One job's store, which each run gets as it was, and what the job has said at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.hold()
        self.near(3)  # else it is at its last step before a slow checkpoint has ended
        self.run(*JOB)
        self.wait_step(3)
        images = [str(self.ctl_json("checkpoint", "j")["id"])]
        after = self.last_step() + 3
        self.near(after)
        self.wait_step(after)
        images.append(str(self.ctl_json("checkpoint", "j")["id"]))
        self.all_images = images
        assert self.end_of(self.jobs[0]) == 0, self.tail()
        self.right = self.digest()
        self.whole = self.home / "whole"
        shutil.copytree(self.store, self.whole)

    def afresh(self) -> None:
        shutil.rmtree(self.store)
        subprocess.run(["cp", "-a", self.whole, self.store], check=True)
        self.jobs.clear()
        self.until(STEPS - 1)
        (self.home / "log").unlink(missing_ok=True)

    def harm(self, dice: random.Random, *, shows: bool) -> list[str]:
        """What was done to what. shows: a pack that is written has another time or size afterwards."""
        told = []
        for _ in range(dice.choice([1, 1, 2, 3])):
            found = [p for p in sorted(self.store.rglob("*")) if p.is_file() and p.parent.name != "uploads"]  # fmt: skip
            kind = dice.choices([".pack", ".idx", ".json", ""], [6, 2, 3, 1])[0]
            of_kind = [p for p in found if p.suffix == kind] or found
            path, how = dice.choice(of_kind), dice.choice(list(DAMAGE))
            before = path.stat()
            DAMAGE[how](dice, path, of_kind)
            hidden = dice.random() < 0.5 and not (shows and kind == ".pack")
            if path.is_file() and how != "older" and hidden:
                os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            told.append(f"{how} {path.relative_to(self.store)}")
        return told

    def look(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command on the store: right, or one that says what is wrong."""
        store = ("--store", str(self.store)) if words[0] != "checkpoint" else ()
        done = self.ctl(*words, *store, check=False)
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode in (0, 1, 2), done
        if done.returncode:
            assert (done.stderr + done.stdout).strip(), words
        return done

    def called_whole(self) -> set[str]:
        said = self.look("images", "verify", "j").stdout
        return {image for image in self.all_images if f"image {image} is whole" in said}

    def restored(self, image: str) -> bool:
        """Whether it came back, which is then right."""
        (self.home / "log").unlink(missing_ok=True)
        done = self.look("restore", image, "--output", "log", "--wait")
        if done.returncode and not self.text():
            self.wait(lambda: not self.others(), 20, f"the end of {self.others()}")
            return False
        steps = self.steps()
        assert done.returncode == 0, done
        assert steps == list(range(steps[0], STEPS + 1)), self.tail()
        assert self.digest() == self.right, self.tail()
        self.check_nobody_lives()
        return True


_WORLDS: list[Damaged] = []


def run(seed: int) -> dict[str, int]:
    """Raises AssertionError where the promise is broken. Returns what was done, to add up."""
    dice = random.Random(seed)
    if not _WORLDS:
        _WORLDS.append(Damaged())
        atexit.register(lambda: [world.close() for world in _WORLDS])
    world = _WORLDS[0]
    told: list[str] = []
    try:
        world.afresh()
        figures = _beside(world, dice, told) if seed % 4 == 0 else _behind(world, dice, told)
    except BaseException as error:
        _WORLDS.pop().close()
        error.add_note(f"seed {seed}: {', '.join(told)}")
        raise
    return figures | {"damages": len(told)} | {word.split(" ")[0]: 1 for word in told}


def _behind(world: Damaged, dice: random.Random, told: list[str]) -> dict[str, int]:
    """The job is gone, and its store is all there is."""
    told += world.harm(dice, shows=False)
    world.look("images")
    whole = world.called_whole()
    if dice.random() < 0.5:
        world.look("images", "gc")
        assert world.called_whole() == whole
    came = {image for image in world.all_images if world.restored(image)}
    assert whole <= came, f"{whole - came} are called whole"
    return {"restored": len(came), "refused": 2 - len(came), "called_whole": len(whole)}


def _beside(world: Damaged, dice: random.Random, told: list[str]) -> dict[str, int]:
    """The job lives, relies on what it has stored, and dies after its next image."""
    world.ctl("restore", world.all_images[1], "--store", str(world.store), "--output", "log")
    world.wait(lambda: world.last_step(), 30, "a step")
    told += world.harm(dice, shows=True)
    done = world.look("checkpoint", "j", "--json")
    world.wait_step(min(world.last_step() + 1, STEPS - 1))
    world.kill_everything()
    world.wait(lambda: not world.others(), 20, "the end")
    world.until(STEPS - 1)
    if done.returncode:
        return {"next_image_given_up": 1}
    image = str(json.loads(done.stdout)["id"])
    assert world.restored(image), f"the next image {image}"
    return {"next_image_right": 1}
