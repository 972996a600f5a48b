# SPDX-License-Identifier: Apache-2.0
"""The failures that the issue names, each provoked for real and seen through the command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from devproxy.checkpoint import criu
from tests.checkpoint.world import CTL
from tests.fault.scene import Scene
from tests.living import matching


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


def finished(command: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = command.communicate(timeout=60)
    return subprocess.CompletedProcess(command.args, command.returncode, out, err)


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
    """The scene's store on a file system of 48 MiB."""
    scene.store.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48m,mode=700", "none", str(scene.store)], check=True
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
    with scene.paused_at("store_pack_write") as wait:
        command = in_background(scene, "checkpoint", "j")
        wait()
        scene.store.rename(away)
        scene.store.write_text("not a folder")  # so that it is not simply made again
    done = finished(command)
    assert done.returncode == 1, done.stderr
    scene.check_message(
        done.stderr, stage="upload|commit", names="store", state=f"job continues.*{whole}"
    )
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
    names = r"chunk [0-9a-f]{16} of .* is damaged"
    scene.check_message(text, stage="fetch", names=names, state="nothing of it runs")
    assert older in text, text
    scene.wait(lambda: not scene.others(), 10, "the end of the agent")
    verified = scene.ctl("images", "--store", str(scene.store), "--verify", "--json", check=False)
    assert [i["whole"] for i in json.loads(verified.stdout)["images"]] == [True, False]
    scene.ctl(*restore_words(scene, older))
    scene.check_goes_on()


def test_a_flipped_bit_that_two_images_share(scene: Scene) -> None:
    """The older one is not offered, and whoever looks later is told."""
    scene.start()
    scene.ctl("checkpoint", "j")
    older = scene.latest()
    (pack,) = (scene.store / "packs").glob("*.pack")
    scene.wait_step(scene.last_step() + 3)
    scene.ctl("checkpoint", "j")
    newer = scene.latest()
    scene.kill_everything()
    data = bytearray(pack.read_bytes())
    for at in range(100, len(data), 1000):
        data[at] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(data)
    text = refused(scene, *restore_words(scene, newer), code=1)
    names = r"chunk [0-9a-f]{16} of .* is damaged in pack .*: there is no older whole image"
    scene.check_message(text, stage="fetch", names=names, state="nothing of it runs")
    scene.wait(lambda: not scene.others(), 10, "the end of the agent")
    assert [(i["id"], i["whole"], i["noted"]) for i in scene.images()] == [
        (older, False, True),
        (newer, False, True),
    ]
    shown = " ".join(scene.ctl("images", "--store", str(scene.store)).stdout.split())
    assert shown.count("as was found") == 2, shown  # the table breaks its lines anywhere
    told = scene.ctl("status", "j").stdout
    assert f"image {newer} is not whole: chunk" in told, told
    text = refused(scene, *restore_words(scene, "j"), code=2)
    assert "no whole image 'j'" in text and f"image {newer} is not whole: chunk" in text, text


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

    path.write_bytes(good.replace(b'"format":2', b'"format":9', 1))
    text = refused(scene, *words, code=2)
    assert "format 9" in text, text

    def flags(body: dict) -> None:
        body["trees"][0]["facts"]["cpu"]["flags"].append("avx4096")

    def torch(body: dict) -> None:
        body["trees"][0]["facts"]["processes"][0]["torch"] = {
            "folder": "/nowhere/torch",
            "version": "1.0",
        }

    def user(body: dict) -> None:
        body["trees"][0]["facts"]["user"] = {"uid": 4321, "name": "somebody"}

    def machine(body: dict) -> None:
        body["trees"][0]["facts"]["machine"] = "riscv64"

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


@pytest.fixture
def bad_criu(scene: Scene) -> Path:
    """The scene's CRIU ends at once, or is killed while the verb stands still at a point, as this file says."""
    real = criu.find().program
    mode = scene.home / "criu-mode"
    paused = scene.fault.with_name("fault.paused")
    killed = f'{real} "$@" & until [ -e {paused} ]; do sleep 0.01; done; kill -9 $!; wait $!; rm {paused}'
    scene.env["DEVPROXY_CRIU"] = program(
        scene,
        "criu",
        f'case "$1$(cat {mode} 2>/dev/null)" in\n'
        "swrkexit) exit 7;;\n"
        f"swrklitter) xargs touch < {mode}.litter; exit 7;;\n"
        f"swrkkill) {killed}; exit 1;;\n"
        f'*) exec {real} "$@";;\nesac',
    )
    return mode


def test_the_job_ends_while_its_image_is_uploaded(scene: Scene) -> None:
    """Everything of the image is staged: it becomes whole, and the job's end waits for that."""
    scene.start()
    with ThreadPoolExecutor(1) as pool:
        with scene.paused_at("upload") as wait:
            verb = pool.submit(scene.ctl, "checkpoint", "j", "--json", check=False)
            wait()
            for process in scene.of_the_job():
                process.kill()
            scene.wait(
                lambda: "waiting until its image is in store" in scene.text(), 20, "the job's end"
            )
        done = verb.result()
    assert done.returncode == 0, done.stdout + done.stderr
    assert scene.job is not None
    assert scene.job.wait(20) == 128 + signal.SIGKILL
    scene.job = None
    scene.check_restores(scene.latest())


@pytest.mark.parametrize("verb", ["checkpoint", "suspend"])
def test_criu_fails_at_dump(scene: Scene, bad_criu: Path, verb: str) -> None:
    """It ends at once; then it is killed when it has written all and holds the tree."""
    scene.start()
    scene.ctl("checkpoint", "j")
    whole = scene.latest()
    for mode, why in (("exit", "ended before it had answered"), ("kill", "criu swrk")):
        bad_criu.write_text(mode)
        scene.arm("frozen:pause" if mode == "kill" else "")
        done = scene.ctl(verb, "j", "--json", check=False)
        bad_criu.unlink()
        assert mode == "exit" or scene.fired(), "it was not killed"
        facts = scene.failure(done)
        cause = f"CRIU cannot dump the job's processes: .*{why}"
        scene.check_failure(facts, stage="host", about="the processes of job j", cause=cause)
        if verb == "suspend" and mode == "kill":
            # It was stored while CRIU held the tree.
            assert facts["state"] == f"the job continues; image {scene.latest()} is whole"
            assert scene.latest() != whole
        else:
            assert facts["state"] == f"the job continues; its last whole image is {whole}"
        scene.disarm()
        scene.check_goes_on()
        scene.check_nothing_left()
    goes_on_and_works(scene)


def test_criu_fails_at_restore(scene: Scene, bad_criu: Path) -> None:
    """It ends at once; then it is killed when the root of the tree is made."""
    scene.start()
    scene.ctl("checkpoint", "j")
    scene.kill_everything()
    scene.job = None
    image = scene.latest()
    for mode, why in (("exit", "ended before it had answered"), ("kill", "criu swrk")):
        bad_criu.write_text(mode)
        scene.arm("restore_root:pause" if mode == "kill" else "")
        done = scene.ctl(*restore_words(scene, image), "--json", check=False)
        bad_criu.unlink()
        assert mode == "exit" or scene.fired(), "it was not killed"
        facts = scene.failure(done)
        cause = f"CRIU cannot restore the job's processes: .*{why}"
        scene.check_failure(facts, stage="host", about="the processes of job j", cause=cause)
        assert facts["state"] == "nothing of it runs"
        scene.disarm()
        scene.wait(lambda: not scene.others(), 10, "the end of the agent")
    scene.ctl(*restore_words(scene, image))
    scene.check_goes_on()


def test_a_restore_after_one_that_was_ended_in_the_middle(scene: Scene, bad_criu: Path) -> None:
    """It has made the files that stand for deleted ones, and did not come to take them away."""
    scene.start(script="pipes.py")
    deleted = scene.deleted_files()
    assert any(path.startswith("/tmp/") for path in deleted), deleted
    scene.ctl("checkpoint", "j")
    scene.kill_everything()
    scene.job = None
    left = [Path(f"{path}.cr.{number:x}.ghost") for path in deleted for number in range(1, 33)]
    try:
        bad_criu.write_text("litter")
        bad_criu.with_name(f"{bad_criu.name}.litter").write_text("\n".join(map(str, left)))
        refused(scene, *restore_words(scene, scene.latest()))
        there = [path.exists() for path in left]
        assert any(there) and not all(there), "of the 32 for each name, one is the image's"
        bad_criu.unlink()
        for path in left:
            path.write_text("of the attempt before")
        scene.ctl(*restore_words(scene, scene.latest()))
        scene.wait_step(scene.last_step() + 3)
        assert len(scene.nonces()) == 1
        assert "FAILED" not in scene.text(), scene.tail()
    finally:
        for path in left:
            path.unlink(missing_ok=True)


def test_undumpable_after_the_preflight(scene: Scene) -> None:
    """What the preflight did not see, CRIU finds in the middle: the tree goes on."""
    scene.start(script="sly.py")
    text = refused(scene, "checkpoint", "j")
    scene.check_message(text, stage="host", names="CRIU cannot dump", state="job continues")
    scene.wait_step(scene.last_step() + 3)
    assert len(scene.nonces()) == 1


# -- who is killed ------------------------------------------------------------------------------------------------------


def pids_of(scene: Scene, victim: str) -> list[int]:
    if victim == "devproxy-run":
        (server,) = scene.named("devproxy-server")
        return [server.ppid()]
    if victim == "daemon":
        return [p.pid for p in scene.processes() if "devproxy.control.daemon" in p.cmdline()]
    names = {"server": "devproxy-server", "criu": "criu", "janitor": "devproxy-janitor"}
    found = scene.named(names[victim])
    if (
        victim == "criu"
    ):  # it started with the daemon's environment or the supervisor's: look below that
        (server,) = scene.named("devproxy-server")
        found = [p for p in psutil.Process(server.ppid()).children() if is_criu(p)]
    return [p.pid for p in found]


def is_criu(process: psutil.Process) -> bool:
    try:
        return process.name() == "criu"
    except psutil.NoSuchProcess:
        return False


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("victim", ["server", "devproxy-run", "criu", "daemon", "janitor"])
def test_killed_from_outside_in_the_middle(shared_scene: Scene, victim: str) -> None:
    """While the tree is frozen and the verb stands still, so that none of them can be faster than the kill."""
    scene = shared_scene
    scene.ready()
    image = scene.latest()
    with scene.paused_at("frozen") as wait:
        command = in_background(scene, "checkpoint", "j", "--json")
        wait()
        targets = pids_of(scene, victim)
        assert targets, f"there is no {victim}"
        for pid in targets:
            assert lives(pid)
            scene.kill(pid)
        scene.wait(lambda: not any(map(lives, targets)), 10, f"the end of {victim}")
    done = finished(command)
    if victim == "janitor":
        assert done.returncode == 0, done.stderr
    else:
        facts = scene.failure(done)
    if victim == "server":
        cause = "server of GPU 0 did not answer 'dump_shared': "
        scene.check_failure(facts, stage="shared", about="GPU 0", cause=cause)
        assert "signal 9" in facts["state"], facts
        scene.check_restores(image)
    elif victim == "devproxy-run":
        scene.check_failure(facts, stage="device|host", about="job j", cause="went away")
        scene.check_restores(image)
    elif victim == "criu":
        cause = "CRIU cannot dump the job's processes"
        scene.check_failure(facts, stage="host", about="the processes of job j", cause=cause)
        assert scene.latest() == image
    elif victim == "daemon":  # the operation goes on without it
        assert facts["object"] == "devproxyd" and "go on" in facts["state"], facts
        scene.wait(lambda: scene.latest() != image, 20, "the image")
        scene.wait(lambda: not (scene.folder / "staging").exists(), 20, "the end of the operation")
    scene.check_goes_on()
    scene.check_nothing_left()
    scene.ctl("checkpoint", "j")
    if victim == "janitor":
        scene.kill_everything()
        scene.job = None


@pytest.mark.parametrize("when", ["freeze", "frozen"])
def test_criu_is_stopped_in_a_dump(scene: Scene, when: str) -> None:
    """The freeze has a limit: the job is let go, and the image given up."""
    scene.start("--freeze-limit", "3s")
    scene.ctl("checkpoint", "j")
    image = scene.latest()
    with scene.paused_at(when) as wait:
        command = in_background(scene, "checkpoint", "j", "--json")
        wait()
        for pid in pids_of(scene, "criu"):
            os.kill(pid, signal.SIGSTOP)
    facts = scene.failure(finished(command))
    cause = "the processes of job j stood frozen for 3 s, which is the limit"
    scene.check_failure(facts, stage="host|thaw", about="the processes of job j", cause=cause)
    assert facts["state"] == f"the job continues; its last whole image is {image}"
    scene.check_goes_on()
    scene.check_nothing_left()
    goes_on_and_works(scene)


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


@pytest.mark.parametrize("point", ["refuse_early", "cut", "before_commit"])
def test_checkpoint_while_the_job_exits(scene: Scene, point: str) -> None:
    """The job ends by itself while a checkpoint stands at that point: it is whole, or says that the job has ended."""
    scene.start()
    scene.ctl("checkpoint", "j")
    whole = scene.latest()
    with scene.paused_at(point) as wait:
        command = in_background(scene, "checkpoint", "j", "--json")
        wait()
        (scene.home / "end-now").touch()
        scene.wait(lambda: not scene.of_the_job(), 20, "the end of the job's processes")
        assert command.poll() is None, "the checkpoint did not meet the exit"
    done = finished(command)
    if done.returncode == 0:
        assert point == "before_commit"  # what it needs was copied before
        assert scene.latest() != whole
    else:
        facts = scene.failure(done)
        assert "the job has ended" in facts.get("state", facts["remedy"]), facts
        if "state" in facts:
            scene.check_failure(facts, stage=".+", about=".", cause=".")
        assert scene.latest() == whole
    assert scene.job is not None
    assert scene.job.wait(20) == 0, scene.tail()
    assert len(scene.digest()) == 1
    scene.check_log()
    scene.check_nobody_lives()
    assert all(i["whole"] for i in scene.images())


def test_no_image_of_a_job_that_is_ending(scene: Scene) -> None:
    """The command was killed, what it left running was not told yet: such an image would be the newest whole one, and
    no job comes back from it. Found by the campaign `verb-kills`."""
    scene.start()
    scene.ctl("checkpoint", "j")
    whole = scene.latest()
    (init,) = scene.named("devproxy-init")
    (command,) = scene.of_the_job()
    with scene.paused_at("cut") as wait:
        checkpoint = in_background(scene, "checkpoint", "j", "--json")
        wait()
        init.send_signal(signal.SIGSTOP)  # so that it has not ended, however long the rest takes
        command.kill()
        scene.wait(lambda: not lives(command.pid), 10, "the command's end")
    facts = scene.failure(finished(checkpoint))
    assert facts["stage"] == "host" and facts["error"] == "the job's command has ended", facts
    assert facts["state"] == f"the job has ended; its last whole image is {whole}"
    assert scene.latest() == whole
    text = refused(scene, "checkpoint", "j", code=2)
    assert "the job has ended" in text, text
    init.send_signal(signal.SIGCONT)
    assert scene.job is not None and scene.job.wait(20) == 137
    scene.check_restores()


def test_no_image_of_a_job_one_of_whose_processes_was_killed_meanwhile(scene: Scene) -> None:
    """Its parent stands still and does not know. Found by the campaign `verb-kills`, with a loader worker."""
    scene.start(script="parent.py")
    scene.ctl("checkpoint", "j")
    whole = scene.latest()
    (child,) = [c for p in scene.of_the_job() for c in p.children()]
    with scene.paused_at("device") as wait:
        checkpoint = in_background(scene, "checkpoint", "j", "--json")
        wait()
        child.kill()
        scene.wait(lambda: not lives(child.pid), 10, "the child's end")
    facts = scene.failure(finished(checkpoint))
    cause = f"process {child.pid} of the job was killed while the image was taken"
    scene.check_failure(facts, stage="host", about=f"process {child.pid}", cause=cause)
    assert facts["state"] == f"the job continues; its last whole image is {whole}"
    goes_on_and_works(scene)


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
        scene.check_message(
            text, stage="refuse_early", names="restored elsewhere", state="job continues"
        )
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
        assert "has room for" in text and "the job continues" in text, text
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
        with scene.paused_at("frozen") as wait:
            command = in_background(scene, "checkpoint", "j", "--json")
            wait()
            assert matching(staging, "*/criu/*")
            assert scene.job is not None
            scene.kill(scene.job.pid)
            facts = scene.failure(finished(command))
        scene.check_failure(facts, stage="device|host", about="job j", cause="went away")
        assert scene.job.wait(10) == -signal.SIGKILL
        scene.check_restores(scene.latest())  # which looks that nothing is left
        goes_on_and_works(scene)
    finally:
        scene.kill_everything()
        subprocess.run(["umount", "-l", str(scene.shm)], check=True)
