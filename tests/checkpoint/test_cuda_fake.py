# SPDX-License-Identifier: Apache-2.0
"""hal/cuda behind the proxy, over the fake driver of tests/native/hal_cuda: a job's whole life with `--device cuda`.

It shows that nothing between the command line and the driver's calls knows only the software GPU. It shows nothing about
a real driver.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest

from tests.checkpoint.world import ROOT, SUBJECTS, World
from tests.integration.test_programs import build_program


@pytest.fixture
def world(fake_driver: dict[str, str]) -> Iterator[World]:
    made = World(**fake_driver)
    made.hold()
    yield made
    made.close()


@pytest.mark.parametrize("subject", ["cheap", "graphs"])
def test_checkpoint_kill_restore(subject: str, world: World) -> None:
    """graphs: a device that knows nothing of graphs executes them, by the messages that they are."""
    script = str(SUBJECTS / f"{subject}.py")
    command = (sys.executable, script, "--steps", "60", "--seconds-per-step", "0.1")
    undisturbed = world.undisturbed(*command)
    world.run(*command, options=("--device", "cuda"))
    world.wait_step(10)
    assert "--device cuda is experimental" in world.text()
    world.checkpoint_then_die(10, after=20)
    world.restore("--wait")
    world.wait_end()
    assert world.digest() == undisturbed
    assert len(world.nonces()) == 1
    assert set(world.steps()) == set(range(1, 61))


VARIABLES = (
    sys.executable,
    str(SUBJECTS / "variables.py"),
    *("--steps", "60", "--seconds-per-step", "0.1"),
)


def survive(world: World, *command: str, after: str) -> None:
    """Runs to an image, ends everything, and lets the next driver put variables where `after` says."""
    place = world.home / "globals-at"
    place.write_text("7e0000000000")
    world.env["FAKE_GLOBALS_AT"] = str(place)
    world.run(*command, options=("--device", "cuda"))
    world.checkpoint_then_die(10, after=20)
    place.write_text(after)


def test_variables_of_a_module_keep_their_contents_where_they_lie_elsewhere(world: World) -> None:
    survive(world, *VARIABLES, after="7e1200000000")
    world.restore("--wait")
    world.wait_end()
    assert set(world.steps()) == set(range(1, 61))


def test_a_variable_whose_address_the_job_knows_comes_back_where_it_was(world: World) -> None:
    survive(world, *VARIABLES, "--ask", "1", after="7e0000000000")
    world.restore("--wait")
    world.wait_end()
    assert set(world.steps()) == set(range(1, 61))


def test_a_variable_whose_address_the_job_knows_must_not_move(world: World) -> None:
    survive(world, *VARIABLES, "--ask", "1", after="7e1200000000")
    done = world.restore("--wait", check=False)
    assert done.returncode == 1
    assert "variable 'table'" in done.stderr and "lies at 0x7e12" in done.stderr, done.stderr


@pytest.mark.parametrize("options", [(), ("--plain",)], ids=["namespaces", "plain"])
def test_what_kernels_print_reaches_stdout_in_order(world: World, options: tuple[str, ...]) -> None:
    """Through a pipe's block buffer, where a driver's text and the program's own share stdio's order."""
    world.env["TEST_KERNELS"] = str(ROOT / "tests/subjects/driver/printing.ptx")
    world.run(*build_program("printing"), options=("--device", "cuda", *options)).wait(60)
    lines = re.findall(r"^(?:host|kernel) (\d+)$", world.text(), re.M)
    assert [int(n) for n in lines] == list(range(1, 1001)), world.tail()
    assert "PASS printing" in world.text()


def test_a_failed_assertion_is_an_error_and_a_line(world: World) -> None:
    world.env["TEST_KERNELS"] = str(ROOT / "tests/subjects/driver/printing.ptx")
    world.run(*build_program("printing"), "claim", options=("--device", "cuda")).wait(60)
    assert world.text().count("Assertion `1 == 2` failed.") == 1, world.tail()
    assert "PASS printing" in world.text()


@pytest.mark.parametrize("on", ["1", "0"])
def test_mapped_host_memory_works_where_it_is_registered_and_is_refused_elsewhere(
    world: World, on: str
) -> None:
    world.env["TEST_KERNELS"] = str(SUBJECTS / "variables.ptx")
    world.env["DEVPROXY_CUDA_REGISTER_WINDOW"] = on
    words = () if on == "1" else ("refused",)
    world.run(*build_program("mapped"), *words, options=("--device", "cuda")).wait(60)
    assert "PASS mapped" in world.text(), world.tail()
    if on == "0":
        assert "refuses CU_MEMHOSTALLOC_DEVICEMAP" in world.text()
        assert "DEVPROXY_CUDA_REGISTER_WINDOW=1" in world.text()


@pytest.mark.parametrize("on", ["1", "0"])
def test_managed_memory_works_where_host_memory_is_mapped_and_is_refused_elsewhere(
    world: World, on: str
) -> None:
    world.env["TEST_KERNELS"] = str(SUBJECTS / "variables.ptx")
    world.env["DEVPROXY_CUDA_REGISTER_WINDOW"] = on
    words = () if on == "1" else ("refused",)
    world.run(*build_program("managed"), *words, options=("--device", "cuda")).wait(60)
    assert "PASS managed" in world.text(), world.tail()
    if on == "0":
        assert "cuMemAllocManaged is refused" in world.text()
        assert "DEVPROXY_CUDA_REGISTER_WINDOW=1" in world.text()


def test_linking_and_tensor_maps_are_the_drivers(world: World) -> None:
    world.env["TEST_KERNELS"] = str(SUBJECTS / "variables.ptx")
    world.run(*build_program("linking"), "fake", options=("--device", "cuda")).wait(60)
    assert "PASS linking" in world.text(), world.tail()


@pytest.mark.parametrize(
    "words, said", [("settle_us=7", ""), ("settle=7", "'settle=7' is no NAME=NUMBER")]
)
def test_settings_for_measurements(words: str, said: str, world: World) -> None:
    world.env |= {"DEVPROXY_CUDA_TUNE": words, "TEST_KERNELS": str(SUBJECTS / "variables.ptx")}
    code = world.run(*build_program("linking"), "fake", options=("--device", "cuda")).wait(60)
    assert ("PASS linking" in world.text()) == (not said), world.tail()
    assert (code == 0) == (not said)
    if said:
        assert f"DEVPROXY_CUDA_TUNE: {said}" in world.text()


def test_waits_end_though_the_device_marks_nothing_of_its_own_accord(world: World) -> None:
    world.env |= {"DEVPROXY_CUDA_TUNE": "settle_us=600000000"}
    world.run(*build_program("waits"), options=("--device", "cuda")).wait(100)
    assert "PASS waits" in world.text(), world.tail()


TORCH_JOBS = {
    "gpt.py": ("--steps", "40", "--seconds-per-step", "0.1", "--workers", "2"),
    "torch_graph.py": ("--steps", "40", "--seconds-per-step", "0.1"),
}


@pytest.mark.parametrize("subject", TORCH_JOBS)
def test_pytorch_through_the_executor(subject: str, world: World) -> None:
    """PyTorch's operators by hal/cuda: descriptions of executors, launches in stream order, the primary context, the
    executor's state in the dump. The executor is the one for the host, so the numbers are the software GPU's."""
    command = (sys.executable, str(SUBJECTS / subject), *TORCH_JOBS[subject])
    undisturbed = world.undisturbed(*command)
    world.env |= {"DEVPROXY_CUDA_EXECUTOR": "host", "DEVPROXY_LOG": "warn,device=info"}
    world.run(*command, options=("--device", "cuda"))
    world.wait_step(10)
    (log,) = world.shm.glob("devproxy-*/j/gpu0.log")
    assert re.search(r"warmed: ms=\d+ ok", log.read_text()), (
        "the server loaded nothing beside the import"
    )
    world.checkpoint_then_die(10, after=20)
    world.restore("--wait")
    world.wait_end()
    assert world.digest() == undisturbed
    assert len(world.nonces()) == 1
    assert set(world.steps()) == set(range(1, 41))


def test_an_image_moves_between_kinds_of_gpu(world: World) -> None:
    """Operators by name and plain memory: begun on the software GPU, on by hal/cuda, and back. Both have the executor for
    the host here, so the numbers stay the same."""
    command = (
        sys.executable,
        str(SUBJECTS / "gpt.py"),
        *("--steps", "45", "--seconds-per-step", "0.1"),
    )
    world.env["DEVPROXY_CUDA_EXECUTOR"] = "host"
    undisturbed = world.undisturbed(*command)
    world.run(*command, options=("--device", "soft"))
    world.checkpoint_then_die(8, after=12)
    # The job gives freed pages of pinned memory back, and a driver that has it registered would go on using them.
    registered = world.restore("--device", "cuda", check=False, DEVPROXY_CUDA_REGISTER_WINDOW="1")
    assert registered.returncode != 0 and "registers it" in registered.stderr, registered.stderr
    world.restore("--device", "cuda")
    world.wait_step(20)
    assert world.ctl_json("status", "j")["device"] == "cuda"
    world.checkpoint_then_die(20, after=26)
    world.restore("--device", "soft", "--wait")
    world.wait_end()
    assert world.digest() == undisturbed
    assert len(world.nonces()) == 1
    assert set(world.steps()) == set(range(1, 46))
    logs = (world.home / "state" / "logs").glob("*")
    said = world.text() + "".join(path.read_text(errors="replace") for path in logs)
    assert "random numbers are others from here on" in said, said[-2000:]


def test_machine_code_keeps_an_image_to_its_kind_of_gpu(world: World) -> None:
    world.run(*VARIABLES, options=("--device", "cuda"))
    world.checkpoint_then_die(10, after=12)
    done = world.restore("--device", "soft", check=False)
    assert done.returncode != 0
    assert "1 module(s) of machine code" in done.stderr, done.stderr
    assert "--allow-other-gpu" in done.stderr
    done = world.restore("--device", "soft", "--allow-other-gpu", check=False)
    assert done.returncode != 0 and "--allow-other-gpu" not in done.stderr, done.stderr
