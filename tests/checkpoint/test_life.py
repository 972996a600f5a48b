# SPDX-License-Identifier: Apache-2.0
"""Checkpoint, restore, suspend, resume, migrate of a training job, from outside: the same numbers, each step once."""

from __future__ import annotations

import json
import re
import signal
import sys
import time

import pytest

from tests.checkpoint.world import SUBJECTS, World, without_pauses

STEPS = 60
GPT = (
    sys.executable,
    str(SUBJECTS / "gpt.py"),
    "--steps",
    str(STEPS),
    "--seconds-per-step",
    "0.25",
)
RESNET = (
    sys.executable,
    str(SUBJECTS / "resnet.py"),
    "--steps",
    "30",
    "--seconds-per-step",
    "0.25",
)

SLOW = (sys.executable, str(SUBJECTS / "resnet.py"), "--steps", "30", "--seconds-per-step", "0.3")


@pytest.fixture(scope="module")
def undisturbed() -> dict[tuple[str, ...], list[str]]:
    return {}


def expected(undisturbed: dict[tuple[str, ...], list[str]], command: tuple[str, ...]) -> list[str]:
    """The digest of a run that nobody disturbs; made once per command."""
    if command not in undisturbed:
        world = World()
        try:
            job = world.run(*without_pauses(command), name="alone", log="alone")
            assert job.wait(200) == 0, world.tail("alone")
            undisturbed[command] = world.digest("alone")
            assert len(undisturbed[command]) == 1
        finally:
            world.close()
    return undisturbed[command]


def check_whole(
    world: World, command: tuple[str, ...], steps: int, undisturbed, log: str = "log"
) -> None:
    """The proof: one nonce, each step once and in order, and the digest of an undisturbed run."""
    assert len(world.nonces(log)) == 1, world.tail(log)
    assert world.steps(log) == list(range(world.steps(log)[0], world.steps(log)[0] + steps)), (
        world.tail(log)
    )
    assert world.digest(log) == expected(undisturbed, command)


def test_a_checkpoint_does_not_disturb(world: World, undisturbed) -> None:
    job = world.run(*GPT)
    world.wait_step(5)
    for _ in range(2):
        facts = world.ctl_json("checkpoint", "j")
        assert facts["device_bytes"] > 1 << 20
        assert facts["still_s"] < 20
    assert world.end_of(job) == 0, world.tail()
    check_whole(world, GPT, STEPS, undisturbed)
    assert [image["whole"] for image in world.images()] == [True, True]


def test_an_image_has_nothing_that_the_program_has_freed(world: World) -> None:
    """The client keeps small freed blocks for later, but for while a cut waits for the least memory."""
    held, small = 32 << 20, 10 << 20
    command = (sys.executable, str(SUBJECTS / "waves.py"), *("--seconds-per-step", "0.02"))
    job = world.run(*command, "--steps", "400", TEST_GATE="")
    world.wait_step(10)
    at_once = world.ctl_json("checkpoint", "j", "--cut-wait", "0")["device_bytes"]
    waited = [world.ctl_json("checkpoint", "j")["device_bytes"] for _ in range(3)]
    assert isinstance(at_once, int) and at_once > held + small // 2  # else it keeps none
    assert all(isinstance(n, int) and held <= n < held + small // 10 for n in waited), waited
    assert world.end_of(job) == 0, world.tail()


@pytest.mark.every
def test_restore_after_everything_was_killed(world: World, undisturbed) -> None:
    world.run(*GPT)
    world.wait_step(10)
    facts = world.ctl_json("checkpoint", "j")
    at_cut = max(world.steps())
    world.wait_step(at_cut + 8)
    assert world.kill_everything() >= 4
    world.ctl("restore", str(facts["id"]), "--store", str(world.store), "--output", "log")
    world.wait_end()
    check_whole(world, GPT, STEPS, undisturbed)


def test_a_restart_would_be_noticed(world: World, undisturbed) -> None:
    """The same proof fails when the job is started again instead of restored."""
    world.run(*GPT)
    world.wait_step(10)
    world.kill_everything()
    world.run(*GPT)
    world.wait_end()
    with pytest.raises(AssertionError):
        check_whole(world, GPT, STEPS, undisturbed)


@pytest.mark.every
def test_suspend_and_resume(world: World, undisturbed) -> None:
    job = world.run(*GPT)
    world.wait_step(10)
    world.ctl("suspend", "j")
    assert not [
        p
        for p in world.processes()
        if "gpt.py" in " ".join(p.cmdline()[:4]) and "run" not in " ".join(p.cmdline())
    ]
    assert not [p for p in world.processes() if "devproxy-server" in p.cmdline()[0]]
    before = world.steps()
    world.ctl("resume", "j")
    assert world.end_of(job) == 0, world.tail()
    assert world.steps()[: len(before)] == before
    check_whole(world, GPT, STEPS, undisturbed)


def server(world: World) -> tuple[int, str]:
    """(process id, the GPU of the machine) of the only server."""
    (found,) = [p for p in world.processes() if p.cmdline()[0].endswith("/devproxy-server")]
    line = found.cmdline()
    return found.pid, line[line.index("--physical-gpu") + 1]


@pytest.mark.every
def test_migrate_to_another_gpu(world: World, undisturbed) -> None:
    job = world.run(*GPT)
    world.wait_step(10)
    seen = [server(world)]
    for gpu in (3, 1):
        world.ctl("migrate", "j", "--to", str(gpu))
        assert world.ctl_json("status", "j")["gpus"] == [gpu]
        seen.append(server(world))
        world.wait_step(max(world.steps()) + 2)  # served by it
    assert [gpu for _, gpu in seen] == ["0", "3", "1"]
    assert len({pid for pid, _ in seen}) == 3, "the same process serves"
    assert world.end_of(job) == 0, world.tail()
    check_whole(world, GPT, STEPS, undisturbed)


def test_restore_on_another_gpu_under_another_name(world: World, undisturbed) -> None:
    job = world.run(*GPT)
    world.wait_step(10)
    facts = world.ctl_json("checkpoint", "j")
    refused = world.ctl("restore", str(facts["id"]), "--store", str(world.store), check=False)
    assert refused.returncode == 2
    assert "--name" in refused.stderr
    world.ctl(
        "restore",
        str(facts["id"]),
        "--store",
        str(world.store),
        "--gpu",
        "2",
        "--name",
        "twin",
        "--output",
        "twin",
    )
    assert world.end_of(job) == 0
    world.wait_end(log="twin")
    check_whole(world, GPT, STEPS, undisturbed)
    twin = world.steps("twin")
    assert twin == list(range(twin[0], STEPS + world.steps()[0])), world.tail("twin")
    assert world.nonces("twin") == world.nonces()
    assert world.digest("twin") == world.digest()


def steps_in(world: World, image: str) -> int:
    """How many steps the job had said at the cut: what its log was long then."""
    body = json.loads((world.store / "images" / image / "manifest.json").read_text())["body"]
    length = body["trees"][0]["stdio"]["outputs"][0]["file"]["bytes"]
    return len(re.findall(rb"^\S+ step \d+\b", (world.home / "log").read_bytes()[:length], re.M))


def test_periodic_images_and_keep(world: World, undisturbed) -> None:
    """Each eighth step makes an image and no other does; the job takes a step when it is allowed to."""

    def kept() -> list[str]:
        return [str(i["id"]) for i in world.images()] if world.store.exists() else []

    def allow(step: int) -> None:
        world.until(step)
        world.wait(lambda: max(world.steps(), default=0) >= step, 90, f"step {step}")

    world.until(7)
    job = world.run(*SLOW, options=("--checkpoint-every", "8steps", "--keep", "2"))
    taken: list[str] = []
    for due in (8, 16, 24):
        allow(due - 1)
        assert kept() == taken[-2:]  # none before it is due
        allow(due)
        world.wait(lambda: set(kept()) - set(taken), 60, f"image {due}")
        (new,) = set(kept()) - set(taken)
        taken.append(new)
        # The step's work is done and counted some instants before it is said.
        assert steps_in(world, taken[-1]) in (due - 1, due)
        world.wait(lambda: len(kept()) <= 2, 60, "the oldest one's removal")
        assert kept() == taken[-2:]
    assert world.end_of(job) == 0, world.tail()
    assert kept() == taken[1:]
    check_whole(world, SLOW, 30, undisturbed)


def test_killed_in_the_middle_of_periodic_images(world: World, undisturbed) -> None:
    world.run(*RESNET, options=("--checkpoint-every", "500ms"))
    world.wait_step(20)
    world.kill_everything()
    world.ctl("restore", "j", "--store", str(world.store), "--output", "log", "--wait")
    check_whole(world, RESNET, 30, undisturbed)


def test_kill(world: World) -> None:
    job = world.run(*GPT)
    world.wait_step(3)
    world.ctl("kill", "j", "--signal", "15")
    assert job.wait(30) == 128 + signal.SIGTERM


def test_monotonic_time_stands_still_while_the_job_is_suspended(world: World) -> None:
    """A timer of 2 s does not see a suspend of 4 s, nor the time between kill -9 and a restore."""
    program = (
        "import os, time\n"
        "begin = last = time.monotonic()\n"
        "largest, ended = 0.0, False\n"
        "while not ended:\n"
        "    ended = os.path.exists('end')\n"
        "    time.sleep(0.02)\n"
        "    now = time.monotonic(); largest = max(largest, now - last); last = now\n"
        "    print(f'{now - begin:.2f}', flush=True)\n"
        "print(f'largest {largest:.2f}', flush=True)\n"
    )

    def told(seconds: float) -> bool:
        return any(float(word) >= seconds for word in re.findall(r"^[\d.]+$", world.text(), re.M))

    world.run(sys.executable, "-c", program)
    world.wait(lambda: told(1), 30)
    world.ctl("suspend", "j")
    time.sleep(4)
    world.ctl("resume", "j")
    world.wait(lambda: told(2), 30)
    world.ctl("checkpoint", "j")
    assert world.kill_everything()
    time.sleep(3)
    (world.home / "end").touch()
    world.restore("--wait")
    largest = float(world.text().split("largest ")[1])
    assert largest < 2.5, world.tail()
