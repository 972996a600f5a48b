# SPDX-License-Identifier: Apache-2.0
"""The files that a job wrote, through an image, kill -9 of everything and a restore."""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from pathlib import Path

import pytest

from devproxy import config
from tests.checkpoint.world import SUBJECTS, World, without_pauses
from tests.integration.needs import missing
from tests.living import matching

STEPS = 40
FILES = (
    sys.executable,
    str(SUBJECTS / "files.py"),
    *("--steps", str(STEPS), "--seconds-per-step", "0.3"),
)

# It adds a line to cheap.txt in each step.
CHEAP = (
    sys.executable,
    str(SUBJECTS / "cheap.py"),
    *("--steps", str(STEPS), "--seconds-per-step", "0.3"),
)

# Relative paths, another working folder in the middle, a file above the limit, one that comes after the cut, records
# of which none may be torn: each is written whole, in one write.
WRITER = """
import os, sys
from tests.subjects import gate
steps, nonce = int(sys.argv[1]), os.urandom(8).hex()
os.makedirs("out", exist_ok=True)
log = open("out/log.txt", "a", buffering=1)
with open("out/large.bin", "wb") as f:
    f.write(b"a" * (3 << 20))
for step in range(1, steps + 1):
    if step == 3:
        os.makedirs("out/deeper", exist_ok=True)
        os.chdir("out/deeper")
    where = "." if step >= 3 else "out/deeper"
    os.makedirs(where, exist_ok=True)
    with open(os.path.join(where, f"made-{step}.txt"), "w") as f:
        f.write(str(step))
    with open(os.path.join(where, "last.tmp"), "w") as f:
        f.write(f"{step:08d}" * 1000)
    os.rename(os.path.join(where, "last.tmp"), os.path.join(where, "last.txt"))
    log.write(f"step {step}\\n")
    print(nonce, "step", step, "", flush=True)
    gate.before(step + 1, steps, 0.3)
print(nonce, "digest", open("/proc/self/cwd/last.txt").read()[:8], open("../log.txt").read().count("step"), flush=True)
"""

# As fast as it can, and each record whole: what an image holds of it is a prefix, and all files agree.
FLOOD = """
import os, time
nonce = os.urandom(8).hex()
a, b = open("a.bin", "wb", buffering=0), open("b.bin", "wb", buffering=0)
pair = os.open("pair.bin", os.O_RDWR | os.O_CREAT)
n = said = 0
while n % 50 or not os.path.exists("stop"):
    n += 1
    record = n.to_bytes(8, "little") * 512
    a.write(record)
    b.write(record)
    os.pwrite(pair, record, 0)
    os.pwrite(pair, record, 4096)
    if n % 50 == 0:
        said += 1
        print(nonce, "step", said, "", flush=True)
        time.sleep(0.02)
for name in ("a.bin", "b.bin"):
    data = open(name, "rb").read()
    assert len(data) == 4096 * n, (name, len(data), n)
    for i in range(n):
        assert data[4096 * i : 4096 * (i + 1)] == (i + 1).to_bytes(8, "little") * 512, (name, i)
assert open("pair.bin", "rb").read() == n.to_bytes(8, "little") * 1024
print(nonce, "digest whole", flush=True)
"""


# As a Go program does: past libc's open(), and the file stays open, so that neither the library nor fanotify sees it.
PAST_LIBC = """
import ctypes, os, sys
from tests.subjects import gate
steps, nonce = int(sys.argv[1]), os.urandom(8).hex()
syscall, openat, mmap = ctypes.CDLL(None).syscall, 257, 9
syscall.restype = ctypes.c_long
log = syscall(openat, -100, b"past.log", os.O_WRONLY | os.O_CREAT, 0o644)
table = syscall(openat, -100, b"past.bin", os.O_RDWR | os.O_CREAT, 0o644)
assert log > 0 and table > 0, (log, table)
os.write(table, bytes(steps + 1))
mapped = syscall(mmap, None, ctypes.c_long(4096), 3, 1, table, ctypes.c_long(0))
assert mapped > 0, mapped
os.close(table)
for step in range(1, steps + 1):
    os.write(log, f"step {step}\\n".encode())
    ctypes.memset(mapped + step, step, 1)
    print(nonce, "step", step, "", flush=True)
    gate.before(step + 1, steps, 0.3)
print(nonce, "digest whole", flush=True)
"""


@pytest.fixture(scope="module")
def digest() -> list[str]:
    alone = World()
    try:
        assert alone.run(*without_pauses(FILES)).wait(120) == 0, alone.tail()
        return alone.digest()
    finally:
        alone.close()


def checkpoint(world: World) -> tuple[str, int]:
    """(image, the last step that is surely in it)"""
    facts = world.ctl_json("checkpoint", "j")
    return str(facts["id"]), max(world.steps())


def restore(world: World, image: str) -> str:
    done = world.ctl("restore", image, "--store", str(world.store), "--output", "log", "--wait")
    return done.stdout + done.stderr + world.text()


def events(world: World) -> list[int]:
    """The steps in the job's event files, read from outside with TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (path,) = (world.home / "files-out" / "events").iterdir()
    return [e.step for e in EventFileLoader(str(path)).Load() if e.summary.value]


def check_whole(world: World, steps: int) -> None:
    assert "FAILED" not in world.text(), world.tail()
    assert len(world.nonces()) == 1, world.tail()
    assert world.steps() == list(range(1, steps + 1)), world.tail()


def said_anywhere(world: World) -> str:
    logs = (world.home / "state" / "logs").glob("*")
    return world.text() + "".join(p.read_text(errors="replace") for p in logs if p.is_file())


def test_somebody_else_edits_a_file_meanwhile(world: World, digest: list[str]) -> None:
    world.run(*FILES)
    world.wait_step(8)
    image, at = checkpoint(world)
    world.wait_step(at + 5)
    time.sleep(
        2.5
    )  # what changes in the job's last moments can be anybody's: then it is kept elsewhere
    world.kill_everything()
    out = world.home / "files-out"
    time.sleep(6.5)
    (out / "state.txt").write_text("somebody else's words")
    (out / "theirs.txt").write_text("not the job's")
    restore(world, image)
    check_whole(world, STEPS)
    assert world.digest() != digest  # theirs.txt is in the folder that the digest is over ...
    kept = [p for p in out.iterdir() if ".devproxy-kept-" in p.name]
    assert [p.name.split(".devproxy-kept-")[0] for p in kept] == ["state.txt"], list(out.iterdir())
    assert kept[0].read_text() == "somebody else's words"
    assert (out / "theirs.txt").read_text() == "not the job's"
    assert "state.txt was changed by somebody else" in said_anywhere(world)
    base = sqlite3.connect(out / "runs.db")
    assert base.execute("pragma integrity_check").fetchone() == ("ok",)
    assert base.execute("select count(*) from losses").fetchone() == (STEPS,)
    base.close()


def test_rolled_back_and_the_same_at_the_end(world: World, digest: list[str]) -> None:
    world.run(*FILES)
    world.wait_step(8)
    image, at = checkpoint(world)
    world.wait_step(at + 6)
    world.kill_everything()
    restore(world, image)
    check_whole(world, STEPS)
    assert world.digest() == digest
    assert events(world) == list(range(1, STEPS + 1))
    assert not [p for p in (world.home / "files-out").iterdir() if "devproxy" in p.name]


def test_the_older_of_two_images(world: World, digest: list[str]) -> None:
    world.run(*FILES)
    world.wait_step(5)
    older, _ = checkpoint(world)
    world.wait_step(max(world.steps()) + 4)
    newer, at = checkpoint(world)
    assert older != newer
    world.wait_step(at + 4)
    world.kill_everything()
    restore(world, older)
    check_whole(world, STEPS)
    assert world.digest() == digest


def test_the_newer_then_the_older(world: World, digest: list[str]) -> None:
    """Back and further back: the second restore starts from what the first one left."""
    world.run(*FILES)
    world.wait_step(5)
    older, _ = checkpoint(world)
    world.wait_step(max(world.steps()) + 4)
    newer, at = checkpoint(world)
    world.wait_step(at + 3)
    world.kill_everything()
    world.ctl("restore", newer, "--store", str(world.store), "--output", "log")
    world.wait_step(at + 3)
    world.kill_everything()
    restore(world, older)
    check_whole(world, STEPS)
    assert world.digest() == digest
    assert events(world) == list(range(1, STEPS + 1))


def test_suspended_and_edited(world: World, digest: list[str]) -> None:
    """While a job is suspended its files are not its own: an edit is kept, the job goes on with what it had."""
    job = world.run(*FILES)
    world.wait_step(8)
    world.ctl("suspend", "j")
    state = world.home / "files-out" / "state.txt"
    was = state.read_text()
    time.sleep(7)  # the supervisor notes the files every two seconds
    state.write_text("somebody else's words, while it slept")
    time.sleep(5)
    world.ctl("resume", "j")
    assert world.end_of(job) == 0, world.tail()
    check_whole(world, STEPS)
    kept = [p for p in state.parent.iterdir() if ".devproxy-kept-" in p.name]
    assert [p.read_text() for p in kept] == ["somebody else's words, while it slept"], was


def test_a_failed_restore_takes_no_edit_for_the_jobs(world: World) -> None:
    world.run(*FILES)
    world.wait_step(8)
    image, at = checkpoint(world)
    world.wait_step(at + 3)
    world.kill_everything()
    time.sleep(6.5)
    state = world.home / "files-out" / "state.txt"
    state.write_text("somebody else's words")
    failed = world.ctl(
        *("restore", image, "--store", str(world.store), "--output", "log"),
        check=False,
        DEVPROXY_FAULT="restore_files",
    )
    assert failed.returncode != 0
    assert state.read_text() == "somebody else's words"
    world.wait(lambda: not world.processes(), what="the end of the failed restore")
    restore(world, image)
    check_whole(world, STEPS)
    kept = [p for p in state.parent.iterdir() if ".devproxy-kept-" in p.name]
    assert [p.read_text() for p in kept] == ["somebody else's words"]


def test_relative_paths_a_large_file_and_one_made_after_the_cut(world: World) -> None:
    world.run(sys.executable, "-c", WRITER, "30", options=("--files-max", "1MiB"))
    world.wait_step(8)
    image, at = checkpoint(world)
    world.wait_step(at + 6)
    late = world.home / "out" / "deeper" / f"made-{max(world.steps()) - 1}.txt"
    assert late.exists()
    world.kill_everything()
    world.until(at + 1)
    with open(world.home / "out" / "large.bin", "ab") as large:
        large.write(b"more")
    world.ctl("restore", image, "--store", str(world.store), "--output", "log")
    assert max(world.steps()) < int(late.stem.removeprefix("made-")), world.tail()
    assert not late.exists()
    assert "large.bin" in said_anywhere(world)
    world.wait_end()
    check_whole(world, 30)
    assert f"digest {30:08d} 30" in world.text()
    assert os.path.getsize(world.home / "out" / "large.bin") == (3 << 20) + 4
    assert (world.home / "out" / "log.txt").read_text().count("\n") == 30
    assert sorted(p.name for p in (world.home / "out" / "deeper").glob("made-*")) == sorted(
        f"made-{n}.txt" for n in range(1, 31)
    )


def test_no_snapshot_is_torn(world: World) -> None:
    """Images one after the other while the job writes as fast as it can; each of them comes back and checks itself."""
    options = ("--checkpoint-every", "700ms", "--keep", "100")
    world.run(sys.executable, "-c", FLOOD, options=options)
    world.committed(3)
    world.kill_everything()
    (world.home / "stop").touch()
    images = [str(image["id"]) for image in world.images()]
    for image in (
        images[-1],
        images[1],
        images[0],
    ):  # backwards: the log is cut back, and never filled up
        text = restore(world, image)
        assert "digest whole" in text, text[-2000:]
        assert len(world.nonces()) == 1
        steps = world.steps()
        assert steps == list(range(1, len(steps) + 1))
        world.wait(lambda: not world.processes(), what="its end")
    assert Path(world.home / "a.bin").stat().st_size > 0


# A file that the job wrote and maps without writing through the map; replaced after the cut, as np.load(mmap_mode="r")
# of something that is saved anew would have it.
MAPPED = """
import mmap, os, sys
from tests.subjects import gate
nonce, maps = os.urandom(8).hex(), []
steps = int(sys.argv[1])
for step in range(1, steps + 1):
    if step % 8 == 1:
        with open("data.tmp", "wb") as f:
            f.write(bytes([step]) * 8192)
        os.rename("data.tmp", "data.bin")
        with open("data.bin", "rb") as f:
            maps.append((step, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)))
            maps = maps[-1:]
    assert maps[-1][1][:] == bytes([maps[-1][0]]) * 8192
    print(nonce, "step", step, flush=True)
    gate.before(step + 1, steps, 0.2)
print(nonce, "digest whole", flush=True)
"""


def test_a_mapped_file_of_the_jobs_own_is_put_back_first(world: World) -> None:
    world.run(sys.executable, "-c", MAPPED, "40")
    world.wait_step(3)
    image, at = checkpoint(world)
    world.wait_step(max(at + 8, 18))
    world.kill_everything()
    (world.home / "data.bin").unlink()
    assert "digest whole" in restore(world, image)
    check_whole(world, 40)


def test_no_second_copy_while_the_first_goes_on_writing(world: World) -> None:
    """Its files would be taken back under the feet of the living job."""
    job = world.run(*FILES)
    world.wait_step(5)
    image, at = checkpoint(world)
    world.wait_step(at + 2)
    refused = world.ctl(
        *("restore", image, "--store", str(world.store), "--name", "twin", "--output", "twin"),
        check=False,
    )
    assert refused.returncode == 2, refused.stderr
    assert "files-out/" in refused.stderr
    assert "'j'" in refused.stderr
    assert world.end_of(job) == 0, world.tail()
    check_whole(world, STEPS)
    assert not [p for p in (world.home / "files-out").iterdir() if "devproxy" in p.name]


def test_copies_of_one_image_know_each_other(world: World) -> None:
    """The first job is gone: a second copy would take back what the first one writes."""
    world.run(*FILES)
    world.wait_step(5)
    image, at = checkpoint(world)
    world.wait_step(at + 2)
    world.kill_everything()
    store = ("--store", str(world.store))
    world.ctl("restore", image, *store, "--name", "t0", "--output", "log")
    world.wait_step(at + 3)
    for name in ("t1", "j"):
        refused = world.ctl(
            "restore", image, *store, "--name", name, "--output", "second", check=False
        )
        assert refused.returncode == 2, refused.stderr
        assert "'t0', a copy of it, runs and has changed files" in refused.stderr
    world.wait_end()
    check_whole(world, STEPS)


def test_a_job_that_sleeps_knows_its_copies(world: World) -> None:
    """A resume would take back what a copy has written meanwhile. Behind the copy's end it does, as ever."""
    job = world.run(*CHEAP)
    world.wait_step(5)
    image = str(world.ctl_json("suspend", "j")["id"])
    at = max(world.steps())
    more = ("--store", str(world.store), "--name", "t0", "--output", "t0")
    world.ctl("restore", image, *more)
    world.until(at + 4)
    world.wait_step(at + 3, log="t0")
    world.until(at + 4)
    world.wait(lambda: max(world.steps("t0")) == at + 4, what="the gate")
    before = (world.home / "cheap.txt").read_text()
    refused = world.ctl("resume", "j", check=False)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    *_, line = refused.stderr.strip().splitlines()
    assert line == (
        f"devproxy: image {image}: job 't0', a copy of it, runs and has changed files since: {world.home}/cheap.txt:"
        " end it first (devproxy kill t0): the image needs them as they were; it is still suspended"
    )
    assert (world.home / "cheap.txt").read_text() == before
    assert world.ctl_json("status", "j")["phase"] == "suspended"
    world.ctl("kill", "t0")
    world.wait(lambda: "t0" not in world.ctl("ps").stdout, 20, "the end of t0")
    world.ctl("resume", "j")
    assert world.end_of(job) == 0, world.tail()
    assert (world.home / "cheap.txt").read_text().split() == [str(n) for n in range(1, STEPS + 1)]


def test_a_job_that_sleeps_wakes_beside_a_copy_with_files_of_its_own(world: World) -> None:
    job = world.run(*FILES)
    world.wait_step(5)
    image = str(world.ctl_json("suspend", "j")["id"])
    at = max(world.steps())
    more = ("--name", "t0", "--output", "t0", "--files", str(world.home / "apart"))
    world.ctl("restore", image, "--store", str(world.store), *more)
    world.near(at + 3)
    world.wait(lambda: max(world.steps("t0"), default=0) >= at + 3, what="steps of t0")
    world.ctl("resume", "j")
    assert world.end_of(job) == 0, world.tail()
    check_whole(world, STEPS)


def test_a_folder_that_another_user_may_change(world: World) -> None:
    """The checkpoint warns; a restore is refused before a file is touched, or told to trust that user."""
    if os.geteuid() != 0:
        missing("root", "the test gives a folder to another user")
    world.run(*FILES)
    world.wait_step(5)
    out = world.home / "files-out"
    os.chown(out, 4242, 4242)
    told = world.ctl_json("checkpoint", "j")
    assert f"{out} belongs to user 4242" in str(told["warnings"])
    world.wait_step(max(world.steps()) + 2)
    world.kill_everything()
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    words = ("restore", told["id"], "--store", str(world.store), "--output", "log")
    refused = world.ctl(*words, check=False)
    assert refused.returncode == 2, refused.stderr
    assert f"{out} belongs to user 4242" in refused.stderr
    assert config.TRUST_FOLDERS in refused.stderr
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    world.env[config.TRUST_FOLDERS] = str(out)
    world.ctl(*words)
    world.wait_end()
    check_whole(world, STEPS)


def test_what_only_the_supervisor_noted_when_it_alone_is_killed(world: World) -> None:
    """devproxy-run dies, its janitor ends the job and removes its folder: the last writes are taken back all the same."""
    run = world.run(sys.executable, "-c", WRITER, "30")
    world.wait_step(5)
    image, at = checkpoint(world)
    world.wait_step(at + 4)
    run.kill()
    run.wait(10)
    world.wait(lambda: not world.processes(), what="the end of the job")
    assert not matching(world.shm, "devproxy-*/j")
    last = max(world.steps())
    late = world.home / "out" / "deeper" / f"made-{last}.txt"
    assert late.exists()
    world.until(at + 1)
    world.ctl("restore", image, "--store", str(world.store), "--output", "log")
    assert max(world.steps()) < last
    assert not late.exists()
    world.wait_end()
    check_whole(world, 30)
    assert (world.home / "out" / "log.txt").read_text().count("\n") == 30


def test_what_is_written_past_libc_and_stays_open(world: World) -> None:
    world.run(sys.executable, "-c", PAST_LIBC, "20")
    world.wait_step(4)
    _, at = checkpoint(world)
    world.wait_step(at + 4)
    world.kill_everything()
    assert bytes(range(1, at + 4)) in (world.home / "past.bin").read_bytes()
    restore(world, "j")
    check_whole(world, 20)
    log = (world.home / "past.log").read_text()
    assert log == "".join(f"step {i}\n" for i in range(1, 21))
    assert (world.home / "past.bin").read_bytes() == bytes(range(21))
