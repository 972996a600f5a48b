# SPDX-License-Identifier: Apache-2.0
"""One run of the campaign `odd-jobs`: a job that is put together from traits (tests/subjects/odd), and an image of it.

The seed gives three to eight traits, the verb and the moments. The image is taken, the job goes on, everything is killed
with -9, and the job is restored and ends. Then every trait's own look has held in every step, the steps are there once
each, with one nonce, and the digest is that of an undisturbed run. Nothing is left behind.

Or the image is refused by name, with exit code 2. Only a trait that says so may be refused, and one that must be refused
has to be. The job goes on unharmed. Where the obstacle goes away, the next image succeeds.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.checkpoint.world import SUBJECTS
from tests.fault.random_kills import check
from tests.fault.scene import Scene
from tests.subjects.odd import TRAITS

STEPS = 150
STEP_S = "0.02"
AHEAD = 50  # steps that it may go on before it is held: it moves while a verb is under way
LAST_S = 100
TRIES = 4  # of an image that is refused for a moment
VERBS = ("checkpoint", "checkpoint", "checkpoint", "checkpoint", "suspend", "migrate", "again")
KILLED = r"process \d+ of the job was killed while the image was taken: take the image again"
OBSTACLES = 0.15  # of the runs have a trait that must be refused


def pick(dice: random.Random) -> list[str]:
    """Names of traits, one in some runs an obstacle."""
    may_be = {n: t for n, t in TRAITS.items() if not t.apart and (not t.root or not os.geteuid())}
    plain = sorted(name for name, trait in may_be.items() if not trait.must)
    names = dice.sample(plain, dice.randint(3, 8))
    if dice.random() < OBSTACLES:
        names[0] = dice.choice(sorted(name for name, trait in may_be.items() if trait.must))
    return names


def line(names: Sequence[str], seed: int) -> tuple[str, ...]:
    words = ("--traits", ",".join(names), "--seed", str(seed), "--steps", str(STEPS))
    return (sys.executable, str(SUBJECTS / "odd_job.py"), *words, "--seconds-per-step", STEP_S)


class Run:
    """One job and what happens to it. figures: what was done, to add up."""

    def __init__(self, world: Scene, names: Sequence[str], dice: random.Random) -> None:
        self.world, self.names, self.dice = world, names, dice
        self.figures: dict[str, int] = {}
        self.may = [TRAITS[name].may for name in names if TRAITS[name].may]
        self.must = [TRAITS[name].must for name in names if TRAITS[name].must]

    def count(self, what: str) -> None:
        self.figures[what] = self.figures.get(what, 0) + 1

    def verb(self, *words: str) -> bool:
        """False: refused, as it may or must be. The job is as before then."""
        for _ in range(TRIES):
            self.world.until(self.world.last_step() + AHEAD)
            done = self.world.ctl(*words, check=False)
            text = done.stdout + done.stderr
            if done.returncode == 0:
                assert not self.must, f"{words}: not refused for {self.must}: {text}"
                return True
            assert "Traceback" not in text, text
            if done.returncode == 1 and re.search(KILLED, text):  # by the job itself
                self.goes_on()
                self.count("killed_meanwhile")
                continue
            assert done.returncode == 2, f"{words}: exit code {done.returncode}: {self.said(text)}"
            expected = self.must + self.may
            assert any(re.search(one, text) for one in expected), f"{words}: {self.said(text)}"
            self.goes_on()
            if any(re.search(one, text) for one in self.must):
                self.count("refused_by_name")
                return False
            self.count("refused_for_now")
        return False

    def said(self, text: str) -> str:
        return f"{text.strip()}\n{self.world.tail()}"

    def goes_on(self) -> None:
        """It does another step, if it is not held before its last."""
        self.reach(self.world.last_step() + 1)

    def reach(self, step: int) -> None:
        """It comes to this step, and not much further."""
        step = min(step, STEPS - 1)
        self.world.until(min(step + AHEAD, STEPS - 1))
        self.world.wait(lambda: self.world.last_step() >= step or self.ended(), 60, f"step {step}")
        assert self.world.last_step() >= step and "FAILED" not in self.world.text(), "it ended"

    def ended(self) -> bool:
        return "FAILED" in self.world.text() or not self.world.others()

    def image(self) -> bool:
        """Takes one, in whatever way; False: there is none."""
        verb = self.dice.choice(VERBS)
        world = self.world
        if self.must:
            assert not self.verb(self.dice.choice(["checkpoint", "suspend"]), "j")
            (world.home / "let-go").touch()
            self.must = []
            self.goes_on()
            self.goes_on()
        if not self.verb("suspend" if verb == "suspend" else "checkpoint", "j"):
            return False
        self.count(verb)
        if verb == "suspend":
            world.ctl("resume", "j")
            self.goes_on()
            return True  # and what is restored below is the image of the suspend
        if verb == "migrate":
            self.goes_on()
            if self.verb("migrate", "j", "--to", "1"):
                self.goes_on()
        if verb == "again":
            self.goes_on()
            self.verb("checkpoint", "j")
        return True


def run(seed: int, traits: Sequence[str] = ()) -> dict[str, int]:
    """Raises AssertionError where the promise is broken. Returns what was done, to add up.

    traits: these, in place of those that the seed gives.
    """
    dice = random.Random(seed)
    names = list(traits) or pick(dice)
    words = line(names, seed)
    world, alone = Scene(), Scene()
    doing = Run(world, names, dice)
    try:
        quick = words[: words.index("--seconds-per-step")]
        other = alone.run(*quick, name="alone", TEST_GATE="")
        world.hold()  # it does not end before the kill
        world.until(AHEAD)
        world.run(*words)
        world.wait(lambda: (world.folder / "agent.sock").exists(), 30, "agent.sock")
        if dice.random() < 0.25:
            time.sleep(dice.random() * 0.4)  # while the traits are set up
        else:
            doing.reach(dice.randint(1, 12))
        made = doing.image()
        for _ in range(2 if made and dice.random() < 0.25 else int(made)):
            doing.reach(world.last_step() + dice.randint(0, 4))
            killed = world.kill_everything()
            assert killed, "nothing to kill"
            world.wait(lambda: not world.others(), 20, "the end of everything")
            world.restore()
            doing.count("restored")
            doing.goes_on()
            if made and dice.random() < 0.3:
                made = doing.verb("checkpoint", "j")  # an image of a restored job
                doing.count("images_of_restored" if made else "refused_again")
        world.hurry()
        world.wait(lambda: world.digest() or doing.ended(), LAST_S, "the digest")
        assert other.wait(LAST_S) == 0, alone.tail()
        (digest,) = alone.digest() or ["none"]
        check(world, digest)
        assert world.steps() == list(range(1, STEPS + 1)), world.tail()
        assert "FAILED" not in world.text(), world.tail()
        world.check_nobody_lives()
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        raise AssertionError(
            f"{world.tail()[-500:]}\n{','.join(names)}: {error!s:.1500}"
        ) from error
    finally:
        world.close()
        alone.close()
    return doing.figures | {"traits": len(names)}
