# SPDX-License-Identifier: Apache-2.0
"""Jobs of many ranks on fewer GPUs, and on more again, while they run: the same numbers, each step once, the same
processes."""

from __future__ import annotations

import random
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.checkpoint import ways
from tests.checkpoint.test_ranks import check, command, disturb, run_freely, training
from tests.checkpoint.world import ROOT, SUBJECTS, World
from tests.integration.test_programs import compile_c


def resize(world: World, gpus: list[int]) -> dict[str, object]:
    return world.ctl_json("resize", "j", "--gpus", ",".join(map(str, gpus)))


def placement(dice: random.Random, ranks: int, most: int) -> list[int]:
    """As many GPUs as the job has, `most` of the machine's at most."""
    names = dice.sample(range(8), most)
    return [dice.choice(names) for _ in range(ranks)]


def python(program: str) -> tuple[str, ...]:
    return (sys.executable, "-c", program)


def servers(world: World) -> list[psutil.Process]:
    return [p for p in world.processes() if p.name() == "devproxy-server"]


def job_processes(world: World) -> set[tuple[int, float]]:
    """Process ids and start times of what the user started."""
    return {
        (p.pid, p.create_time())
        for p in world.processes()
        if p.name().startswith(("python", "pt_")) and "devproxy" not in " ".join(p.cmdline()[:2])
    }


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("ranks", "gpus", "options"),
    [
        (4, 4, ()),
        (7, 7, ()),
        (8, 2, ()),
        (2, 2, ("--chaos", "5")),
        (4, 4, ("--barrier", "takeback")),
    ],
)
def test_resizes_at_random_moments(
    world: World, ranks: int, gpus: int, options: tuple[str, ...]
) -> None:
    dice = random.Random(f"{ranks} {gpus} {options}")
    expected = world.undisturbed(*command(ranks), gpus=gpus)
    job = world.run(*command(ranks), options=("--gpus", str(gpus), *options))
    world.wait_step(2)
    before = job_processes(world)
    assert len(before) >= ranks
    for at in sorted(dice.sample(range(3, 90), 10)):
        run_freely(world, at)
        to = placement(dice, gpus, dice.randrange(1, gpus + 1))
        answer = resize(world, to)
        assert answer["gpus"] == to
        assert len(servers(world)) == len(set(to))
    assert job_processes(world) == before
    assert world.end_of(job) == 0, world.tail()
    check(world, expected)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("way", ways.WAYS)
def test_training_shrinks_and_grows(world: World, way: str) -> None:
    """4 to 1 to 3 to 2 to 4, with an image on the way that comes back on one GPU after kill -9 of everything. Whatever can
    be spliced is, and what is said of it is compared with the truth (docs/design.md, Replica splicing)."""
    dice = random.Random(way)
    world.env["DEVPROXY_SPLICING"] = "eager,guard"
    expected = world.undisturbed(*training(way), gpus=4)
    world.run(*training(way), options=("--gpus", "4"))
    world.wait_step(dice.randrange(2, 10), timeout_s=120)
    world.until(ways.WAYS[way].steps - 1)
    for to in ([0, 0, 0, 0], [1, 0, 2, 2]):
        resize(world, to)
        time.sleep(dice.random())
    disturb(world, "checkpoint", dice, 4)
    assert world.kill_everything()
    world.restore("--gpu", "3,3,3,3")
    for to in ([0, 1, 1, 0], [0, 1, 2, 3]):
        resize(world, to)
        time.sleep(dice.random())
    world.wait_end("digest")
    assert len(world.nonces()) == 1, world.tail()
    assert world.digest() == expected


def refused(world: World, *words: str, job: str = "j") -> str:
    """One line that says why."""
    done = world.ctl("resize", job, *words, check=False)
    assert done.returncode == 2, done
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_kernels_of_a_shared_gpu_take_turns(world: World) -> None:
    """On four GPUs kernels run side by side; on one never, nor where two share one and two another."""
    module, folder = world.home / "turns.so", world.home
    include = ROOT / "devproxy" / "hal" / "host_module" / "include"
    compile_c(module, "-shared", "-fPIC", "-I", include, SUBJECTS / "turns.c")
    lock, rounds = folder / "lock", folder / "rounds"
    lock.touch()

    def allow(number: int) -> None:
        rounds.with_suffix(".part").write_text(str(number))
        rounds.with_suffix(".part").rename(rounds)

    allow(0)
    subject = (sys.executable, str(SUBJECTS / "turns.py"), str(module), str(folder), "4")
    job = world.run(*subject, options=("--gpus", "4"))

    def together(number: int) -> int:
        """How many kernels of that round found another one running."""
        before = lock.stat().st_size
        allow(number)
        notes = [folder / str(rank) for rank in range(4)]
        world.wait(
            lambda: all(n.exists() and n.read_text() == str(number) for n in notes),
            60,
            f"round {number}",
        )
        return lock.stat().st_size - before

    assert together(1) > 10
    resize(world, [3, 3, 3, 3])
    assert together(2) == 0
    servers_now = world.ctl_json("status", "j")["servers"]
    assert isinstance(servers_now, list)
    assert min(server["switches"] for server in servers_now) > 10
    resize(world, [1, 1, 2, 2])
    assert together(3) > 10  # two GPUs, of which each has a kernel of its own
    resize(world, [0, 0, 0, 0])
    assert together(4) == 0
    allow(-1)
    assert job.wait(60) == 0, world.tail()


@pytest.mark.every
def test_what_it_says_and_refuses(world: World) -> None:
    expected = world.undisturbed(*command(4), gpus=4)
    job = world.run(*command(4), options=("--gpus", "4"))
    run_freely(world, 3)
    for gpus, says in (
        ("0,0,0", "sees 4 GPU(s), and goes on to: --gpus needs 4 numbers, 3 given"),
        ("0,0,0,0,1", "needs 4 numbers, 5 given"),
        ("", "'' is not a GPU"),
        ("0,0,0,x", "'x' is not a GPU"),
    ):
        assert says in refused(world, "--gpus", gpus)
    assert "no job 'nobody'" in refused(world, "--gpus", "0", job="nobody")
    assert resize(world, [2, 2, 0, 2])["still_s"]
    assert resize(world, [2, 2, 0, 2])["still_s"] == 0  # nothing was to do
    shown = world.ctl("status", "j").stdout
    assert "GPUs of this machine: 2, 2, 0, 2" in shown
    assert re.search(r"GPU 2 of this machine, shared; \d+ switches", shown), shown
    assert re.search(r"GPU 0 of this machine *$", shown, re.M), shown
    assert world.end_of(job) == 0, world.tail()
    check(world, expected)


def test_two_at_once(world: World) -> None:
    """One is done, the other says what is under way; whichever it is, the job is where that one said."""
    expected = world.undisturbed(*command(4), gpus=4)
    job = world.run(*command(4), options=("--gpus", "4"))
    run_freely(world, 3)
    with ThreadPoolExecutor(2) as pool:
        wanted = ("0,0,0,0", "1,1,1,1")
        done = list(
            pool.map(lambda to: world.ctl("resize", "j", "--gpus", to, check=False), wanted)
        )
    codes = [one.returncode for one in done]
    assert 0 in codes
    for one in done:
        assert one.returncode in (0, 2)
        assert one.returncode == 0 or "a resize of it is under way" in one.stderr, one.stderr
    last = world.ctl_json("status", "j")["gpus"]
    assert last in [[0] * 4, [1] * 4]
    assert world.end_of(job) == 0, world.tail()
    check(world, expected)


def test_the_same_one_twice_at_once(world: World) -> None:
    """Both hear how it ends, and it was done once."""
    expected = world.undisturbed(*command(4), gpus=4)
    job = world.run(*command(4), options=("--gpus", "4"))
    run_freely(world, 3)
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: resize(world, [1, 1, 1, 1]), range(3)))
    # One that came when it was over found nothing to do.
    moved = [one for one in done if one["from_gpus"] == [0, 1, 2, 3]]
    assert moved and all(one == moved[0] for one in moved)
    assert all(one["still_s"] == 0 for one in done if one not in moved)
    assert world.end_of(job) == 0, world.tail()
    check(world, expected)


def test_a_full_gpu_is_refused(world: World) -> None:
    """Two do not fit where one does: the job goes on where it was."""
    go = world.home / "go"
    program = (
        "import pathlib, time, torch\n"
        "held = [torch.full((15 << 20,), i + 1.0, device=f'cuda:{i}') for i in range(2)]\n"  # 60 MiB
        "print('step 1', flush=True)\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.05)\n"
        "print(*(float(one.sum()) for one in held), flush=True)\n"
    )
    job = world.run(*python(program), options=("--gpus", "2", "--gpu-memory", "100MiB"))
    world.wait_end("step 1")
    said = refused(world, "--gpus", "5,5")
    assert (
        "GPU 5 of this machine has 100 MiB, and the job's GPU 0, 1 need at least 120 MiB there"
        in said
    )
    assert "the job continues" in said
    assert world.ctl_json("status", "j")["gpus"] == [0, 1]
    resize(world, [5, 6])
    go.touch()
    assert job.wait(60) == 0, world.tail()
    assert f"{15 << 20}.0 {30 << 20}.0" in world.tail()


def test_a_shared_server_that_dies_ends_the_job_by_name(world: World) -> None:
    expected = world.undisturbed(*training("ddp", 2), gpus=2)
    job = world.run(*training("ddp", 2), options=("--gpus", "2"))
    run_freely(world, 3)
    resize(world, [1, 1])
    world.ctl("checkpoint", "j")
    (both,) = servers(world)
    both.kill()
    assert job.wait(60) != 0
    assert "the server of GPU 0, 1 was ended by signal 9" in world.tail(), world.tail()
    world.restore("--gpu", "2,2")
    world.wait_end("digest")
    assert world.digest() == expected


def test_identity_of_a_gpu_is_the_jobs(world: World) -> None:
    """Names and uuids stay, wherever the ranks are; several never look like one."""
    said = world.home / "uuids"
    program = (
        "import sys, time, torch, pathlib\n"
        f"out = pathlib.Path({str(said)!r})\n"
        "def note(n):\n"
        "    p = [torch.cuda.get_device_properties(i) for i in range(3)]\n"
        "    with out.open('a') as f: f.write(f\"{n} {[str(q.uuid) for q in p]}\\n\")\n"
        "note(0)\n"
        "while not out.with_suffix('.go').exists(): time.sleep(0.05)\n"
        "import subprocess\n"
        "note(1)\n"
        "subprocess.run([sys.executable, '-c', "
        "'import torch; print(1, [str(torch.cuda.get_device_properties(i).uuid) for i in range(3)])'], stdout=out.open('a'))\n"
    )
    job = world.run(*python(program), options=("--gpus", "3"))
    world.wait(said.exists, 60, "the job's first look")
    resize(world, [1, 1, 1])
    said.with_suffix(".go").touch()
    assert job.wait(100) == 0, world.tail()
    first, *others = [line.split(" ", 1)[1] for line in said.read_text().splitlines()]
    assert len(set(re.findall(r"'([^']+)'", first))) == 3
    assert others == [first, first]
