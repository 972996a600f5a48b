# SPDX-License-Identifier: Apache-2.0
"""State of the driver through a checkpoint: what the job asks for afterwards is what it was, and it can be used.

tests/subjects/driver/survive.c makes the state, waits while something is done to the job, and looks again. Each part would end
the program by its line. The job's own memory is CRIU's; what is tried here is whether its servers come back as it left
them, which is what these parts have in common.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from devproxy.proxy import stats
from devproxy.proxy.server_set import client_abi
from tests.checkpoint.world import ROOT, SUBJECTS, World
from tests.conftest import LIB
from tests.integration.needs import require_criu
from tests.integration.test_programs import BUILD, build_kernels, build_program

SOFT = (
    "vmm",
    "limits",
    "functions",
    "events",
    "streams",
    "listed",
    "contexts",
    "pools",
    "host",
    "managed",
    "graphs",
    "graph_memory",
)
CUDA = (*SOFT, "link", "prints")  # prints last: nothing may wait for its kernels before the cut


@pytest.fixture
def soft() -> Iterator[World]:
    require_criu()
    made = World(TEST_KERNELS=str(build_kernels(BUILD / "kernels.so")))
    made.env["TEST_GO"] = str(made.shm / "go")  # not a file that the job has open
    yield made
    made.close()


@pytest.fixture
def cuda(fake_driver: dict[str, str]) -> Iterator[World]:
    """--device cuda over the fake driver, which registers host memory."""
    made = World(
        **fake_driver,
        DEVPROXY_CUDA_REGISTER_WINDOW="1",
        TEST_KERNELS=str(SUBJECTS / "variables.ptx"),
        TEST_PRINTING=str(ROOT / "tests/subjects/driver/printing.ptx"),
    )
    made.env["TEST_GO"] = str(made.shm / "go")
    yield made
    made.close()


def begin(world: World, parts: tuple[str, ...], *options: str) -> None:
    job = world.run(*build_program("survive"), *parts, options=options)
    world.wait(lambda: "survive ready" in world.text() or job.poll() is not None)
    assert job.poll() is None, world.tail()


def killed(world: World) -> None:
    world.ctl("checkpoint", "j")
    assert world.kill_everything()
    world.ctl("restore", "j", "--store", str(world.store), "--output", "log")


def suspended(world: World) -> None:
    world.ctl("suspend", "j")
    world.ctl("resume", "j")


def moved(world: World) -> None:
    world.ctl("migrate", "j", "--to", "3")


def both_moved(world: World) -> None:
    world.ctl("migrate", "j", "--to", "3,4")


def twice(world: World) -> None:
    """What a restore has made can be dumped as well."""
    killed(world)
    killed(world)


def told(world: World, part: str) -> dict[str, int]:
    """A part of what the job's server says of itself: "images", the module images that it keeps; "totals"."""
    folder = world.shm / f"devproxy-{os.getuid()}" / "j"
    abi = bytes.fromhex(client_abi(str(LIB / "libcuda.so.1")))
    found: dict[str, int] = stats.query(str(folder), 0, abi, 20)[part]
    return found


def images(world: World) -> dict[str, int]:
    return told(world, "images")


def end(world: World) -> None:
    Path(world.env["TEST_GO"]).touch()
    world.wait(lambda: re.search("PASS survive|expected ", world.text()), what="the end")
    assert "PASS survive" in world.text(), world.tail()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("how", [killed, suspended, moved, twice])
def test_on_the_software_gpu(soft: World, how: Callable[[World], None]) -> None:
    begin(soft, SOFT)
    assert (images(soft)["kept"], images(soft)["loads"]) == (1, 7)
    before = told(soft, "totals")
    how(soft)
    # What is counted goes on; but for wakes, which are the server process's own.
    after = told(soft, "totals")
    assert before["launches"] > 0 and before["allocs"] > 0
    assert {n: v for n, v in before.items() if n != "wakes" and after[n] < v} == {}
    # Once in the state too, and for each of the seven modules: the job brings nothing again.
    again = images(soft)
    assert (again["kept"], again["loads"], again["received_bytes"]) == (1, 7, 0)
    end(soft)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("how", [killed, suspended, both_moved, twice])
def test_managed_memory_of_two_gpus(soft: World, how: Callable[[World], None]) -> None:
    """Each server opens the other's window again, which is there only when all of them go on."""
    begin(soft, ("gpus", "managed"), "--gpus", "2")
    how(soft)
    end(soft)


@pytest.mark.parametrize("how", [killed, moved])
def test_in_a_capture_that_allocates(soft: World, how: Callable[[World], None]) -> None:
    """By itself: what the other parts do would break an open capture."""
    begin(soft, ("capture",))
    how(soft)
    end(soft)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("how", [killed, suspended, twice])
def test_over_a_driver(cuda: World, how: Callable[[World], None]) -> None:
    begin(cuda, CUDA, "--device", "cuda")
    how(cuda)
    end(cuda)
    behind = cuda.text().partition("survive ready")[2]
    lines = re.findall(r"^(?:host|kernel) (\d+)$", behind, re.M)
    assert [int(n) for n in lines] == list(range(1, 504)), cuda.text()[:3000]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("how", [killed, suspended])
def test_the_next_driver_is_given_the_attributes_of_streams(
    cuda: World, how: Callable[[World], None]
) -> None:
    """The newest value of each, and no window of memory that is gone; docs: launch.h numbers the attributes."""
    says = cuda.home / "says"
    cuda.env["FAKE_SAYS"] = str(says)
    begin(cuda, ("streams",), "--device", "cuda")
    first = [line.split() for line in says.read_text().splitlines()]
    how(cuda)
    again = [line.split() for line in says.read_text().splitlines()[len(first) :]]
    assert {pid for pid, *_ in first}.isdisjoint({pid for pid, *_ in again})
    window, stale, high, low, legacy = (row[1:] for row in first)
    assert (window[1], stale[1], high[1:3], low[1:3], legacy) == (
        "1", "1", ["8", "fffffffc"], ["8", "fffffffe"], ["legacy", "10", "1", "0"],
    )  # fmt: skip
    assert [row[1:] for row in again] == [window, low, legacy]
    end(cuda)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("how", [killed, twice])
def test_managed_memory_of_two_gpus_over_a_driver(
    cuda: World, how: Callable[[World], None]
) -> None:
    """The other's window is registered with the driver, before the job goes on."""
    cuda.env["FAKE_GPUS"] = "2"
    begin(cuda, ("gpus", "managed"), "--device", "cuda", "--gpus", "2")
    how(cuda)
    end(cuda)


@pytest.mark.parametrize(
    ("was", "now", "why"),
    [
        ("1", "0", "the job was told that kernels see its pinned memory"),
        ("0", "1", "the job ran where its pinned memory was not registered"),
    ],
)
def test_host_memory_is_registered_as_the_job_was_told(
    cuda: World, was: str, now: str, why: str
) -> None:
    """Else a kernel would fault, or the driver would copy from pages that the job has given back: refused by name."""
    cuda.env["DEVPROXY_CUDA_REGISTER_WINDOW"] = was
    begin(cuda, ("host",), "--device", "cuda")
    cuda.ctl("checkpoint", "j")
    assert cuda.kill_everything()
    restore = ("restore", "j", "--store", str(cuda.store), "--output", "log")
    cuda.env["DEVPROXY_CUDA_REGISTER_WINDOW"] = now
    done = cuda.ctl(*restore, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert why in done.stderr and "DEVPROXY_CUDA_REGISTER_WINDOW" in done.stderr, done.stderr
    cuda.env["DEVPROXY_CUDA_REGISTER_WINDOW"] = was
    cuda.kill_everything()  # the daemon has the other environment
    cuda.ctl(*restore)
    end(cuda)


def test_another_kind_of_gpu_is_refused(cuda: World) -> None:
    """The job has chosen kernels by what its GPU was, and it asks only once."""
    begin(cuda, ("limits",), "--device", "cuda")
    cuda.ctl("checkpoint", "j")
    assert cuda.kill_everything()
    restore = ("restore", "j", "--store", str(cuda.store), "--output", "log")
    done = cuda.ctl(*restore, check=False, FAKE_MAJORS="8")
    assert done.returncode == 2, done.stdout + done.stderr  # refused before anything is fetched
    assert "compute capability 9.0; GPU 0 (Fake GPU) has 8.0" in done.stderr, done.stderr
    assert "fetching" not in done.stderr
    cuda.kill_everything()
    cuda.ctl(*restore)
    end(cuda)


def test_no_migration_to_another_kind_of_gpu(cuda: World) -> None:
    """It is the new server that refuses: nothing of a migration is read from an image. The job stays where it was."""
    cuda.env |= {"FAKE_GPUS": "2", "FAKE_MAJORS": "98"}
    begin(cuda, ("limits",), "--device", "cuda")
    done = cuda.ctl("migrate", "j", "--to", "1", "--json", check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    facts = json.loads(done.stderr.strip().splitlines()[-1])
    assert (
        "was told that its GPU has compute capability 9.0; GPU 1 of this machine has 8.0"
        in facts["error"]
    )
    assert facts["state"] == "the job continues on its old GPU", facts
    status = json.loads(cuda.ctl("status", "j", "--json").stdout)
    assert (status["phase"], status["gpus"]) == ("running", [0])
    end(cuda)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("how", [killed, suspended, moved, twice])
def test_a_sticky_error_stays(soft: World, how: Callable[[World], None]) -> None:
    """Of every call, as on a GPU; on a real one its memory could not be read, so there it is refused."""
    begin(soft, ("sticky",))
    how(soft)
    end(soft)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("how", [killed, suspended, twice])
def test_a_late_error_is_still_told_once(cuda: World, how: Callable[[World], None]) -> None:
    """The driver has refused a launch whose call had succeeded, and the job has not asked for anything since."""
    begin(cuda, ("late",), "--device", "cuda")
    how(cuda)
    end(cuda)


def test_a_failed_context_is_refused_before_anything_stops(cuda: World) -> None:
    """A driver copies nothing from it, so its memory would be lost."""
    begin(cuda, ("failed",), "--device", "cuda")
    done = cuda.ctl("checkpoint", "j", check=False)
    assert done.returncode == 2  # refused; 1 would be a checkpoint that failed
    assert "its GPU context has failed with error 710" in done.stderr, done.stderr
    assert "cut:" not in done.stderr and "the job continues" in done.stderr, done.stderr
    end(cuda)


def test_objects_are_made_again_as_they_were() -> None:
    """As the recording GPU sees it: priorities, attributes and limits, and each image that was loaded."""
    require_criu()
    world = World(TEST_KERNELS=str(SUBJECTS / "variables.ptx"))
    try:
        world.env |= {"DEVPROXY_RECORD": str(world.home / "rec"), "TEST_GO": str(world.shm / "go")}
        begin(world, ("limits", "functions", "events"), "--device", "record")
        killed(world)
        record = world.home / "rec"
        # The server writes its lines when it has nothing else to do, which may be after the restore has been reported.
        world.wait(lambda: '"set_limit"' in record.read_text().rpartition('"start"')[2])
        text = record.read_text()
    finally:
        world.close()
    lines = [json.loads(line) for line in text.splitlines()]
    starts = [number for number, line in enumerate(lines) if line["op"] == "start"]
    assert len(starts) == 2
    before, after = lines[: starts[1]], lines[starts[1] :]

    def told(of: list[dict[str, Any]], op: str, *keys: str) -> list[list[Any]]:
        return [[line[key] for key in keys] for line in of if line["op"] == op]

    # The rest of the streams is the server's own; an attribute and a limit that were set twice have one value.
    assert [-3] in told(after, "create_queue", "priority")
    assert told(after, "create_queue", "kind", "priority") == told(
        before, "create_queue", "kind", "priority"
    )
    assert told(after, "set_limit", "limit", "value") == sorted(
        told(before, "set_limit", "limit", "value")
    )
    assert told(after, "set_attribute", "attribute", "value") == [
        told(before, "set_attribute", "attribute", "value")[-1]
    ]
    assert len(told(after, "load_module")) == len(told(before, "load_module")) == 4
