# SPDX-License-Identifier: Apache-2.0
"""Scripts in the shape of each stack's own tutorial: unmodified behind devproxy, and through the life of a job.

What a life leaves (weights, the stack's own checkpoints, CSV and event files) must be what an undisturbed run leaves, byte
for byte but for the times in it; and an undisturbed run has the weights of a plain CPU process where no number is drawn
on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.living import matching
from tests.trainers.lives import Ended, Life, Script, plain

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
SCRIPTS = [
    Script("mnist_like", steps=150),
    Script("hf_trainer"),
    Script("hf_trainer", ("--workers", "2")),
    # Which ops autocast leaves in single precision is another list on the CPU.
    Script("accelerate_loop", ("--mixed", "bf16"), cpu=("--dropout", "0", "--mixed", "no")),
    Script("lightning_fit", steps=192),
    Script("lightning_fit", ("--workers", "2"), steps=192),
    Script("hydra_peft", cpu=()),
    Script("wandb_offline", cpu=()),
    Script("sb3_ppo", steps=20, cpu=None),
    Script("ignite_skorch", cpu=()),
    Script("ddp_gloo", launcher=TORCHRUN, cpu=()),
    Script("timm_train", steps=64),
]


@functools.cache
def undisturbed(script: Script) -> Ended:
    life = Life(script)
    try:
        life.hurry()
        assert life.start().wait(280) == 0, life.tail()
        return life.ended()
    finally:
        life.close()


@pytest.fixture
def life(script: Script) -> Iterator[Life]:
    made = Life(script)
    yield made
    made.close()


every = pytest.mark.parametrize("script", SCRIPTS, ids=str)


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s.cpu is not None], ids=str)
def test_equal_to_the_cpu(script: Script) -> None:
    assert script.cpu is not None
    script = replace(script, arguments=(*script.arguments, *script.cpu))
    assert undisturbed(script).digest == plain(script)


@every
def test_equal_from_run_to_run(script: Script, life: Life) -> None:
    life.hurry()
    assert life.start().wait(280) == 0, life.tail()
    life.ended().must_be(undisturbed(script))


def restored(life: Life) -> Ended:
    """From its last image after kill -9 of everything; to its end."""
    life.kill_everything()
    life.ctl("restore", "j", "--store", str(life.store), "--output", "log", "--wait", timeout_s=280)
    return life.ended()


@every
def test_killed_in_the_middle(script: Script, life: Life) -> None:
    life.start()
    life.reach(script.steps // 3)
    life.ctl("checkpoint", "j")
    life.reach(min(max(life.steps()) + 3, script.steps - 1))
    restored(life).must_be(undisturbed(script))


@every
def test_killed_right_after_its_start(script: Script, life: Life) -> None:
    """The image is taken while the stack is still being imported, or builds its model."""
    life.start()
    life.wait(lambda: "start " in life.text(), 60, "its start")
    life.ctl("checkpoint", "j")
    life.reach(2)
    restored(life).must_be(undisturbed(script))


@every
def test_killed_while_it_saves(script: Script, life: Life) -> None:
    """Images at once, one after the other, from the moment when a new file appears; one of them is within the write."""
    life.start()
    life.until(script.steps - 1)
    seen = set(matching(life.work, "**"))

    def saves() -> bool:
        new = [p for p in matching(life.work, "**") if p not in seen and "tfevents" not in p.name]
        return any(p.is_file() for p in new)

    life.wait(saves, 180, "its own checkpoint")
    life.ctl("checkpoint", "j")
    life.ctl("checkpoint", "j")
    restored(life).must_be(undisturbed(script))


@every
def test_suspend_and_resume(script: Script, life: Life) -> None:
    job = life.start()
    life.reach(script.steps // 4)
    life.ctl("suspend", "j")
    life.ctl("resume", "j")
    life.reach(script.steps // 2)
    life.ctl("suspend", "j")
    life.ctl("resume", "j")
    assert life.end_of(job) == 0, life.tail()
    life.ended().must_be(undisturbed(script))


@every
def test_migrated(script: Script, life: Life) -> None:
    job = life.start()
    for part, gpu in ((4, 1), (2, 0)):
        life.reach(script.steps // part)
        life.ctl("migrate", "j", "--to", str(gpu))
    assert life.end_of(job) == 0, life.tail()
    life.ended().must_be(undisturbed(script))


@every
def test_images_every_few_steps(script: Script, life: Life) -> None:
    job = life.start("--checkpoint-every", "20steps", "--cut-wait", "0")
    life.reach(script.steps // 2)
    life.committed(1)
    assert life.end_of(job) == 0, life.tail()
    life.ended().must_be(undisturbed(script))
