# SPDX-License-Identifier: Apache-2.0
"""Restores that cannot be: each is refused, or fails, before the first file of the job is touched, and the next one works.
And a store that nobody can write is good enough to restore from."""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.checkpoint.test_files_end_to_end import said_anywhere
from tests.checkpoint.world import World

# It writes one file, reads another, holds it open, and says what it reads from it after a restore too.
JOB = """
import os, time
read = open("read")
words = read.readline()
with open("written", "w") as f:
    f.write("before")
for n in range(1, 100000):
    read.seek(0)
    print(n, read.readline() == words, flush=True)
    time.sleep(0.02)
"""


@pytest.fixture
def killed(world: World) -> World:
    """A job that has an image and was killed, and whose file says "after"."""
    (world.home / "read").write_text("what the job reads\n")
    world.run(sys.executable, "-c", JOB)
    wait_count(world, 5)
    world.ctl("checkpoint", "j")
    world.kill_everything()
    (world.home / "written").write_text("after")
    return world


def lines(world: World) -> list[str]:
    return [line for line in world.text().splitlines() if line.split(" ")[0].isdecimal()]


def wait_count(world: World, number: int) -> None:
    world.near(number)
    world.wait(lambda: len(lines(world)) >= number, what=f"{number} lines")


def restore(world: World, check: bool = True, **env: str) -> str:
    words = ("restore", "j", "--store", str(world.store), "--output", "log", "--progress", "none")
    done = world.ctl(*words, check=check, **env)
    assert check or done.returncode != 0
    return done.stderr


def check_untouched(world: World) -> None:
    written = world.home / "written"
    assert written.read_text() == "after"
    assert not [p for p in world.home.iterdir() if "devproxy" in p.name]
    world.wait(lambda: not world.processes(), what="the end of the restore")


def check_restored(world: World) -> None:
    before = len(lines(world))
    restore(world)
    wait_count(world, before + 5)
    assert (world.home / "written").read_text() == "before"
    assert all(line.endswith(" True") for line in lines(world)), world.tail()


def is_gone(path: Path) -> None:
    path.unlink()


def is_shorter(path: Path) -> None:
    path.write_text("what\n")


def is_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("happens", [is_gone, is_shorter, is_a_folder])
def test_a_file_that_the_job_only_reads(killed: World, happens: Callable[[Path], None]) -> None:
    path = killed.home / "read"
    times = path.stat()
    happens(path)
    said = restore(killed, check=False)
    assert str(path) in said, said
    check_untouched(killed)
    if path.is_dir():
        path.rmdir()
    path.write_text("what the job reads\n")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    check_restored(killed)


# Beside the file that it writes it has all that a restore needs and no image carries.
NEEDS = """
import os, socket, time
held = [os.open("folder", os.O_RDONLY), os.open("fifo", os.O_RDWR), open(b"read-\\xff")]
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("127.0.0.1", 0))
print("port", udp.getsockname()[1], flush=True)
abstract, named = (socket.socket(socket.AF_UNIX) for _ in range(2))
abstract.bind(f"\\0devproxy-test-{os.getppid()}-{time.time_ns()}")
print("name", abstract.getsockname()[1:].decode(), flush=True)
named.bind(os.path.abspath("sockets/name"))
named.listen()
with open("written", "w") as f:
    f.write("before")
os.chdir("works")
for n in range(1, 100000):
    print(n, True, flush=True)
    time.sleep(0.02)
"""


def test_what_a_restore_needs_and_no_image_carries(world: World) -> None:
    home = world.home
    for name in ("folder", "sockets", "works"):
        (home / name).mkdir()
    os.mkfifo(home / "fifo")
    odd = os.fsencode(home) + b"/read-\xff"
    Path(os.fsdecode(odd)).write_text("what it reads")
    world.run(sys.executable, "-c", NEEDS)
    wait_count(world, 5)
    facts = dict(line.split() for line in world.text().splitlines() if line[:4] in ("port", "name"))
    world.ctl("checkpoint", "j")
    world.kill_everything()
    (home / "sockets" / "name").unlink(missing_ok=True)
    (home / "written").write_text("after")

    def refused(said: str) -> None:
        found = restore(world, check=False)
        assert said in found, found
        check_untouched(world)

    for name, why in (
        ("folder", "is gone: the job works in it, or has it open"),
        ("works", "is gone: the job works in it, or has it open"),
        ("fifo", "is gone: the job has it open"),
        ("sockets", "is gone: the job has its socket name there"),
        (os.path.basename(os.fsdecode(odd)), "is gone: the job has it open"),
    ):
        os.rename(home / name, home / "moved")
        refused(why)
        os.rename(home / "moved", home / name)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", int(facts["port"])))
        refused(f"the job has the UDP port 127.0.0.1:{facts['port']}, which another process has")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind("\0" + facts["name"])
        refused(f"the job has the abstract unix socket @{facts['name']}, which another process has")
    check_restored(world)


def replaced() -> None:
    with open("new", "w") as f:
        f.write("another file")
    os.replace("new", "read")


def rewritten() -> None:
    with open("read", "w") as f:
        f.write("what the job writes, which is longer\n")


def renamed_folder() -> None:
    os.rename("folder", "other")


@pytest.mark.parametrize("changes", [replaced, rewritten, renamed_folder])
def test_what_the_job_itself_changed_after_the_image_comes_back(
    world: World, changes: Callable[[], None]
) -> None:
    """It had the file open for reading alone when the image was taken, so the image does not carry it."""
    name = "folder/read" if changes is renamed_folder else "read"
    (world.home / "folder").mkdir()
    (world.home / name).write_text("what the job reads\n")
    job = JOB.replace('"read"', repr(name)).replace(
        "for n", textwrap.dedent(inspect.getsource(changes)) + "for n", 1
    )
    job += f"    if os.path.exists('go'):\n        print('changed', {changes.__name__}(), flush=True)\n        break\n"
    job += "time.sleep(1000)\n"
    world.run(sys.executable, "-c", job)
    wait_count(world, 5)
    world.ctl("checkpoint", "j")
    (world.home / "go").touch()
    world.wait(lambda: "changed" in world.text(), what="the change")
    world.kill_everything()
    (world.home / "go").unlink()
    before = len(lines(world))
    restore(world)
    wait_count(world, before + 5)
    assert (world.home / name).read_text() == "what the job reads\n"
    assert lines(world)[-1].endswith(" True"), world.tail()


def test_a_file_that_the_job_only_reads_and_somebody_wrote(killed: World) -> None:
    path = killed.home / "read"
    path.write_text("what the job READS\n")
    restore(killed)
    assert f"{path} has been written since" in said_anywhere(killed)
    killed.wait(
        lambda: any(line.endswith(" False") for line in lines(killed)), what="the new words"
    )


@pytest.mark.parametrize("fault", ["server_restore_start:kill", "server_restore_end:error"])
def test_a_server_that_does_not_start(killed: World, fault: str) -> None:
    said = restore(killed, check=False, DEVPROXY_FAULT=fault)
    assert "GPU 0" in said, said
    check_untouched(killed)
    check_restored(killed)


@pytest.fixture
def read_only(killed: World) -> Iterator[World]:
    """Its store is on a file system that is mounted read-only."""
    store = str(killed.store)
    subprocess.run(["mount", "--bind", store, store], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", store], check=True)
        yield killed
    finally:
        subprocess.run(["umount", "-l", store], check=True)


def test_a_store_that_cannot_be_written_is_restored_from(read_only: World) -> None:
    with pytest.raises(OSError):
        (read_only.store / "x").write_text("")
    check_restored(read_only)
    said = read_only.ctl("checkpoint", "j", check=False)
    assert said.returncode != 0 and str(read_only.store) in said.stderr, said.stderr
    before = len(lines(read_only))
    wait_count(read_only, before + 5)  # and the job goes on
