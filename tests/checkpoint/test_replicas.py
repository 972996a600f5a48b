# SPDX-License-Identifier: Apache-2.0
"""What several ranks hold alike lies in the staging folder once, and comes back to each of them."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from devproxy.checkpoint import staged
from tests.checkpoint.test_ranks import disturb
from tests.checkpoint.world import SUBJECTS
from tests.fault.scene import Scene

STEPS = 60
LIMIT = 1.1  # of one rank's device state
MIB = 8
# Of a rank's state, what is zero or repeats itself: it lies there once or not at all, also without other ranks.
EMPTY_BYTES = (MIB + 2) << 20


def command(ranks: int = 4, apart: int = 0) -> tuple[str, ...]:
    sizes = ("--ranks", str(ranks), "--mib", str(MIB), "--apart", str(apart))
    script = str(SUBJECTS / "replicas.py")
    return (sys.executable, script, "--steps", str(STEPS), "--seconds-per-step", "0.05", *sizes)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    made.hold()
    yield made
    made.close()


@dataclass(frozen=True)
class Staged:
    """Of device memory, while a verb stands: bytes on the file system, and bytes that the ranks hold."""

    taken: int
    held: list[int]

    @property
    def share(self) -> float:
        return self.taken / (max(self.held) - EMPTY_BYTES)


def look(folder: Path) -> Staged:
    dumps = sorted(folder.glob("gpu*.dev"))
    files = [*dumps, *folder.glob("*.refs"), *folder.glob(staged.INDEX)]
    return Staged(
        sum(file.stat().st_blocks * 512 for file in files), [file.stat().st_size for file in dumps]
    )


def at_point(scene: Scene, point: str, verb: Callable[[], object]) -> Staged:
    """The staging folder as it is when the verb passes that point; then the verb ends."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool, scene.paused_at(point) as wait:
        done = pool.submit(verb)
        wait()
        found = look(scene.folder / "staging")
        Path(f"{scene.fault}.paused").unlink()
        done.result()
    return found


def between_steps(scene: Scene, at: int) -> None:
    """Every rank stands before the step behind that one."""
    scene.until(at)
    scene.wait(lambda: bool(scene.steps()) and scene.steps()[-1] >= at, 120, f"step {at}")


def check(scene: Scene, expected: list[str]) -> None:
    assert scene.steps() == list(range(1, STEPS + 1)), scene.tail()
    assert scene.digest() == expected


@pytest.mark.parametrize(("ranks", "gpus"), [(4, 4), (4, 1)])
def test_replicas_lie_in_the_staging_folder_once(scene: Scene, ranks: int, gpus: int) -> None:
    expected = scene.undisturbed(*command(ranks), gpus=gpus)
    job = scene.run(*command(ranks), options=("--gpus", str(gpus)))
    between_steps(scene, 5)
    found = at_point(scene, "frozen", lambda: scene.ctl("checkpoint", "j"))
    assert len(found.held) == ranks
    assert min(found.held) > 3 * MIB << 20
    assert found.share <= LIMIT, found
    sizes = dict(scene.images()[-1])["sizes"]
    device = sizes["per_kind"]["device"]  # type: ignore[index]
    assert device["raw"] == sum(found.held)
    assert device["new"] <= 1.05 * max(found.held), device
    between_steps(scene, 9)
    found = at_point(
        scene, "migrate_start", lambda: scene.ctl("migrate", "j", "--to", ",".join(map(str, range(1, gpus + 1))))
    )  # fmt: skip
    assert found.share <= LIMIT, found
    between_steps(scene, 13)
    disturb(scene, "suspend", random.Random(0), gpus)
    assert scene.end_of(job) == 0, scene.tail()
    check(scene, expected)


def test_restore_after_everything_was_killed(scene: Scene) -> None:
    expected = scene.undisturbed(*command(), gpus=4)
    scene.run(*command(), options=("--gpus", "4"))
    between_steps(scene, 7)
    scene.ctl("checkpoint", "j")
    between_steps(scene, 10)
    assert scene.kill_everything()
    scene.restore("--gpu", "3,2,1,0")
    scene.wait_end("digest")
    assert scene.digest() == expected


def test_what_ranks_hold_apart_lies_there_too(scene: Scene) -> None:
    """Two ranks on each GPU, of whose state about half is their own; cut anywhere."""
    expected = scene.undisturbed(*command(apart=24), gpus=2)
    job = scene.run(*command(apart=24), options=("--gpus", "2"))
    between_steps(scene, 5)
    found = at_point(scene, "frozen", lambda: scene.ctl("checkpoint", "j"))
    shared = max(found.held) - EMPTY_BYTES - (24 << 20)
    assert 4 * (24 << 20) <= found.taken <= LIMIT * (shared + 4 * (24 << 20)), found
    dice = random.Random(2)
    scene.until(STEPS - 1)
    for verb in ("migrate", "checkpoint", "suspend"):
        # On a slow machine it stands before its last step already.
        scene.wait_step(min(max(scene.steps()) + dice.randrange(2, 6), STEPS - 1))
        disturb(scene, verb, dice, 2)
    assert scene.end_of(job) == 0, scene.tail()
    check(scene, expected)


def test_pending_commands(scene: Scene) -> None:
    """Rank 0 waits, the others have submitted what it owes: their state is cut in the middle of a step."""
    script = str(SUBJECTS / "ranks.py")
    line = (sys.executable, script, "--steps", str(STEPS), "--seconds-per-step", "0.05", "--ranks", "4")  # fmt: skip
    expected = scene.undisturbed(*line, gpus=4)
    scene.until(2)
    job = scene.run(*line, options=("--gpus", "4", "--barrier", "takeback"))
    for number, verb in enumerate(("checkpoint", "migrate", "suspend")):
        between_steps(scene, 4 + 4 * number)
        disturb(scene, verb, random.Random(number), 4)
    assert scene.end_of(job) == 0, scene.tail()
    check(scene, expected)


@pytest.mark.parametrize("action", ["error", "kill"])
def test_a_server_that_fails_in_the_middle(scene: Scene, action: str) -> None:
    """Others have references to blocks that never came: the dump fails as a whole, and the next one owes it nothing."""
    expected = scene.undisturbed(*command(2), gpus=2)
    job = scene.run(*command(2), options=("--gpus", "2"))
    between_steps(scene, 5)
    scene.ctl("checkpoint", "j")
    before = [str(image["id"]) for image in scene.images()]
    scene.arm(f"server_dump_mid:2:{action}")
    done = scene.ctl("checkpoint", "j", "--json", check=False)
    fired = scene.fired()
    scene.disarm()
    assert fired
    assert done.returncode != 0
    assert json.loads(done.stdout or done.stderr.splitlines()[-1])
    assert [str(image["id"]) for image in scene.images()] == before
    assert not (scene.folder / "staging").exists()
    if action == "kill":
        assert scene.kill_everything()
        scene.restore()
        scene.wait_end("digest")
        assert scene.digest() == expected
        return
    found = at_point(scene, "frozen", lambda: scene.ctl("checkpoint", "j"))
    assert found.share <= LIMIT, found
    between_steps(scene, 8)
    assert scene.kill_everything()
    scene.restore()
    scene.wait_end("digest")
    assert scene.digest() == expected
    del job
