"""The failures that the issue names, each provoked for real and seen through the command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from devproxy.checkpoint import criu
from tests.checkpoint.world import CTL
from tests.fault.scene import Scene


def refused(scene: Scene, *words: str, code: int | None = None, **env: str) -> str:
    """The command fails; its stderr."""
    done = scene.ctl(*words, check=False, **env)
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr, done.stderr
    if code is not None:
        assert done.returncode == code, done.stderr
    return done.stderr


def goes_on_and_works(scene: Scene) -> None:
    """The job runs, nothing is left, and a second checkpoint right after is whole."""
    scene.check_goes_on()
    scene.check_nothing_left()
    before = scene.latest() if any(i["whole"] for i in scene.images()) else ""
    scene.ctl("checkpoint", "j")
    assert scene.latest() != before
    scene.check_goes_on()


def in_background(scene: Scene, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*CTL, *words],
        env=scene.env,
        cwd=scene.home,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def restore_words(scene: Scene, image: str, *more: str) -> list[str]:
    return ["restore", image, "--store", str(scene.store), "--output", "log", *more]


def two_images_then_dead(scene: Scene) -> tuple[str, str]:
    """Ids of an older and a newer image of a job of which nothing lives any more."""
    scene.ready()
    scene.ctl("checkpoint", "j")
    older = scene.latest()
    scene.wait_step(scene.last_step() + 2)
    scene.ctl("checkpoint", "j")
    newer = scene.latest()
    scene.kill_everything()
    scene.job = None
    assert older != newer
    return older, newer


def program(scene: Scene, name: str, text: str) -> str:
    path = scene.home / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    lib = path.parent.parent / "lib"  # where DEVPROXY_CRIU's pycriu is looked for
    if not lib.exists():
        lib.symlink_to(criu.find().pycriu_dir)
    return str(path)


# -- the store --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(scene: Scene):
    """The scene's store on a file system of 24 MiB."""
    scene.store.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", "none", str(scene.store)], check=True
    )
    yield scene.store
    scene.kill_everything()
    subprocess.run(["umount", "-l", str(scene.store)], check=True)


def test_store_full(scene: Scene, small_disk: Path) -> None:
    scene.start()
    scene.ctl("checkpoint", "j")
    whole = scene.latest()
    free = os.statvfs(small_disk).f_bavail * 4096
    (small_disk / "ballast").write_bytes(b"\1" * max(0, free - (64 << 10)))
    text = refused(scene, "checkpoint", "j", code=1)
    scene.check_message(
        text, stage="upload|commit", names="store is full", state="job continues.*whole"
    )
    assert scene.latest() == whole
    scene.check_goes_on()
    (small_disk / "ballast").unlink()
    goes_on_and_works(scene)


def test_store_gone_in_the_middle(scene: Scene) -> None:
    """The folder is moved away between two uploads, and comes back."""
    scene.start()
    scene.ctl("checkpoint", "j")
    whole = scene.latest()
    away = scene.home / "away"
    command = in_background(scene, "checkpoint", "j")
    wait_staging(scene)
    scene.store.rename(away)
    scene.store.write_text("not a folder")  # so that it is not simply made again
    _, text = command.communicate(timeout=60)
    assert command.returncode == 1, text
    scene.check_message(text, stage="(upload|commit)", names="store", state="job continues")
    scene.check_goes_on()
    scene.store.unlink()
    away.rename(scene.store)
    assert scene.latest() == whole
    goes_on_and_works(scene)


def test_a_flipped_bit(scene: Scene) -> None:
    """Each chunk's hash is checked before it is used: named, and an older image offered that works."""
    scene.start()
    scene.ctl("checkpoint", "j")
    older = scene.latest()
    packs = set((scene.store / "packs").glob("*.pack"))
    scene.wait_step(scene.last_step() + 3)
    scene.ctl("checkpoint", "j")
    newer = scene.latest()
    scene.kill_everything()
    (fresh,) = set((scene.store / "packs").glob("*.pack")) - packs  # what only the newer one needs
    data = bytearray(fresh.read_bytes())
    for at in range(100, len(data), 1000):
        data[at] ^= 1
    fresh.chmod(0o600)
    fresh.write_bytes(data)
    text = refused(scene, *restore_words(scene, newer), code=1)
    scene.check_message(
        text, names=r"chunk [0-9a-f]{16} of .* is damaged", state="nothing of it runs"
    )
    assert older in text, text
    scene.wait(lambda: not scene.others(), 10, "the end of the agent")
    verified = scene.ctl("images", "--store", str(scene.store), "--verify", "--json", check=False)
    assert [i["whole"] for i in json.loads(verified.stdout)] == [True, False]
    scene.ctl(*restore_words(scene, older))
    scene.check_goes_on()


# -- manifests ----------------------------------------------------------------------------------------------------------


def test_bad_manifests(scene: Scene) -> None:
    """Truncated, of another key, of another format, host, torch or user: each refused by name; the older one restores."""
    older, newer = two_images_then_dead(scene)
    path = scene.manifest_path(newer)
    good = path.read_bytes()
    words = restore_words(scene, newer)

    path.write_bytes(good[: len(good) // 2])
    text = refused(scene, *words, code=2)
    assert "ends after" in text and older in text, text

    path.write_bytes(good)
    other_key = scene.home / "other-key"
    other_key.write_bytes(os.urandom(32))
    other_key.chmod(0o600)
    text = refused(scene, *words, code=2, DEVPROXY_KEY_FILE=str(other_key))
    assert "was not signed with the key in" in text and str(other_key) in text, text

    path.write_bytes(good.replace(b'"format":1', b'"format":9', 1))
    text = refused(scene, *words, code=2)
    assert "format 9" in text, text

    def flags(body: dict) -> None:
        body["facts"]["cpu"]["flags"].append("avx4096")

    def torch(body: dict) -> None:
        body["facts"]["processes"][0]["torch"] = {"folder": "/nowhere/torch", "version": "1.0"}

    def user(body: dict) -> None:
        body["facts"]["user"] = {"uid": 4321, "name": "somebody"}

    def machine(body: dict) -> None:
        body["facts"]["machine"] = "riscv64"

    for change, names in (
        (flags, "lacks avx4096"),
        (torch, "torch gone in /nowhere/torch, 1.0 in the image"),
        (user, "made by uid 4321"),
        (machine, "image is of riscv64"),
    ):
        path.write_bytes(good)
        scene.edit_manifest(newer, change)
        text = refused(scene, *words, code=2)
        assert names in text, text
        scene.wait(lambda: not scene.others(), 10, "the end of the agent")
    path.write_bytes(good)
    scene.ctl(*restore_words(scene, older))
    scene.check_goes_on()


# -- CRIU ---------------------------------------------------------------------------------------------------------------


def test_criu_fails(scene: Scene) -> None:
    """A CRIU that ends at once, then one that is killed while it works, at dump; then both at restore."""
    real = criu.find().program
    mode = scene.home / "criu-mode"
    broken = program(
        scene,
        "criu",
        f'case "$1$(cat {mode} 2>/dev/null)" in\n'
        "swrkexit) exit 7;;\n"
        f'swrkkill) {real} "$@" & sleep 0.03; kill -9 $!; exit 1;;\n'
        f'*) exec {real} "$@";;\nesac',
    )
    scene.env["DEVPROXY_CRIU"] = broken
    scene.start()
    scene.ctl("checkpoint", "j")
    whole = scene.latest()
    for verb in ("checkpoint", "suspend"):
        mode.write_text("exit")
        text = refused(scene, verb, "j", code=1)
        mode.unlink()
        scene.check_message(
            text, stage="host", names="CRIU cannot dump", state="job continues.*whole"
        )
        assert scene.latest() == whole
        scene.check_goes_on()
    goes_on_and_works(scene)
    mode.write_text("kill")
    done = scene.ctl("checkpoint", "j", check=False)
    mode.unlink()
    if done.returncode:
        scene.check_message(done.stderr, stage="host", names="criu", state="job")
    if scene.phase() == "running":
        goes_on_and_works(scene)
    scene.kill_everything()
    scene.job = None
    image = scene.latest()
    mode.write_text("exit")
    text = refused(scene, *restore_words(scene, image), code=1)
    scene.check_message(text, stage="host", names="CRIU cannot restore", state="nothing of it runs")
    scene.wait(lambda: not scene.others(), 10, "the end of the agent")
    mode.unlink()
    scene.ctl(*restore_words(scene, image))
    scene.check_goes_on()


def test_undumpable_after_the_preflight(scene: Scene) -> None:
    """What the preflight did not see, CRIU finds in the middle: the tree goes on."""
    scene.start(script="sly.py")
    text = refused(scene, "checkpoint", "j")
    scene.check_message(text, stage="host", names="CRIU cannot dump", state="job continues")
    scene.wait_step(scene.last_step() + 3)
    assert len(scene.nonces()) == 1


# -- who is killed ------------------------------------------------------------------------------------------------------


def wait_staging(scene: Scene, timeout_s: float = 10) -> None:
    """Returns while an image is on its way: device memory or the tree is being written."""
    deadline = time.monotonic() + timeout_s
    while not list(scene.folder.glob("staging/criu/*")):
        assert time.monotonic() < deadline, "no image was begun"
        time.sleep(0.0005)


@pytest.mark.parametrize("victim", ["server", "devproxy-run", "criu", "daemon", "janitor"])
def test_killed_from_outside_in_the_middle(shared_scene: Scene, victim: str) -> None:
    scene = shared_scene
    scene.ready()
    image = scene.latest()
    name = {"server": "devproxy-server", "criu": "criu", "janitor": "devproxy-janitor"}.get(victim)
    targets = [p.pid for p in scene.named(name)] if name else []
    if victim == "devproxy-run":
        (server,) = scene.named("devproxy-server")
        targets = [server.ppid()]
    if victim == "daemon":
        scene.ctl("list", check=False)
        targets = [p.pid for p in scene.processes() if "control.daemon" in " ".join(p.cmdline())]
    command = in_background(scene, "checkpoint", "j")
    wait_staging(scene)
    if victim == "criu":
        targets = [p.pid for p in scene.named("criu")]
    for pid in targets:
        scene.kill(pid)
    out, err = command.communicate(timeout=60)
    assert "Traceback" not in err, err
    if victim in ("server", "devproxy-run"):
        assert command.returncode, out
        scene.check_message(err, names="server|devproxy-run|job|gone", state="job")
        scene.check_restores(scene.latest())
    elif victim == "criu" and scene.phase() != "running":
        scene.check_restores(image)  # it was killed while a thread of the job ran its code
    else:
        scene.wait(
            lambda: not scene.folder.joinpath("staging").exists(), 20, "the end of the image"
        )
    scene.check_goes_on()
    scene.check_nothing_left()
    scene.ctl("checkpoint", "j")
    if victim == "janitor":
        scene.kill_everything()
        scene.job = None


# -- two at once, and at the wrong moment -------------------------------------------------------------------------------


def test_two_checkpoints_at_once(shared_scene: Scene) -> None:
    scene = shared_scene
    scene.ready()
    before = {str(i["id"]) for i in scene.images()}
    both = [in_background(scene, "checkpoint", "j", "--cut-wait", "1s") for _ in range(3)]
    answers = [command.communicate(timeout=60) for command in both]
    good = [command.returncode == 0 for command in both]
    assert any(good)
    for (_, err), command in zip(answers, both, strict=True):
        if command.returncode:
            assert command.returncode == 2
            assert "is under way" in err and "the job continues" in err, err
    assert len({str(i["id"]) for i in scene.images()} - before) == sum(good)
    goes_on_and_works(scene)


def test_checkpoint_while_the_job_exits(scene: Scene) -> None:
    """The job ends at a moment of its own; every checkpoint around it is whole or says that the job has ended."""
    for steps in (28, 34, 40):
        scene.start(steps=steps)
        assert scene.job is not None
        while scene.job.poll() is None:
            done = scene.ctl("checkpoint", "j", check=False)
            if done.returncode:
                scene.check_message(done.stderr, names="job|server|process", state="ended|job|gone")
        assert scene.job.wait(20) == 0, scene.tail()
        assert len(scene.digest()) == 1
        scene.check_log()
        scene.check_nobody_lives()
        assert all(i["whole"] for i in scene.images())


def test_restore_while_the_original_lives(shared_scene: Scene) -> None:
    scene = shared_scene
    scene.ready()
    text = refused(scene, *restore_words(scene, scene.latest()), code=2)
    assert "--name" in text and "lives" in text, text
    goes_on_and_works(scene)


def test_a_stale_job_cannot_commit(scene: Scene) -> None:
    """Restored a second time, as on another host: the first copy's images are refused, and it runs on."""
    scene.start()
    scene.ctl("checkpoint", "j")
    image = scene.latest()
    other = Scene(DEVPROXY_KEY_FILE=str(scene.home / "key"))
    try:
        shutil.copy(scene.home / "cheap.txt", other.home / "cheap.txt")
        there = ["restore", image, "--store", str(scene.store), "--output", str(other.home / "log")]
        other.ctl(*there)
        text = refused(scene, "checkpoint", "j")
        scene.check_message(text, names="restored elsewhere", state="job continues|epoch")
        assert scene.latest() == image
        other.ctl("checkpoint", "j")
        assert scene.latest() != image
    finally:
        other.close()


# -- space, and what is staged on disk --------------------------------------------------------------------------------------------------------------


def test_no_room_for_staging(scene: Scene) -> None:
    """Neither memory nor the state folder has room: refused before anything stops."""
    shm = scene.shm
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "none", str(shm)], check=True
    )
    state = scene.home / "state"
    state.mkdir(mode=0o700)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96m,mode=700", "none", str(state)], check=True
    )
    try:
        scene.start()
        text = refused(scene, "checkpoint", "j", code=2)
        scene.check_message(text, names="has room for", state="job continues")
        scene.check_goes_on()
        scene.check_nothing_left()
        subprocess.run(["mount", "-o", "remount,size=2g", str(shm)], check=True)
        goes_on_and_works(scene)
    finally:
        scene.kill_everything()
        for folder in (state, shm):
            subprocess.run(["umount", "-l", str(folder)], check=True)


def test_staging_on_disk_is_swept(scene: Scene) -> None:
    """Memory has no room, so the image is staged in the state folder; devproxy-run is killed in the middle."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "none", str(scene.shm)], check=True
    )
    try:
        scene.start()
        scene.ctl("checkpoint", "j")
        staging = scene.home / "state" / "staging"
        command = in_background(scene, "checkpoint", "j")
        scene.wait(lambda: list(staging.glob("*/criu/*")), 10, "an image on its way")
        assert scene.job is not None
        scene.kill(scene.job.pid)
        _, text = command.communicate(timeout=60)
        scene.check_message(text, state="job")
        assert scene.job.wait(10) == -signal.SIGKILL
        scene.check_restores(scene.latest())  # which looks that nothing is left
        goes_on_and_works(scene)
    finally:
        scene.kill_everything()
        subprocess.run(["umount", "-l", str(scene.shm)], check=True)
