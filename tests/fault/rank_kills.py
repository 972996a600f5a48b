# SPDX-License-Identifier: Apache-2.0
"""One run of the campaign `ranks`: a training job of several ranks, cut and killed at random moments.

The seed gives the way of training (tests/checkpoint/ways.py), the number of ranks and GPUs, the barrier, and what happens
at each moment: a verb, or kill -9 of one rank, one server, the supervisor, init, or everything. A killed rank or server
ends the job, which says so; then the last image is restored on GPUs that the seed draws. The job must end with one nonce,
each step once, and the digest of an undisturbed run.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import re
import signal
import time
from collections import Counter

import psutil

from tests.checkpoint.ways import WAYS, Way
from tests.checkpoint.world import ROOT, SUBJECTS, without_pauses
from tests.fault.scene import Scene

MOMENTS = 10
PAUSE_S = 2.0
SPARE_GPUS = 2
VERBS = {"checkpoint": 3, "suspend": 2, "elsewhere": 2, "migrate": 3, "migrate_one": 3, "resize": 4}
KILLS = {"rank": 1, "server": 1, "supervisor": 0.5, "init": 0.5, "everything": 1}
# What a verb may say where no point is common to all ranks, without take-back (docs/errors.md, Communicators).
NO_POINT = r"--barrier meta: |the ranks come to no common point: "
LIBRARIES = ROOT / "build" / "lib"
DIGESTS = ROOT / "build" / "soak" / "digests.json"


def run(seed: int) -> dict[str, int]:
    """Raises AssertionError where the promise is broken. Returns what was done, to add up."""
    dice = random.Random(seed)
    way = list(WAYS.values())[seed % len(WAYS)]
    ranks = dice.choice([n for n in (2, 2, 2, 4, 8) if way.fewest <= n <= way.ranks])
    gpus = min(4, dice.choice((ranks, ranks, ranks // 2)))
    barrier = dice.choice(("auto", "takeback", "agree", "meta")[: 4 if way.meta else 3])
    job = Job(way, ranks, gpus, barrier, dice)
    try:
        job.start()
        for _ in range(MOMENTS):
            job.moment()
        job.finish()
    except BaseException as error:
        told = f"seed {seed}: {way.name}, {ranks} ranks on {gpus} GPUs, --barrier {barrier}: {job.told}"
        if isinstance(error, AssertionError):
            raise AssertionError(f"{told}\n{error}") from error
        error.add_note(told)
        raise
    finally:
        job.world.close()
    return dict(job.figures)


def undisturbed(way: Way, ranks: int, steps: int) -> str:
    """Its digest. Kept for what has the same subjects and the same devproxy: it takes as long as some moments."""
    key = f"{way.name} {ranks} {steps} {_what_computes()}"
    kept: dict[str, str] = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    if key not in kept:
        world = Scene()
        try:
            line = without_pauses(way.command(ranks, steps))
            done = world.run(*line, name="alone", options=("--gpus", str(min(ranks, 4)))).wait(300)
            assert done == 0, world.tail()
            (kept[key],) = world.digest()
        finally:
            world.close()
        DIGESTS.parent.mkdir(parents=True, exist_ok=True)
        part = DIGESTS.with_suffix(".part")
        part.write_text(json.dumps(kept, indent=2) + "\n")
        part.rename(DIGESTS)
    return kept[key]


def says_of_rank(way: Way, rank: str) -> str:
    """What the output has when that rank was killed, as a regular expression.

    The other ranks may end themselves before the launcher looks, within a tenth of a second. Then torchrun takes the lowest
    of those that have ended for the cause. All have their exit codes in its report. multiprocessing.spawn names one alone.
    """
    if way.launcher:
        ended_first = "cannot be reached: the process that had it is gone"
        return rf"process \d+ terminated with signal SIGKILL|{ended_first}"
    return rf"\(local_rank: {rank}\)\n *exitcode *: -9 "


@functools.cache
def _what_computes() -> str:
    found = hashlib.blake2b(digest_size=8)
    files = [*SUBJECTS.glob("*.py"), *(p for p in LIBRARIES.rglob("*") if p.is_file())]
    for path in sorted(files):
        found.update(path.read_bytes())
    return found.hexdigest()


class Job:
    """One job, what is done to it, and the figures of that."""

    def __init__(self, way: Way, ranks: int, gpus: int, barrier: str, dice: random.Random) -> None:
        self.way, self.ranks, self.gpus, self.barrier, self.dice = way, ranks, gpus, barrier, dice
        self.steps = 100 if ranks > 4 else 240
        self.digest = undisturbed(way, ranks, self.steps)
        self.world = Scene()
        self.where = list(range(gpus))
        self.told: list[str] = []
        self.figures: Counter[str] = Counter()

    def start(self) -> None:
        self.world.hold()
        line = self.way.command(self.ranks, self.steps, 0.3)
        self.world.run(*line, options=("--gpus", str(self.gpus), "--barrier", self.barrier))
        self.world.wait_step(self.dice.randrange(1, 4), timeout_s=120)

    def moment(self) -> None:
        time.sleep(self.dice.random() * PAUSE_S)
        things = VERBS | KILLS
        (thing,) = self.dice.choices(list(things), list(things.values()))
        # Ranks that stand for good, before the last step, have a common point by chance alone.
        if self.barrier in ("agree", "meta") and self.world.last_step() >= self.steps - 1:
            self.figures["ran_out"] += 1
            return
        if thing in KILLS:
            self.kill(thing)
        elif thing == "checkpoint":
            self.verb("checkpoint")
        elif thing.startswith("migrate"):
            self.verb("migrate", "--to", self.other_gpus(only_one=thing == "migrate_one"))
        elif thing == "resize":
            self.verb("resize", "--gpus", self.shared_gpus())
        elif self.verb("suspend"):
            to = ("--gpu", self.other_gpus()) if thing == "elsewhere" else ()
            self.world.ctl("resume", "j", *to)
            self.figures[f"resume_{thing}"] += 1

    def verb(self, *words: str) -> bool:
        """False: there was no point common to all ranks, which a job with agree or meta may meet."""
        self.told.append(" ".join(words))
        done = self.world.ctl(words[0], "j", *words[1:], check=False)
        if done.returncode:
            said = f"{done.stdout}{done.stderr}"
            assert self.barrier in ("agree", "meta"), f"{words}: {said}\n{self.world.tail()}"
            assert re.search(NO_POINT, said) and "the job continues" in said, said
            self.figures["no_point"] += 1
            self.figures[f"no_point_{self.barrier}"] += 1
            return False
        self.figures["cuts"] += 1
        self.figures[f"cuts_{self.way.name}"] += 1
        self.figures[f"cuts_barrier_{self.barrier}"] += 1
        self.figures[words[0]] += 1
        if words[0] == "checkpoint":
            took = str(self.world.ctl_json("status", "j")["last_cut"])
            self.figures[f"took_{took.split()[0].strip(':').replace('-', '_')}"] += 1
        return True

    def shared_gpus(self) -> str:
        """From all of the job's on one of the machine's to one each."""
        count = self.dice.randrange(1, self.gpus + 1)
        some = self.dice.sample(range(self.gpus + SPARE_GPUS), count)
        self.where = [self.dice.choice(some) for _ in range(self.gpus)]
        return ",".join(map(str, self.where))

    def other_gpus(self, only_one: bool = False) -> str:
        everywhere = range(self.gpus + SPARE_GPUS)
        if only_one and len(set(self.where)) == self.gpus:
            free = [gpu for gpu in everywhere if gpu not in self.where]
            self.where[self.dice.randrange(self.gpus)] = self.dice.choice(free)
        else:
            self.where = self.dice.sample(everywhere, self.gpus)
        return ",".join(map(str, self.where))

    # -- kills ----------------------------------------------------------------------------------------------------

    def kill(self, who: str) -> None:
        world = self.world
        if not any(image["whole"] for image in world.images()) and not self.verb("checkpoint"):
            return
        self.told.append(f"kill {who}")
        before = [len(text) for text in self.said()]
        if who == "everything":
            assert world.kill_everything()
        else:
            says = self.kill_one(who)
            world.wait(lambda: not world.others(), 90, f"the end of {world.others()}")
            said = "".join(text[at:] for text, at in zip(self.said(), before, strict=True))
            assert re.search(says, said), f"the job did not say {says!r}:\n{said[-2000:]}"
            code = world.jobs[-1].wait(10)
            assert code != 0 or self.figures["kills"], f"exit code {code} after kill -9 of {who}"
        self.figures["kills"] += 1
        self.figures[f"killed_{who}"] += 1
        self.figures[f"kills_{self.way.name}"] += 1
        self.figures[f"kills_barrier_{self.barrier}"] += 1
        self.told.append("restore")
        # A whole image there is, and the job has ended. A daemon that is just leaving, or was killed, says so or is started.
        world.ctl("restore", "j", "--store", str(world.store), "--output", "log", "--gpu", self.other_gpus())  # fmt: skip
        self.figures["restores"] += 1

    def kill_one(self, who: str) -> str:
        """What the job's output has to say then, as a regular expression."""
        if who == "rank":
            process = self.dice.choice(self.rank_processes())
            says = says_of_rank(self.way, process.environ().get("LOCAL_RANK", ""))
        elif who == "server":
            process = self.dice.choice(sorted(self.world.named("devproxy-server"), key=lambda p: p.pid))  # fmt: skip
            words = process.cmdline()
            says = rf"the server of GPU {words[words.index('--gpu') + 1]}\b.* while the job ran"
        else:
            process, says = self.supervisor_or_init(who), ""
        os.kill(process.pid, signal.SIGKILL)
        return says

    def said(self) -> tuple[str, str]:
        """By the job, and by its supervisor, which after a restore has a log of its own."""
        return self.world.text(), self.world.text("state/logs/j.log")

    def rank_processes(self) -> list[psutil.Process]:
        found = []
        for process in self.world.processes():
            try:
                line = process.cmdline()
            except psutil.Error:
                continue
            mark = "--multiprocessing-fork" if self.way.launcher else str(SUBJECTS / "parallel.py")
            if mark in line and "torch.distributed.run" not in line:
                found.append(process)
        assert len(found) == self.ranks, found
        return sorted(found, key=lambda p: p.pid)

    def supervisor_or_init(self, who: str) -> psutil.Process:
        if who == "init":
            (init,) = self.world.named("devproxy-init")
            return init
        for process in self.world.others():  # the daemon may be just leaving
            line = " ".join(process.cmdline())
            if "devproxy.cli.run" in line or "devproxy.control.agent" in line:
                return process
        raise AssertionError("the job has no supervisor")

    # -- the end --------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        world = self.world
        world.wait_end("digest", timeout_s=240)
        assert len(world.nonces()) == 1, world.tail()
        # The marks show rank and step, beside those of an undisturbed run.
        marks = "\n".join(re.findall(r"^marks of rank .*$", world.text(), re.M))
        assert world.digest() == [self.digest], f"{world.digest()} is not {self.digest}\n{marks}"
        assert world.steps() == list(range(1, self.steps + 1)), world.steps()
        world.wait(lambda: not world.others(), 30, f"the end of {world.others()}")
        self.figures["jobs_bitwise_right"] += 1
        self.figures[f"jobs_{self.ranks}_ranks"] += 1
