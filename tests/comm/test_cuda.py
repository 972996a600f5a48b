# SPDX-License-Identifier: Apache-2.0
"""NCCL as programs see it on hal/cuda: the programs of test_collectives.py over the fake driver and the fake NCCL.

The fake ends a server that breaks NCCL's rules, and puts operations into their streams late. It shows nothing about NCCL.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import sweeps
from tests.comm.test_collectives import FAILURES, FOLDER, PARTS
from tests.conftest import RUN
from tests.native.test_hal_cuda import fake_gpus

GPUS = 7
# What the fake NCCL reduces is wrong then, so what is right is hal/cuda's own.
NOT_BY_NCCL = {"FAKE_NCCL_WRONG": "1"}
# NCCL does not compare what ranks say, so those that disagree wait for one another until somebody aborts.
NOT_NCCLS = ("other_",)
FAIL = [
    name for name in FAILURES if name == "other_number_of_ranks" or not name.startswith(NOT_NCCLS)
]


@pytest.fixture
def on_cuda(job_env: dict[str, str], tmp_path: Path):
    """on_cuda("scenarios.py", 4): runs the program's ranks, a GPU each, and wants them all to have passed."""
    env = job_env | fake_gpus(tmp_path / "root", GPUS)

    def run(
        program: str,
        ranks: int,
        *words: object,
        gpus: int = 0,
        on: str = "",
        more: dict[str, str] | None = None,
    ) -> str:
        folder = tempfile.mkdtemp(dir=tmp_path)
        command = [sys.executable, str(FOLDER / program), folder, str(ranks), *map(str, words)]
        where = ["--gpu", on] if on else ["--gpus", str(gpus or ranks)]
        several = {"FAKE_NCCL_MANY": "1"} if on else {}
        done = subprocess.run(
            [*RUN, "--device", "cuda", *where, "--gpu-memory", "512MiB", "--", *command],
            env=env | several | (more or {}), capture_output=True, text=True, timeout=110,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        assert done.stdout.splitlines()[-1] == "PASS", done.stdout
        return str(done.stdout)

    return run


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_collectives(on_cuda, ranks: int) -> None:
    part = random.Random(f"{sweeps.seed()} cuda {ranks}").randrange(PARTS)
    output = on_cuda("collectives.py", ranks, part, PARTS, gpus=max(ranks, 2))
    assert int(output.split()[0]) > 100


@pytest.mark.parametrize("on", ["0,0", "0,0,0,0,0,0,0", "0,1,0,1", "0,1,1,2,0", "3,3,3,1"])
def test_collectives_on_shared_gpus(on_cuda, on: str) -> None:
    """Bit for bit the same, wherever the ranks are."""
    ranks = len(on.split(","))
    part = random.Random(f"{sweeps.seed()} {on}").randrange(PARTS)
    output = on_cuda("collectives.py", ranks, part, PARTS, on=on, more=NOT_BY_NCCL)
    assert int(output.split()[0]) > 100


@pytest.mark.every
@pytest.mark.parametrize("late_us", [0, 2000, 20_000])
def test_scenarios(on_cuda, late_us: int) -> None:
    """late_us: how late NCCL puts a group into its stream, at most."""
    on_cuda("scenarios.py", 3, more={"FAKE_NCCL_LATE_US": str(late_us)})


def test_in_the_order_of_the_tree(on_cuda) -> None:
    """What ranks that share a GPU do, for ranks that do not."""
    part = random.Random(f"{sweeps.seed()} tree").randrange(PARTS)
    tree = {"DEVPROXY_REDUCTION": "tree"}
    output = on_cuda("collectives.py", 4, part, PARTS, more=tree | NOT_BY_NCCL)
    assert int(output.split()[0]) > 100
    with pytest.raises(AssertionError, match="cases are wrong"):
        on_cuda("collectives.py", 4, part, PARTS, more=NOT_BY_NCCL)
    on_cuda("scenarios.py", 3, more=tree | {"FAKE_NCCL_MANY": "1"})
    with pytest.raises(AssertionError, match="DEVPROXY_REDUCTION: 'left' is neither nccl nor tree"):
        on_cuda("scenarios.py", 2, "group_of_collectives", more={"DEVPROXY_REDUCTION": "left"})


@pytest.mark.parametrize("on", ["0,0,0", "0,1,0", "0,0,1,1"])
def test_scenarios_on_shared_gpus(on_cuda, on: str) -> None:
    on_cuda("scenarios.py", len(on.split(",")), on=on)


# Ranks of one GPU that disagree are known at once.
@pytest.mark.parametrize("name", [name for name in FAILURES if name != "server_dies"])
def test_failures_on_one_gpu(on_cuda, name: str) -> None:
    on_cuda("failures.py", 4, name, on="0,0,0,0")


@pytest.mark.parametrize("name", [name for name in FAIL if name != "server_dies"])
def test_failures_on_two_shared_gpus(on_cuda, name: str) -> None:
    on_cuda("failures.py", 4, name, on="0,1,1,0")


@pytest.mark.parametrize("name", [name for name in FAIL if name != "server_dies"])
def test_failures(on_cuda, name: str) -> None:
    on_cuda("failures.py", 4, name)


def test_a_death_is_known_though_its_end_waits_for_the_others(on_cuda) -> None:
    """NCCL's abort in the dead rank's server may wait until the others have left. They hear of the death before."""
    on_cuda("failures.py", 4, "member_dies_large", more={"FAKE_NCCL_LEAVE_MS": "20000"})


def test_one_process_with_all_gpus(job_env: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [*RUN, "--device", "cuda", "--gpus", "3", "--gpu-memory", "512MiB", "--",
         sys.executable, str(FOLDER / "all_devices.py")],
        env=job_env | fake_gpus(tmp_path / "root", GPUS), capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "PASS"


@pytest.mark.parametrize(
    ("library", "said"),
    [
        ("nowhere/libnccl.so.2", "cannot be opened"),
        ("own", "is devproxy's own libnccl.so.2"),
        ("driver", "lacks ncclGetVersion, "),
        ("relative", "must be named by an absolute path"),
    ],
)
def test_a_library_that_is_none(
    on_cuda, job_env: dict[str, str], tmp_path: Path, library: str, said: str
) -> None:
    """The job hears it from NCCL's own call, by name."""
    path = {
        "own": f"{job_env['DEVPROXY_LIB']}/libnccl.so.2",
        "driver": fake_gpus(tmp_path / "other")["DEVPROXY_CUDA_DRIVER"],
        "relative": "libnccl.so.2",
    }.get(library, f"/{library}")
    with pytest.raises(AssertionError, match=said):
        on_cuda("scenarios.py", 2, "group_of_collectives", more={"DEVPROXY_NCCL": path})


@pytest.mark.parametrize("on", ["0,0", "0,1"])
def test_torch_as_on_a_gpu(job_env: dict[str, str], tmp_path: Path, on: str) -> None:
    """PyTorch's client as it is where a real GPU is behind the server: its process group is devproxy's own there too. torch's
    own has another current stream than the plugin, so what it copies on the group's stream, and its futures, waited for
    nothing: a DDP training on an H100 had wrong numbers."""
    env = job_env | fake_gpus(tmp_path / "root", 2)
    env |= {"DEVPROXY_TORCH_OPS": "cuda", "DEVPROXY_CUDA_EXECUTOR": "host", "FAKE_NCCL_MANY": "1"}
    program = FOLDER.parent / "subjects/gpu/torch_links.py"
    done = subprocess.run(
        [*RUN, "--device", "cuda", "--gpu", on, "--gpu-memory", "512MiB", "--", sys.executable, "-W", "ignore", str(program), "2", "small"],
        env=env, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    assert done.stdout.splitlines()[-1] == "PASS", done.stdout
