# SPDX-License-Identifier: Apache-2.0
"""One run of the campaign `random-kills`: a job with periodic images, one kill -9, and what a user does then.

The seed gives the program, the victim and the moment. Every second run is aimed between the cut and the commit: the
staging folder and the store show how far an image is, and the kill follows at a random moment of that stage. After it
the job is restored from its last whole image unless it goes on by itself, and it must end with one nonce, each step
once, and the digest of an undisturbed run; the image must not be older than one interval and one checkpoint.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.checkpoint.world import SUBJECTS
from tests.fault.scene import Scene
from tests.living import matching

INTERVAL_S = 0.7
# The periodic thread looks twice a second; the rest is for a loaded machine.
LATE_S = 1.5
VICTIMS = ("main", "server", "devproxy-run", "janitor", "daemon", "criu", "everything")

# How far an image on its way is, by what can be seen from outside: stage -> what is there by then.
STAGES: dict[str, Callable[[Scene], bool]] = {
    "staged": lambda w: (w.folder / "staging").exists(),
    "device": lambda w: bool(matching(w.folder, "staging/*.dev")),
    "host": lambda w: bool(matching(w.folder, "staging/criu/*.img")),
    "shared": lambda w: bool(matching(w.folder, "staging/*.shared.json")),
    "upload": lambda w: bool(matching(w.store, "uploads/*")),
    "commit": lambda w: (
        (w.folder / "staging").exists()
        and bool(matching(w.store, "uploads/*"))
        and bool(matching(w.folder, "staging/*.shared.json"))
    ),
}


def command(script: str, steps: int, seconds: str) -> tuple[str, ...]:
    program = str(SUBJECTS / script)
    return (sys.executable, program, "--steps", str(steps), "--seconds-per-step", seconds)


CHEAP = command("cheap.py", 220, "0.02")
GPT = command("gpt.py", 60, "0.1")


@functools.cache
def undisturbed(line: tuple[str, ...]) -> str:
    world = Scene()
    try:
        assert world.run(*line, name="alone").wait(200) == 0, world.tail()
        (digest,) = world.digest()
        return digest
    finally:
        world.close()


def victims(world: Scene, who: str) -> list[int]:
    """Process ids; none for criu and everything, which are looked for at the moment itself."""
    found = []
    for process in world.others() if who != "daemon" else world.processes():
        try:
            line = process.cmdline()
        except psutil.Error:
            continue
        program = os.path.basename(line[0]) if line else ""
        if {
            "server": program == "devproxy-server",
            "janitor": program == "devproxy-janitor",
            "daemon": "devproxy.control.daemon" in line,
            "devproxy-run": process.pid == world.jobs[0].pid,
            "main": len(line) > 1 and line[1].startswith(str(SUBJECTS)),
        }.get(who):
            found.append(process.pid)
    return found


def criu_of(world: Scene) -> list[int]:
    """It is a child of devproxy-run, and lives for a tenth of a second: /proc in whole would take too long."""
    found = []
    for path in matching(Path(f"/proc/{world.jobs[0].pid}/task"), "*/children"):
        try:
            for pid in path.read_text().split():
                if Path(f"/proc/{pid}/comm").read_text() == "criu\n":
                    found.append(int(pid))
        except OSError:
            pass
    return found


def kill(pid: int) -> bool:
    """False: it had ended by itself."""
    try:
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return False
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
    return True


def kill_criu(world: Scene, after_s: float) -> tuple[float, bool]:
    """So long after it was seen; where it was faster, the next image's, at once. When, and whether an image was staged."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if found := criu_of(world):
            time.sleep(after_s)
            at, in_the_middle = time.time(), (world.folder / "staging").exists()
            if sum(map(kill, found)):
                return at, in_the_middle
            after_s = 0.0
    raise AssertionError("no CRIU in a minute of periodic images")


def run(seed: int, late_s: float = LATE_S) -> dict[str, int]:
    """Raises AssertionError where the promise is broken. Returns what was done, to add up.

    late_s: by how much the image may be older than one interval and one checkpoint.
    """
    dice = random.Random(seed)
    line = GPT if seed % 8 == 0 else CHEAP
    who = VICTIMS[seed % len(VICTIMS)]
    aimed = seed % 2 == 1 or who == "criu"
    stage = dice.choice(list(STAGES)) if aimed else "anywhere"
    stage = "criu" if who == "criu" else stage
    digest = undisturbed(line)
    world = Scene()
    try:
        world.hold()  # it must not end before the kill, however slow the machine is
        world.run(*line, options=("--checkpoint-every", f"{round(INTERVAL_S * 1000)}ms"))
        world.wait(lambda: any(i["whole"] for i in world.images()), 60, "the first image")
        targets = victims(world, who)  # found beforehand: looking takes as long as a stage
        after_s = dice.random() * 0.02
        if aimed and who != "criu":  # which is caught below: it lives for a tenth of a second
            # Not the image that is already there: the next one on its way.
            reached = STAGES[stage]
            world.wait(lambda: not (world.folder / "staging").exists(), 20, "no staging")
            world.wait(lambda: reached(world), 30, stage)
            time.sleep(after_s)
        elif not aimed:
            time.sleep(dice.random() * 1.0)
        killed = 0
        in_the_middle = (world.folder / "staging").exists()
        at = time.time()
        if who == "everything":
            killed = world.kill_everything()
        elif who == "criu":
            at, in_the_middle = kill_criu(world, after_s)
            killed = 1
        else:
            killed = sum(map(kill, targets))
        world.hurry()
        outcome = after(world, at, late_s)
        check(world, digest)
    except BaseException as error:
        error.add_note(f"seed {seed}: {who} at {stage}")
        raise
    finally:
        world.close()
    return {
        f"killed_{who.replace('-', '_')}": int(killed > 0),
        f"stage_{stage}": int(killed > 0),
        "between_cut_and_commit": int(in_the_middle and killed > 0),
        "kills": int(killed > 0),
        "nobody_to_kill": int(killed == 0),
        outcome: 1,
        "gpt_runs": int(line is GPT),
    }


def after(world: Scene, killed_at: float, late_s: float) -> str:
    """What a user does: looks whether the job still runs, and restores it where it does not."""
    job = world.jobs[0]
    alive_until = time.monotonic() + 1.5
    while time.monotonic() < alive_until and job.poll() is None and not world.digest():
        time.sleep(0.05)
    if job.poll() is None or world.digest():
        world.wait(lambda: job.poll() is not None, 60, "the job's end")
        if world.digest():
            return "went_on"
    world.wait(lambda: not world.others(), 20, f"the end of {world.others()}")
    whole = [i for i in world.images() if i["whole"]]
    assert whole, world.images()
    made = json.loads(world.manifest_path(str(whole[-1]["id"])).read_text())["body"]
    age = killed_at - float(made["created"])
    assert age < INTERVAL_S + float(made["costs"]["total_s"]) + late_s, (
        f"the image is {age:.1f} s old"
    )
    words = ["restore", "j", "--store", str(world.store), "--output", "log", "--wait"]
    world.ctl(*words, timeout_s=200)
    return "restored"


def check(world: Scene, digest: str) -> None:
    steps = world.steps()
    assert steps == list(range(1, len(steps) + 1)), world.tail()
    assert len(world.nonces()) == 1, world.tail()
    assert world.digest() == [digest], world.tail()
