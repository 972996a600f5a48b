# SPDX-License-Identifier: Apache-2.0
"""Another devproxy between dump and restore, under a running job, and on a machine that has never seen the job.

The other build has another ABI id in its client library and its server, which therefore refuses the job's state: the
job can only go on with the files that its image carries.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from devproxy.proxy.server_set import client_abi, server_abi
from tests.checkpoint.world import SUBJECTS, World, without_pauses
from tests.conftest import LIB

STEPS = 50
GPT = (
    sys.executable,
    str(SUBJECTS / "gpt.py"),
    *("--steps", str(STEPS), "--seconds-per-step", "0.2"),
)


def other_build(folder: Path) -> Path:
    """A copy of the build that speaks another ABI: the id is replaced in every file that has it."""
    copy = folder / "other-lib"
    shutil.copytree(LIB, copy, symlinks=True)
    old = bytes.fromhex(client_abi(str(LIB / "libcuda.so.1")))
    new = bytes(byte ^ 0x5A for byte in old)
    changed = []
    for path in (p for p in copy.rglob("*") if p.is_file()):
        data = before = path.read_bytes()
        for at in range(
            0, len(old), 8
        ):  # a compiler may put it into the code, 8 or 16 bytes at a time
            data = data.replace(old[at : at + 8], new[at : at + 8])
        if data != before:
            path.write_bytes(data)
            changed.append(path.name)
    assert {"devproxy-server", "libcuda.so.1"} <= set(changed)
    assert server_abi(str(copy / "devproxy-server")) == client_abi(str(copy / "libcuda.so.1"))
    assert client_abi(str(copy / "libcuda.so.1")) == new.hex()
    return copy


def servers(world: World) -> list[psutil.Process]:
    return [p for p in world.processes() if p.name() == "devproxy-server"]


def mapped_below(folder: Path, world: World) -> list[str]:
    """Names of the world's processes that map something below the folder."""
    mark = f" {folder}/".encode()
    found = []
    for process in world.processes():
        try:
            if mark in Path(f"/proc/{process.pid}/maps").read_bytes():
                found.append(process.name())
        except (OSError, psutil.NoSuchProcess):
            pass
    return found


def check_whole(world: World, digest: list[str]) -> None:
    assert len(world.nonces()) == 1, world.tail()
    assert world.steps() == list(range(1, STEPS + 1)), world.tail()
    assert world.digest() == digest


@pytest.fixture(scope="module")
def digest() -> list[str]:
    alone = World()
    try:
        assert alone.run(*without_pauses(GPT)).wait(200) == 0, alone.tail()
        found = alone.digest()
    finally:
        alone.close()
    assert len(found) == 1
    return found


def image_of_a_killed_job(world: World, **env: str) -> str:
    world.run(*GPT, **env)
    world.wait_step(8)
    facts = world.ctl_json("checkpoint", "j")
    world.wait_step(max(world.steps()) + 3)
    world.kill_everything()
    return str(facts["id"])


def test_another_devproxy_between_dump_and_restore(world: World, digest: list[str]) -> None:
    image = image_of_a_killed_job(world)
    other = other_build(world.home)
    # A server of the other build cannot go on with this state; what the image carries is needed.
    builds = world.home / "state" / "builds"
    (mine,) = builds.iterdir()
    shutil.rmtree(builds)
    world.ctl(
        *("restore", image, "--store", str(world.store), "--output", "log"),
        DEVPROXY_LIB=str(other),
    )
    (server,) = servers(world)
    assert Path(server.exe()) == mine / "devproxy-server"
    assert mapped_below(mine, world)
    assert not mapped_below(other, world)
    # A job that starts now runs under the other build, beside it.
    new = world.run(
        *(sys.executable, str(SUBJECTS / "gpt.py"), "--steps", "2"),
        name="new",
        log="new",
        DEVPROXY_LIB=str(other),
        TEST_GATE="",
    )
    assert new.wait(60) == 0, world.tail("new")
    assert len([p for p in builds.iterdir() if p.is_dir()]) == 2
    world.wait_end()
    check_whole(world, digest)


def test_the_other_server_refuses_the_state(world: World) -> None:
    """So that the test above cannot pass with the wrong server."""
    image = image_of_a_killed_job(world)
    other = other_build(world.home)
    refused = world.ctl(
        *("restore", image, "--store", str(world.store), "--output", "log"),
        check=False,
        DEVPROXY_LIB=str(other),
        DEVPROXY_SERVER=str(other / "devproxy-server"),
    )
    assert refused.returncode != 0
    assert "another build" in refused.stderr, refused.stderr
    assert not servers(world)


def test_rebuilt_under_a_running_job(world: World, digest: list[str]) -> None:
    mine = world.home / "lib"
    shutil.copytree(LIB, mine, symlinks=True)
    world.run(*GPT, DEVPROXY_LIB=str(mine))
    world.wait_step(4)
    other = other_build(world.home)
    for path in other.rglob("*"):  # as a linker writes: a new file under the old name
        if path.is_file():
            os.replace(path, mine / path.relative_to(other))
    facts = world.ctl_json(
        "checkpoint",
        "j",
    )
    world.ctl("suspend", "j")
    world.ctl("resume", "j")
    world.wait_step(max(world.steps()) + 2)
    world.kill_everything()
    world.ctl(
        *("restore", "j", "--store", str(world.store), "--output", "log", "--wait"),
        DEVPROXY_LIB=str(mine),
    )
    check_whole(world, digest)
    assert facts["id"] in {image["id"] for image in world.images()}


def test_a_build_that_was_pruned_while_the_job_was_suspended(
    world: World, digest: list[str]
) -> None:
    job = world.run(*GPT)
    world.wait_step(4)
    world.ctl("suspend", "j")
    shutil.rmtree(world.home / "state" / "builds")
    world.ctl("resume", "j")
    assert world.end_of(job) == 0, world.tail()
    check_whole(world, digest)


def test_a_machine_that_has_never_seen_the_job(world: World, digest: list[str]) -> None:
    """An empty state folder at another place; only the store and the key came along."""
    image = image_of_a_killed_job(world)
    shutil.rmtree(world.home / "state")
    there = world.home / "elsewhere"
    world.ctl(
        *("restore", image, "--store", str(world.store), "--output", "log", "--wait"),
        DEVPROXY_STATE_DIR=str(there),
    )
    check_whole(world, digest)


def test_another_key_is_refused(world: World) -> None:
    image = image_of_a_killed_job(world)
    refused = world.ctl(
        *("restore", image, "--store", str(world.store), "--output", "log"),
        check=False,
        DEVPROXY_KEY_FILE=str(world.home / "another-key"),
    )
    assert refused.returncode != 0
    assert "key" in refused.stderr
    assert not world.processes() or not servers(world)


def test_the_wheel_has_what_a_job_needs() -> None:
    """What a build is made of is in the library folder: an image that lacks one of these cannot come back."""
    for name in ("devproxy-init", "devproxy-server", "libcuda.so.1", "libdevproxy_host.so"):
        assert (LIB / name).is_file()
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import devproxy.cli.run, sys, json; print(json.dumps(list(sys.modules)))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    heavy = {"grpc", "google.protobuf", "numpy", "rich", "fsspec", "zstandard", "blake3", "asyncio"}
    assert not heavy & set(json.loads(done.stdout))
