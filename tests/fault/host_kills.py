# SPDX-License-Identifier: Apache-2.0
"""One run of the campaign `host-kills`: a job of ranks on two hosts, kill -9 of one process or of a whole host, and what a
user does then.

The seed gives the verb that is under way (or none), the host, the victim and the moment. Half of the kills are aimed at a
stage of the verb (devproxy/control/stage_note.py). Afterwards the job is resumed where it is suspended; where it is gone,
it is restored from its last whole image, on whichever of the hosts; it must end with one nonce, each step once, and the
digest of the same ranks on one host.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from devproxy.control.stage_note import NAME
from tests.checkpoint.hosts import CTL, Hosts
from tests.checkpoint.world import SUBJECTS, World, without_pauses
from tests.living import matching
from tests.native.test_hal_cuda import fake_gpus

VERBS = ("", "checkpoint", "suspend", "resume", "restore", "migrate", "resize")
VICTIMS = ("rank", "init", "server", "supervisor", "daemon", "criu", "host", "everything")
STAGES: dict[str, tuple[str, ...]] = {
    "checkpoint": ("agree", "cut", "device", "host", "files", "thaw", "upload", "commit"),
    "suspend": ("agree", "cut", "device", "host", "files", "upload", "commit", "leave"),
    "resume": ("fetch", "device", "files", "host", "go on"),
    "restore": ("fetch", "device", "files", "host", "go on"),
    "migrate": ("agree", "cut", "device", "restore", "hand_over"),
    "resize": ("agree", "cut", "device", "restore", "hand_over"),
}
PLACES = ((0, 1), (1, 0), (0, 0), (1, 1))
APART = PLACES[
    :2
]  # on cuda each node has GPUs of its own, and both restores have the same options here
STEPS, MOST_TRIES = 120, 4


def command(on_cuda: bool) -> tuple[str, ...]:
    words = ("--steps", str(STEPS), "--ranks", "4", "--seconds-per-step", "0.05")
    # On cuda there is no cut while one rank stands at the gate before the last step and the others wait for it in NCCL.
    together = ("--together", "1") if on_cuda else ()
    return (sys.executable, str(SUBJECTS / "ranks.py"), *words, *together)


@functools.cache
def undisturbed(on_cuda: bool) -> list[str]:
    world = World()
    try:
        words = without_pauses(command(on_cuda))
        digest = world.undisturbed(*words, "--seconds-per-step", "0", gpus=4)
        return digest
    finally:
        world.close()


def shm(pid: int) -> int:
    """Which /dev/shm a process sees: each host has one of its own."""
    return os.stat(f"/proc/{pid}/root/dev/shm").st_dev


def processes(world: Hosts, host: int | None) -> list[psutil.Process]:
    """Of one host, or of both."""
    found = []
    for process in world.processes():
        try:
            if host is None or shm(process.pid) == shm(world.hosts[host].pid):
                found.append(process)
        except OSError:
            continue
    return found


def kind(process: psutil.Process) -> str:
    try:
        line = process.cmdline()
    except psutil.Error:
        return ""
    program = os.path.basename(line[0]) if line else ""
    if program.startswith("devproxy-"):
        return program.removeprefix("devproxy-")
    if program == "criu":
        return "criu"
    if "devproxy.control.daemon" in line:
        return "daemon"
    if "devproxy.cli.run" in line or "devproxy.control.agent" in line:
        return "supervisor"
    return "rank" if len(line) > 1 and line[1].startswith(str(SUBJECTS)) else ""


def targets(world: Hosts, who: str, host: int) -> list[int]:
    if who in ("host", "everything"):
        return [p.pid for p in processes(world, host if who == "host" else None)]
    return [p.pid for p in processes(world, host) if kind(p) == who]


def note(world: Hosts, verb: str, host: int) -> str:
    """The stage that the verb has reached there."""
    root = Path(f"/proc/{world.hosts[host].pid}/root")
    folder = root / "dev/shm" / f"devproxy-{os.getuid()}"
    state = root / str(world.home / "state").lstrip("/")
    paths = (
        matching(state / "restores", "*.stage")
        if verb == "restore"
        else matching(folder, f"*/{NAME}")
    )
    for path in paths:
        try:
            return path.read_text().strip()
        except OSError:
            pass
    return ""


def begin(
    world: Hosts, verb: str, places: tuple[int, int], dice: random.Random
) -> list[subprocess.Popen[str]]:
    if verb == "restore":
        return world.bring_back(places)
    words = [verb, "j"]
    if verb == "resize":
        words += fewer_gpus(dice)
    if verb == "migrate":
        words += [
            "--anew",
            "--to",
            ",".join(str(gpu) for _ in range(2) for gpu in dice.sample(range(4), 2)),
        ]
    return [
        subprocess.Popen(
            world.hosts[0].command([*CTL, *words, "--json"]),
            env=world.env,
            cwd=world.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    ]


def fewer_gpus(dice: random.Random) -> list[str]:
    """On one host, whose ranks share a GPU then while the other host's may move, or on both."""
    if dice.random() < 0.3:
        return ["--onto", str(dice.randrange(4))]
    apart, shared = dice.sample(range(4), 2), [dice.randrange(4)] * 2
    both = [apart, shared] if dice.random() < 0.5 else [shared, apart]
    return ["--gpus", ",".join(str(gpu) for gpus in both for gpu in gpus)]


def under_way(begun: list[subprocess.Popen[str]]) -> bool:
    return any(one.poll() is None for one in begun)


def listen(begun: list[subprocess.Popen[str]]) -> None:
    """Until they have ended. One node's restore waits for another's to come: where that has failed, the user ends it."""
    until = 0.0
    while under_way(begun):
        if not until and any(one.poll() for one in begun):
            until = time.monotonic() + 15
        if until and time.monotonic() > until:
            for one in begun:
                one.send_signal(signal.SIGINT)
            until = time.monotonic() + 100
        time.sleep(0.05)
    for one in begun:
        said = one.communicate(timeout=10)[0]
        assert "Traceback" not in said, said


def run(seed: int, on_cuda: bool = False) -> dict[str, int]:
    """Raises AssertionError where the promise is broken. Returns what was done, to add up.

    on_cuda: hal/cuda over the fake driver and the fake NCCL (tests/checkpoint/test_cuda_hosts.py)."""
    dice = random.Random(seed)
    verb = VERBS[seed % len(VERBS)]
    who = VICTIMS[seed // len(VERBS) % len(VICTIMS)]
    host = dice.choice((0, 1))
    stage = dice.choice(STAGES[verb]) if verb and dice.random() < 0.5 else ""
    late_s = dice.random() * (0.02 if stage else 1.5)
    digest = undisturbed(on_cuda)
    world = Hosts()
    try:
        options: tuple[str, ...] = ("--gpus", "2")
        if on_cuda:
            world.env |= fake_gpus(world.home / "root", 4) | {
                "DEVPROXY_CUDA_EXECUTOR": "host",
                "FAKE_NCCL_MANY": "1",  # of several ranks in one server
            }
            options = ("--device", "cuda", "--gpu-memory", "512MiB", *options)
        world.hold()
        world.start(*command(on_cuda), options=options)
        world.wait_step(3, "log0")
        world.on(0, "checkpoint", "j")
        world.until(STEPS - 1)
        if verb == "resume":
            world.on(0, "suspend", "j")
        if verb == "restore":
            world.kill_everything()
        begun = begin(world, verb, (0, 1), dice) if verb else []
        reached = True
        if stage:
            while note(world, verb, host) != stage and under_way(begun):
                time.sleep(0.0005)
            reached = under_way(begun)
        time.sleep(late_s)
        in_the_middle = under_way(begun)
        chosen = targets(world, who, host)
        while not chosen and under_way(begun):  # it lives in a part of the verb only
            chosen = targets(world, who, host)
        killed = 0
        for pid in (
            chosen if who in ("host", "everything") else dice.sample(chosen, min(1, len(chosen)))
        ):
            try:
                os.kill(pid, signal.SIGKILL)
                killed += 1
            except ProcessLookupError:
                pass
        listen(begun)
        world.hurry()
        places = APART if on_cuda else PLACES
        outcome = settle(world, dice, who in ("rank", "init", "server"), places)
        check(world, digest)
    except BaseException as error:
        error.add_note(
            f"seed {seed}: {who} of host {host} in {verb or 'no verb'} at {stage or f'{late_s:.2f} s'}"
        )
        raise
    finally:
        world.close()
    return {
        "kills": int(killed > 0),
        "nobody_to_kill": int(killed == 0),
        f"killed_{who}": int(killed > 0),
        f"{verb or 'no_verb'}_under_way": int(killed > 0 and in_the_middle),
        "aimed": int(bool(stage) and reached and killed > 0),
        outcome: 1,
    }


def settle(
    world: Hosts, dice: random.Random, may_hang: bool, where: tuple[tuple[int, int], ...]
) -> str:
    """What a user does until the job has ended. What had to be done."""
    done = set()
    for _ in range(MOST_TRIES):
        phase = wait_for_rest(world, may_hang)
        if phase == "digest":
            return "_and_".join(sorted(done)) or "went_on"
        if phase == "suspended":
            done.add("resumed")
            world.on(0, "resume", "j", check=False)  # if it fails, the next look says why
            continue
        done.add("restored")
        listen(world.bring_back(dice.choice(where)))
    raise AssertionError(f"the job does not come to its end: {tails(world)}")


def tails(world: Hosts) -> str:
    return world.tail("log0") + world.tail("log1")


def wait_for_rest(world: Hosts, may_hang: bool) -> str:
    """The job has ended well (digest), it has ended otherwise (gone), or it is suspended.

    may_hang: ranks wait for one that is gone, as they would without devproxy (ranks.py has no watchdog). Then the user
    ends the job by Ctrl-C.
    """
    deadline, moved, steps = time.monotonic() + 90, time.monotonic(), -1
    while (now := time.monotonic()) < deadline:
        ended = bool(world.digest("log0")) and bool(world.digest("log1"))
        living = [p for p in processes(world, None) if kind(p) != "daemon"]
        if not living:
            return "digest" if ended or (world.digest("log0") and world.digest("log1")) else "gone"
        if (done := len(world.steps("log0"))) != steps:
            moved, steps = now, done
        supervisors = of_kind(living, "supervisor")
        if supervisors and not of_kind(living, "server"):
            status = world.on(0, "status", "j", "--json", check=False)
            if status.returncode == 0 and json.loads(status.stdout).get("phase") == "suspended":
                return "suspended"
        elif may_hang and now - moved > 10:
            for pid in supervisors:
                os.kill(pid, signal.SIGINT)
            moved = now
        time.sleep(0.1)
    raise AssertionError(f"nothing moves: {[p.cmdline()[:4] for p in living]}\n{tails(world)}")


def of_kind(some: list[psutil.Process], name: str) -> list[int]:
    return [p.pid for p in some if kind(p) == name]


def check(world: Hosts, digest: list[str]) -> None:
    assert world.digest("log0") == world.digest("log1") == digest, tails(world)
    steps = world.steps("log0")
    assert steps == list(range(1, STEPS + 1)), tails(world)
    assert len(world.nonces("log0")) == 1, tails(world)
