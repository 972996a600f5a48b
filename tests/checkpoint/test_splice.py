# SPDX-License-Identifier: Apache-2.0
"""Replica splicing: ranks on one GPU compute once, and keep once, what is equal; and nobody sees a difference.

DEVPROXY_SPLICING=eager: also what is too small to pay. guard: a write to spliced memory that was not foreseen ends the
server, so every test here also shows that none was missed.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys

import pytest

from tests.checkpoint.world import SUBJECTS, World

RANKS = 4
TEST_MODE = "eager,guard"
LONE_STEP, LONE_REPLAY = 37, 6  # of unlike.py's update_of_one_step and whole_graph


class Job:
    """Programs of tests/subjects/unlike.py. hold: their ranks stay when they are through."""

    def __init__(
        self, world: World, name: str, gpus: str, *programs: str, mode: str = TEST_MODE, hold: bool = False,
        device: str = "soft", ranks: int = RANKS,
    ) -> None:  # fmt: skip
        self._ranks = ranks
        self._world, self.folder = world, world.home / f"folder-{name}"
        self._hold, self._log = world.home / f"hold-{name}", world.home / f"log-{name}"
        self._hold.touch()
        env = world.env | {"DEVPROXY_SPLICING": mode}
        if hold:
            env["UNLIKE_HOLD"] = str(self._hold)
        run = (sys.executable, "-m", "devproxy.cli.run", "--device", device, "--name", name)
        script = (sys.executable, str(SUBJECTS / "unlike.py"), str(ranks), str(self.folder))
        self.name = name
        with self._log.open("wb") as log:
            self._job = subprocess.Popen(
                [*run, "--gpu-memory", "1GiB", *gpus.split(), "--", *script, *programs],
                env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip

    def ended(self, program: str) -> bool:
        return all((self.folder / program / f"digest-{rank}").exists() for rank in range(RANKS))

    def wait(self) -> None:
        """Until all ranks are through."""

        def through() -> bool:
            assert self._job.poll() is None, self._log.read_text()[-2000:]
            return all((self.folder / f"ended-{rank}").exists() for rank in range(self._ranks))

        self._world.wait(through, 150, "the ranks")

    def counts(self, moving: bool = False) -> dict[str, int]:
        """moving: the ranks still run. The servers are asked one after another, so each may say more than the one before."""
        servers = self._world.ctl_json("status", self.name)["servers"]
        assert isinstance(servers, list) and len(servers) == self._ranks
        counts: dict[str, int] = servers[0]["splicing"]
        assert moving or all(server["splicing"] == counts for server in servers)  # of one GPU
        return counts

    def results(self) -> dict[str, str]:
        """Program -> the digests of all ranks."""
        self._hold.unlink(missing_ok=True)
        out, _ = self._job.communicate(timeout=170)
        assert self._job.returncode == 0, self._log.read_text()[-2000:]
        return dict(line.split(" ", 1) for line in out.splitlines())


def test_ranks_that_are_not_quite_replicas(world: World) -> None:
    """On one GPU as on four, and on GPUs that change meanwhile."""
    expected = Job(world, "apart", "--gpus 4").results()
    job = Job(world, "together", "--gpu 0,0,0,0", hold=True)
    job.wait()
    counts = job.counts()
    results = job.results()
    assert {name for name in expected if results[name] != expected[name]} == set()
    assert all(counts[what] > 0 for what in ("squashed", "validations", "different", "broken"))


@pytest.mark.parametrize(
    ("program", "at_least"),
    [
        # A gradient that the host takes is copied from the rank that has computed it.
        ("bytes_to_host", {"lent_bytes": 1, "settled_bytes": 1, "different": 1}),
        # AdamW's eight launches are computed once for four ranks until then, and for three of them afterwards.
        ("update_of_one_step", {"squashed": 8 * 3 * (LONE_STEP - 2) + 8 * 2, "different": 1}),
        # The step's launches in a graph meet like others.
        ("whole_graph", {"squashed": 8 * 3 * LONE_REPLAY, "different": 1}),
    ],
)  # fmt: skip
def test_what_shall_fool_the_ranks_that_share(
    world: World, program: str, at_least: dict[str, int]
) -> None:
    """Each of these programs by itself, and not only its results: what it is to disturb did happen."""
    expected = Job(world, "apart", "--gpus 4", program).results()
    job = Job(world, "together", "--gpu 0,0,0,0", program, mode=f"{TEST_MODE},patient", hold=True)
    job.wait()
    counts = job.counts()
    assert job.results() == expected
    assert all(counts[what] >= number for what, number in at_least.items()), counts


@pytest.mark.sweep(1)
@pytest.mark.parametrize("mode", ["eager", "on"])
def test_the_same_without_guards(world: World, mode: str) -> None:
    """As users run it, and with meetings for the smallest: what a rank borrows is not computed besides."""
    expected = Job(world, "apart", "--gpus 4").results()
    assert Job(world, "together", "--gpu 0,0,0,0", mode=mode).results() == expected


def moved_about(world: World, job: Job, programs: list[str], dice: random.Random) -> dict[str, str]:
    """Between its programs the job goes to other GPUs. Its results."""
    for program in programs[:-1]:
        world.wait(lambda program=program: job.ended(program), 90, program)  # type: ignore[misc]
        if program == programs[0]:
            assert job.counts(moving=True)["squashed"] > 0
        gpus = dice.choice(["0,0,0,0", "1,1,1,1", "2,2,3,3", "1,0,0,0", "0,1,2,3", "3,1,3,1"])
        world.ctl("resize", job.name, "--gpus", gpus)
    job.wait()
    return job.results()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("seed", range(6))
def test_resizes_while_ranks_are_spliced(world: World, seed: int) -> None:
    dice = random.Random(seed)
    programs = [
        "plain",
        "fused",
        "average",
        "diverges_once",
        "there_and_back",
        "broadcast",
        "graph",
    ]
    dice.shuffle(programs)
    expected = Job(world, "apart", "--gpus 4", *programs).results()
    job = Job(world, "moved", "--gpu 0,0,0,0", *programs, hold=True)
    assert moved_about(world, job, programs, dice) == expected


@pytest.mark.every
@pytest.mark.parametrize(("program", "launches", "copies"), [("plain", 8, 4), ("fused", 1, 3)])
def test_the_step_of_replicas_is_computed_once_and_kept_once(
    world: World, program: str, launches: int, copies: int
) -> None:
    """All of AdamW's launches, but for the first two steps'; and nothing else: forward and backward differ.

    copies: parameters, two states, and what a step that is not fused makes on the way.
    """
    # However slow a loaded machine makes a rank.
    job = Job(world, "once", "--gpu 0,0,0,0", program, mode=f"{TEST_MODE},patient", hold=True)
    job.wait()
    counts = job.counts()
    assert counts["different"] == counts["given_up"] == 0
    assert counts["broken"] <= 4 * RANKS  # until all launches of the step are learnt
    assert 6 * launches * (RANKS - 1) <= counts["squashed"] <= 8 * launches * (RANKS - 1)
    assert counts["validations"] * (RANKS - 1) == counts["squashed"]
    shown = world.ctl("status", "once").stdout
    assert (
        f"{counts['squashed']:,} launches squashed in {counts['validations']:,} validations"
        in shown
    )
    [share] = {
        float(found)
        for found in re.findall(r"validations, ([\d.]+)% of all ranks' launches", shown)
    }
    launched = sum(s["totals"]["launches"] for s in world.ctl_json("status", "once")["servers"])  # type: ignore[attr-defined]
    assert share == round(100 * counts["squashed"] / launched, 1) and 0 < share < 75
    state_bytes = copies * 4 * (48 * 96 + 96 * 96 + 96 * 8)  # whole pages alone are spliced
    assert 0.8 * state_bytes < counts["saved_bytes"] / (RANKS - 1) < 1.1 * state_bytes
    job.results()


def test_a_rank_that_is_late_now_and_then_costs_no_memory(world: World) -> None:
    """As a user runs it: what ranks keep once they keep once to the end."""
    expected = Job(world, "apart", "--gpus 4", "late").results()
    job = Job(world, "together", "--gpu 0,0,0,0", "late", mode="on", hold=True)
    job.wait()
    counts = job.counts()
    assert job.results() == expected
    state_bytes = 3 * 4 * (48 * 1024 + 1024 * 1024)  # parameters and two states; the large ones
    assert counts["saved_bytes"] > 0.8 * (RANKS - 1) * state_bytes, counts


def test_a_rank_that_has_more_buffers_than_the_others_shares_what_all_have(world: World) -> None:
    """Its optimizer's states, and what that makes on the way, lie at other offsets."""
    expected = Job(world, "apart", "--gpus 4", "large_average").results()
    job = Job(
        world, "together", "--gpu 0,0,0,0", "large_average", mode=f"{TEST_MODE},patient", hold=True
    )
    job.wait()
    counts = job.counts()
    assert job.results() == expected
    # Parameters, two states, and what a step makes on the way: the large ones. Without that rank two thirds of all but the
    # parameters, which lie where they do everywhere.
    bytes_ = 4 * (48 * 1024 + 1024 * 1024)
    assert counts["saved_bytes"] > 0.95 * (RANKS - 1) * 4 * bytes_, counts


# Of a model of sharded.py: its two large matrices.
SHARDED_BYTES = 2 * 4 * 256 * 512


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("program", "ranks", "times"),
    [
        # Four times the model: parameters, two states, and what a step makes on the way. Of that, the second copy.
        ("hsdp", 4, 4),
        # Of two copies of four, two parts of each, there are two again.
        ("threed", 8, 8),
        # The states and what a step makes: two halves of the ranks have them. Each broadcast writes parameters alone.
        ("zero1", 4, 3),
        # Parameters and two states: Inductor's step makes nothing on the way. Its kernels run once for both ranks.
        ("compiled", 2, 3),
        ("compiled_rates", 2, 0),  # its last step is different
    ],
)
def test_ranks_that_hold_the_same_part_keep_it_once(
    world: World, program: str, ranks: int, times: int
) -> None:
    """Of ranks on one GPU only some are replicas of one another."""
    apart = Job(world, "apart", f"--gpus {ranks}", program, ranks=ranks)
    expected = apart.results()
    shared = ",".join(["0"] * ranks)
    job = Job(
        world, "together", f"--gpu {shared}", program,
        mode=f"{TEST_MODE},patient", hold=True, ranks=ranks,
    )  # fmt: skip
    job.wait()
    counts = job.counts()
    assert job.results() == expected
    # Not that nothing was `different`: ranks with other parts of the same sizes may meet too (twice in threed on an idle machine).
    assert abs(counts["saved_bytes"] / SHARDED_BYTES - times) < 0.05 * max(times, 1), counts
    assert counts["squashed"] > 0


class Counted:
    """tests/subjects/counted.py, on one GPU."""

    def __init__(self, world: World, ranks: int) -> None:
        self._world, self._ranks, self._folder = world, ranks, world.home / f"counted-{ranks}"
        self._folder.mkdir()
        self._name = f"of-{ranks}"
        script = (sys.executable, str(SUBJECTS / "counted.py"), str(ranks), str(self._folder))
        gpus = ",".join(["0"] * ranks)
        self._job = world.run(*script, name=self._name, options=("--gpu", gpus),
                              DEVPROXY_SPLICING=f"{TEST_MODE},patient")  # fmt: skip
        self._sum = self._go_to("warm")

    def _go_to(self, stage: str) -> tuple[int, int]:
        """Launches and those of them that were squashed, since the job's begin."""

        def stand() -> bool:
            assert self._job.poll() is None, self._world.tail()
            return len(list(self._folder.glob(f"at-{stage}-*"))) == self._ranks

        self._world.wait(stand, 90, stage)
        servers = self._world.ctl_json("status", self._name)["servers"]
        assert isinstance(servers, list)
        launched = sum(server["totals"]["launches"] for server in servers)
        splicing = servers[0]["splicing"]
        (self._folder / f"go-{stage}").touch()
        return launched, splicing["squashed"] if splicing else 0

    def until(self, stage: str) -> tuple[int, int]:
        """Those since the stage before: launches that were executed, and squashed ones."""
        before, self._sum = self._sum, self._go_to(stage)
        squashed = self._sum[1] - before[1]
        return self._sum[0] - before[0] - squashed, squashed


def test_forward_and_backward_run_at_each_rank_and_the_step_once(world: World) -> None:
    """The kernels of a GPT's steps, counted: nothing is left out but the optimizer's, and of these all but one rank's."""
    one, all_ranks = Counted(world, 1), Counted(world, RANKS)
    for step in range(3):
        executed, _ = one.until(f"backward-{step}")
        assert executed > 50
        assert all_ranks.until(f"backward-{step}") == (RANKS * executed, 0)
        window, _ = one.until(f"step-{step}")
        assert window >= 8
        assert all_ranks.until(f"step-{step}") == (window, (RANKS - 1) * window)


def test_splicing_can_be_switched_off(world: World) -> None:
    job = Job(world, "off", "--gpu 0,0,0,0", "fused", mode="off", hold=True)
    job.wait()
    assert job.counts() is None
    job.results()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("seed", range(4))
def test_images_and_restores_while_ranks_are_spliced(world: World, seed: int) -> None:
    """An image of spliced ranks holds what each of them sees, and comes back on one GPU or on four."""
    dice = random.Random(seed)
    programs = ["plain", "fused", "gradients_stay", "average", "graph"]
    expected = Job(world, "apart", "--gpus 4", *programs).results()
    job = Job(world, "cut", f"--gpu 0,0,0,0 --store {world.home}/store", *programs, hold=True)
    world.wait(lambda: job.ended(dice.choice(programs[:4])), 90, "a program")
    assert job.counts(moving=True)["squashed"] > 0
    world.ctl("checkpoint", "cut")
    world.ctl("suspend", "cut")
    world.ctl("resume", "cut", "--gpu", dice.choice(["0,0,0,0", "0,1,2,3", "1,1,0,0"]))
    job.wait()
    assert job.results() == expected


def test_a_rank_that_is_killed_takes_nothing_from_the_others(world: World) -> None:
    """Those that are left go on with the contents that they shared with it."""
    env = world.env | {"DEVPROXY_SPLICING": f"{TEST_MODE},patient"}
    run = [sys.executable, "-m", "devproxy.cli.run", "--device", "soft"]
    outputs = []
    for name, gpus in (("apart", "0,1,2"), ("together", "0,0,0")):
        gate = world.home / f"gate-{name}"
        job = subprocess.Popen(
            [*run, "--name", name, "--gpu", gpus, "--", sys.executable, str(SUBJECTS / "unlike_killed.py"), str(gate)],
            env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        world.wait(lambda gate=gate: len(list(world.home.glob(f"{gate.name}-*"))) == 3, 90, "ranks")  # type: ignore[misc]
        if name == "together":
            (server, *_) = world.ctl_json("status", name)["servers"]  # type: ignore[misc]
            assert server["splicing"]["saved_bytes"] > 0  # else there is nothing to take
        gate.touch()
        out, errors = job.communicate(timeout=120)
        assert job.returncode == 0, errors[-2000:]
        outputs.append(out)
    assert outputs[0] == outputs[1] and len(outputs[0].split()) == 2


def test_a_word_that_splicing_does_not_know_is_refused(world: World) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "devproxy.cli.run", "--device", "soft", "--gpu", "0,0", "--", "true"],
        env=world.env | {"DEVPROXY_SPLICING": "guard,of"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "DEVPROXY_SPLICING: 'of' is none of on, off, guard, eager and patient" in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1


class Tight:
    """tests/subjects/tight.py: what its ranks have fits on one GPU only where most of it is there once."""

    MEMORY = 500 << 20  # bytes; four ranks take 896 MiB, of which 3 x 144 MiB are other ranks' too

    def __init__(self, world: World, sets: int = 1) -> None:
        self._sets = sets
        self._world, self.folder = world, world.home / "tight"
        self.folder.mkdir(exist_ok=True)
        (self.folder / "hold").touch()

    def start(self, mode: str, *gpus: str) -> subprocess.Popen[bytes]:
        return self._world.run(
            sys.executable, str(SUBJECTS / "tight.py"), str(RANKS), str(self.folder), str(self._sets),
            options=(*(gpus or ("--gpus", str(RANKS))), "--gpu-memory", str(self.MEMORY)),
            DEVPROXY_SPLICING=mode, TIGHT_HOLD="1",
        )  # fmt: skip

    def wait(self, what: str) -> None:
        self._world.wait(lambda: len(list(self.folder.glob(f"{what}-*"))) == RANKS, 90, what)

    def server(self) -> dict[str, dict[str, int]]:
        servers = self._world.ctl_json("status", "j")["servers"]
        assert isinstance(servers, list)
        server: dict[str, dict[str, int]] = servers[0]
        return server

    def digests(self) -> list[str]:
        return [(self.folder / f"digest-{rank}").read_text() for rank in range(RANKS)]


def test_ranks_come_to_a_gpu_on_which_they_fit_only_spliced(world: World) -> None:
    """By a resize and by an image; and there they stay spliced, from the first step on."""
    tight = Tight(world)
    job = tight.start("on,guard,patient")
    tight.wait("at-gate")
    world.ctl("checkpoint", "j")
    world.ctl("resize", "j", "--gpus", "0,0,0,0")
    moved = tight.server()
    # Of three ranks, parameters and two states of three layers; pages at their edges are not.
    saved = 0.99 * 3 * 3 * 3 * 4 * 2048 * 2048
    assert moved["splicing"]["saved_bytes"] >= saved
    assert moved["ledger"]["taken"] > tight.MEMORY >= moved["ledger"]["used"]
    shown = world.ctl("status", "j").stdout
    assert "taken, 432 MiB of it kept once; with other jobs" in shown, shown

    def through() -> list[str]:
        (tight.folder / "go").touch()
        tight.wait("ended")
        counts = tight.server()["splicing"]
        assert counts["squashed"] == 5 * (RANKS - 1) and counts["broken"] == 0, counts
        assert counts["saved_bytes"] >= saved
        (tight.folder / "hold").unlink()
        tight.wait("digest")
        return tight.digests()

    first = through()
    assert world.end_of(job) == 0, world.tail()
    for old in tight.folder.glob("*-[0-3]"):
        old.unlink()
    (tight.folder / "go").unlink()
    (tight.folder / "hold").touch()
    world.restore("--gpu", "1,1,1,1")
    assert tight.server()["splicing"]["saved_bytes"] >= saved
    assert through() == first


def test_a_gpu_that_another_job_has_filled_is_refused(world: World) -> None:
    """Before anything stops: one line."""
    tight = Tight(world)
    tight.start("off")
    tight.wait("at-gate")
    used = tight.server()["memory"]["used"]
    assert used
    hold = "import time, torch; x = torch.zeros(90 << 20, device='cuda'); print('holds', flush=True); time.sleep(100)"
    run = (
        sys.executable,
        "-m",
        "devproxy.cli.run",
        "--device",
        "soft",
        "--name",
        "other",
        "--gpu",
        "5",
    )
    other = subprocess.Popen(
        [*run, "--gpu-memory", "400MiB", "--", sys.executable, "-c", hold],
        env=world.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert other.stdout is not None and other.stdout.readline() == "holds\n"
        done = world.ctl("resize", "j", "--gpus", "5,5,5,5", check=False)
        assert done.returncode == 2, done.stderr
        assert "cut" not in done.stderr, done.stderr
        line = done.stderr.splitlines()[-1]
        assert "other jobs leave" in line and "the job continues" in line
    finally:
        other.kill()
        other.wait()


def test_what_does_not_fit_is_refused_and_the_job_goes_on(world: World) -> None:
    tight = Tight(world)
    job = tight.start("off")
    tight.wait("at-gate")
    done = world.ctl("resize", "j", "--gpus", "0,0,0,0", check=False)
    assert done.returncode != 0
    assert "GPU 0 of this machine has" in done.stderr.splitlines()[-1]
    assert "the job continues on its old GPU" in done.stderr.splitlines()[-1]
    assert world.ctl_json("status", "j")["gpus"] == [0, 1, 2, 3]
    assert tight.server()["ledger"]["used"] == tight.server()["ledger"]["taken"]
    world.ctl("resize", "j", "--gpus", "0,0,1,1")  # these fit, though GPU 0 had one of them before
    (tight.folder / "go").touch()
    tight.wait("ended")
    (tight.folder / "hold").unlink()
    assert world.end_of(job) == 0, world.tail()


def test_ranks_that_hold_the_same_go_together(world: World) -> None:
    """Each of two ranks holds a part of the model, and there are two of each: only they can be spliced."""
    expected = Tight(world, sets=2)
    job = expected.start("on")
    (expected.folder / "go").touch()
    (expected.folder / "hold").unlink()
    assert world.end_of(job) == 0, world.tail()
    alone = expected.digests()
    for old in expected.folder.iterdir():
        old.unlink()

    tight = Tight(world, sets=2)
    job = tight.start("on,guard,patient")
    tight.wait("at-gate")
    world.ctl("resize", "j", "--gpus", "6,6,1,1")  # what a guess would be, and wrong
    done = world.ctl("resize", "j", "--onto", "6,1")
    assert "GPU 6, 1, 6, 1 instead: ranks that hold the same go together" in done.stderr
    assert world.ctl_json("status", "j")["gpus"] == [6, 1, 6, 1]
    saved = 0.99 * 3 * 3 * 4 * 2048 * 2048  # of one rank, on each GPU
    servers = world.ctl_json("status", "j")["servers"]
    assert isinstance(servers, list)
    assert all(2 * saved > server["splicing"]["saved_bytes"] >= saved for server in servers)
    again = world.ctl_json("resize", "j", "--onto", "1,6")
    assert again["still_s"] == 0 and again["gpus"] == [6, 1, 6, 1]
    (tight.folder / "go").touch()
    tight.wait("ended")
    assert tight.server()["splicing"]["squashed"] == 5
    (tight.folder / "hold").unlink()
    assert world.end_of(job) == 0, world.tail()
    assert tight.digests() == alone


def test_a_job_starts_where_it_fits_only_spliced(world: World) -> None:
    """Each rank may use the GPU that it was told of, whoever else is there; what is above the machine's GPU is shown."""
    tight = Tight(world)
    job = tight.start("on,guard,patient", "--gpu", "0,0,0,0")
    tight.wait("at-gate")
    first = tight.server()["ledger"]
    (tight.folder / "go").touch()
    tight.wait("ended")
    last = tight.server()["ledger"]
    assert first["taken"] > tight.MEMORY and last["used"] <= tight.MEMORY, (first, last)
    (tight.folder / "hold").unlink()
    assert world.end_of(job) == 0, world.tail()
