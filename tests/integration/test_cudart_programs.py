# SPDX-License-Identifier: Apache-2.0
"""The programs of tests/cudart, built by nvcc with the shared runtime, over the recording device and our libcudart.

No kernel is executed there. A program checks every result of a call, every copy and fill, and skips what a kernel would
have made; its last line says so, and a run here is never more than that. On a GPU gpu_check's stage c_cudart runs them
whole, natively and through the proxy.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cudart import build as cudart
from tests.integration.needs import require_nvcc, require_nvrtc

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "tests" / "cudart"

# What is not there yet, or never will be: title of the program -> what it says then, word for word. A program that
# passes or fails with another text makes its test fail: this table is the list of what is missing.
REFUSALS: dict[str, str] = {
    "linker": "linking needs NVIDIA's compiler, which this device does not have; link before loading",
    "mapped": "cuMemHostGetDevicePointer is refused for memory of cuMemHostRegister",
    "virtual_memory alias": "one allocation handle at two addresses at once is refused",
}

RUNS = [(one, run) for one in cudart.programs() for run in one.runs]


def title(run: tuple[cudart.Program, tuple[str, ...]]) -> str:
    return " ".join((run[0].name, *run[1]))


@pytest.fixture(scope="session")
def nvcc() -> str:
    return require_nvcc()


def over_the_recording_device(
    env: dict[str, str], command: list[str], *options: str, seconds: float = 100
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "devproxy.cli.run", "--device", "record", *options, "--", *command],
        capture_output=True, text=True, errors="replace", timeout=seconds, cwd=ROOT,
        env=env | {"DEVPROXY_TEST_NO_KERNELS": "1"},
    )  # fmt: skip


@pytest.mark.parametrize("run", RUNS, ids=title)
def test_program_without_kernels(
    run: tuple[cudart.Program, tuple[str, ...]], nvcc: str, job_env: dict[str, str]
) -> None:
    """Every call's result and every copy, or the refusal that is known."""
    program, arguments = run
    if program.name == "nvrtc":
        job_env["LD_LIBRARY_PATH"] = require_nvrtc()
    try:
        built = cudart.build(nvcc, cudart.version_of(nvcc), program, BUILD)
    except cudart.Failed as failure:
        pytest.fail(str(failure), pytrace=False)
    done = over_the_recording_device(job_env, [str(built), *arguments])
    said = f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    if refusal := REFUSALS.get(title(run)):
        assert done.returncode == 1, f"it is no longer refused: take it out of REFUSALS\n{said}"
        assert refusal in said
    else:
        assert done.returncode == 0, said
        assert done.stdout.splitlines()[-1] == f"ok {program.name} (without kernels)", said


def test_every_exception_names_a_program() -> None:
    titles = {title(run) for run in RUNS}
    assert set(REFUSALS) <= titles
    assert len(titles) == len(RUNS)


def test_a_program_without_the_shared_runtime_is_refused(
    nvcc: str, job_env: dict[str, str]
) -> None:
    """NVIDIA's own runtime, linked in, cannot run on our driver shim: said before it starts, with the remedy."""
    one = next(one for one in cudart.programs() if one.name == "templates")
    static = cudart.build(nvcc, cudart.version_of(nvcc), one, BUILD, "-cudart", "static")
    done = over_the_recording_device(job_env, [str(static)])
    assert done.returncode != 0
    assert "-cudart shared" in done.stderr, done.stderr
    assert "ok templates" not in done.stdout
