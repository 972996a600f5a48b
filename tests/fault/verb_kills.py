# SPDX-License-Identifier: Apache-2.0
"""One run of the campaign `verb-kills`: a verb is under way, kill -9 of one process, and what a user does then.

The seed gives the verb, the victim, the program and the moment. Half of the kills are aimed at a stage of the verb, which
its note shows (devproxy/control/stage_note.py); the others come at any time from the command's start on. Afterwards the
job is resumed where it is suspended, restored from its last whole image where it is gone, and must end with one nonce,
each step once, and the digest of an undisturbed run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time

import psutil

from devproxy.control.stage_note import NAME
from tests.checkpoint.world import CTL, SUBJECTS
from tests.fault.random_kills import check, command, undisturbed
from tests.fault.scene import Scene
from tests.living import matching

VERBS = ("checkpoint", "suspend", "resume", "restore", "migrate")
VICTIMS = ("main", "init", "worker", "server", "supervisor", "janitor", "daemon", "criu", "everything")  # fmt: skip
# What a user may have to do in a row: a verb that was killed may leave the job suspended, and so may the next try.
MOST_TRIES = 4

STAGES: dict[str, tuple[str, ...]] = {
    "checkpoint": ("cut", "device", "host", "shared", "files", "thaw", "upload", "commit"),
    "suspend": ("cut", "device", "host", "shared", "files", "upload", "commit", "leave"),
    "resume": ("fetch", "device", "files", "host", "go on"),
    "restore": ("fetch", "device", "files", "host", "go on"),
    "migrate": ("cut", "device", "restore", "hand_over"),
}

CHEAP = command("cheap.py", 400, "0.02")
WORKERS = (*command("gpt.py", 160, "0.12"), "--workers", "2")


def processes(world: Scene, who: str) -> list[int]:
    """Those of whom one is going to be killed; everything is all of them."""
    found: dict[str, list[psutil.Process]] = {name: [] for name in VICTIMS}
    subject = []
    for process in world.processes():
        try:
            line = process.cmdline()
            if not line:
                continue
            program = os.path.basename(line[0])
            if program.startswith("devproxy-"):
                name = program.removeprefix("devproxy-")
                found.setdefault(name, []).append(process)
            elif program == "criu":
                found["criu"].append(process)
            elif "devproxy.control.daemon" in line:
                found["daemon"].append(process)
            elif "devproxy.cli.run" in line or "devproxy.control.agent" in line:
                found["supervisor"].append(process)
            elif len(line) > 1 and line[1].startswith(str(SUBJECTS)):
                subject.append((process, process.ppid()))
        except psutil.Error:
            continue
    pids = {process.pid for process, _ in subject}
    for process, parent in subject:
        found["worker" if parent in pids else "main"].append(process)
    chosen = sum(found.values(), []) if who == "everything" else found[who]
    return [process.pid for process in chosen]


def note(world: Scene, verb: str) -> str:
    """The stage that the verb has reached."""
    folder = world.home / "state" / "restores"
    paths = matching(folder, "*.stage") if verb == "restore" else [world.folder / NAME]
    for path in paths:
        try:
            return path.read_text().strip()
        except OSError:
            pass
    return ""


def run(seed: int) -> dict[str, int]:
    """Raises AssertionError where the promise is broken. Returns what was done, to add up."""
    dice = random.Random(seed)
    verb = VERBS[seed % len(VERBS)]
    who = VICTIMS[seed // len(VERBS) % len(VICTIMS)]
    workers = who == "worker" or dice.random() < 0.2
    line = WORKERS if workers else CHEAP
    stage = dice.choice(STAGES[verb]) if dice.random() < 0.5 else ""
    late_s = dice.random() * (0.02 if stage else 1.2)
    digest = undisturbed(line)
    world = Scene()
    try:
        world.hold()  # it must not end before the kill, however slow the machine is
        world.run(*line)
        world.wait(lambda: (world.folder / "agent.sock").exists(), 30, "agent.sock")
        world.wait_step(3)
        world.ctl("checkpoint", "j")
        words = [verb, "j"]
        if verb == "migrate":
            words += ["--to", "1"]
        if verb == "resume":
            world.ctl("suspend", "j")
        if verb == "restore":
            # Something to roll back; where the checkpoint was slow, the job stands before its last step already.
            last = int(line[line.index("--steps") + 1])
            world.wait_step(min(world.last_step() + 3, last - 1))
            world.kill_everything()
            words += ["--store", str(world.store), "--output", "log"]
        begun = subprocess.Popen(
            [*CTL, *words, "--json"],
            env=world.env,
            cwd=world.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        reached = True
        if stage:
            while note(world, verb) != stage and begun.poll() is None:
                time.sleep(0.0005)
            reached = begun.poll() is None
        time.sleep(late_s)
        under_way = begun.poll() is None
        targets = processes(world, who)
        if not targets and who in ("criu", "init", "main", "worker"):
            # They live in a part of the verb only: at their first moment, then.
            while not targets and begun.poll() is None:
                targets = processes(world, who)
        killed = 0
        for pid in targets if who == "everything" else dice.sample(targets, min(1, len(targets))):
            try:
                os.kill(pid, signal.SIGKILL)
                killed += 1
            except ProcessLookupError:
                pass
        said, complaint = begun.communicate(timeout=100)
        assert "Traceback" not in complaint, complaint
        if begun.returncode > 0:
            facts = json.loads(complaint.strip().splitlines()[-1])
            assert facts["error"], complaint
        world.hurry()
        outcome = settle(world, may_fail=who == "worker")
        check(world, digest)
    except BaseException as error:
        error.add_note(f"seed {seed}: {who} in {verb} at {stage or f'{late_s:.2f} s'}")
        raise
    finally:
        world.close()
    return {
        "kills": int(killed > 0),
        "nobody_to_kill": int(killed == 0),
        f"killed_{who}": int(killed > 0),
        f"{verb}_under_way": int(killed > 0 and under_way),
        f"{verb}_over": int(killed > 0 and not under_way),
        "aimed": int(bool(stage) and reached and killed > 0),
        "with_workers": int(workers),
        "verb_failed": int(begun.returncode != 0),
        outcome: 1,
    }


def settle(world: Scene, *, may_fail: bool) -> str:
    """What a user does until the job has ended. What had to be done.

    may_fail: the command ends of what was done to it, by itself and in its own time. An image that was taken meanwhile is
    one of a job that ends again; then the user takes the one before it.
    """
    done = set()
    tried: list[str] = []
    for _ in range(MOST_TRIES):
        phase = wait_for_rest(world)
        if phase == "digest":
            return "_and_".join(sorted(done)) or "went_on"
        if phase == "suspended":
            done.add("resumed")
            world.ctl("resume", "j", check=False)  # if it fails, the next look says why
            continue
        done.add("restored")
        world.wait(lambda: not world.others(), 20, f"the end of {world.others()}")
        whole = [str(i["id"]) for i in world.images() if i["whole"] and i["id"] not in tried]
        assert whole, f"{world.images()}\n{world.tail()}"
        if may_fail:
            tried.append(whole[-1])
            done |= {"restored_older"} if len(tried) > 1 else set()
        world.ctl("restore", whole[-1], "--store", str(world.store), "--output", "log")
    raise AssertionError(f"the job does not come to its end: {world.tail()}")


def wait_for_rest(world: Scene) -> str:
    """The job has ended well (digest), it has ended otherwise (gone), or it is suspended."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if world.digest():
            return "digest"
        if not world.folder.exists():
            # Its last words may have come since the look above.
            return "digest" if world.digest() else "gone"
        if world.phase() == "suspended":
            status = world.ctl("status", "j", "--json", check=False)
            if status.returncode == 0 and json.loads(status.stdout).get("phase") == "suspended":
                return "suspended"
        if not world.others():
            return "digest" if world.digest() else "gone"
        time.sleep(0.1)
    raise AssertionError(
        f"nothing moves: {world.phase()}, {[p.cmdline()[:3] for p in world.others()]}\n{world.tail()}"
    )
