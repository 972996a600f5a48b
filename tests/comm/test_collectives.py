# SPDX-License-Identifier: Apache-2.0
"""NCCL on the software GPU as programs see it: ranks are processes under devproxy-run, the oracle is tests/comm/model.py."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from codegen import tables
from devproxy.errors import EXIT_SERVER_LOST
from tests import sweeps
from tests.conftest import RUN

FOLDER = Path(__file__).parent
PARTS = 40
RANKS = (2, 3, 4, 7)
# The scenarios of failures.py, which only a process under devproxy-run can import.
FAILURES = re.findall(
    r'^(?:@scenario\ndef |    ")(\w+)(?:\(|": disagreement)',
    (FOLDER / "failures.py").read_text(),
    re.M,
)


@pytest.fixture
def ranks_job(run_job, tmp_path: Path):
    """ranks_job("scenarios.py", 4, gpus=2): runs the program's ranks, and wants them all to have passed."""

    def run(
        program: str,
        ranks: int,
        *arguments: object,
        gpus: int = 0,
        options: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> str:
        folder = tempfile.mkdtemp(dir=tmp_path)
        done = run_job(
            sys.executable, str(FOLDER / program), folder, str(ranks), *map(str, arguments),
            options=["--gpus", str(gpus or ranks), "--gpu-memory", "256MiB", *options], env=env,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        assert done.stdout.splitlines()[-1] == "PASS", done.stdout
        output: str = done.stdout
        return output

    return run


@pytest.mark.parametrize("ranks", RANKS)
def test_collectives(ranks_job, ranks: int) -> None:
    """A part of all cases, another one after each commit. All of them are the sweep below."""
    part = random.Random(f"{sweeps.seed()} {ranks}").randrange(PARTS)
    output = ranks_job("collectives.py", ranks, part, PARTS)
    assert int(output.split()[0]) > 100


@pytest.mark.sweep(1)
@pytest.mark.parametrize("part", range(0, PARTS, 4))
@pytest.mark.parametrize("ranks", RANKS)
def test_every_collective(ranks_job, ranks: int, part: int) -> None:
    for one in range(part, part + 4):
        ranks_job("collectives.py", ranks, one, PARTS)


@pytest.mark.parametrize(
    ("ranks", "gpus", "splicing"),
    [
        pytest.param(4, 2, "on", id="4 ranks on 2 GPUs"),
        pytest.param(3, 1, "on", id="3 ranks on 1 GPU"),
        pytest.param(4, 2, "eager", id="4 ranks on 2 GPUs, spliced"),
        pytest.param(3, 1, "eager,guard", id="3 ranks on 1 GPU, spliced and checked"),
    ],
)
def test_ranks_share_a_gpu(ranks_job, ranks: int, gpus: int, splicing: str) -> None:
    part = random.Random(f"{sweeps.seed()} {ranks} {splicing}").randrange(PARTS)
    env = {"DEVPROXY_SPLICING": splicing}
    ranks_job("collectives.py", ranks, part, PARTS, gpus=gpus, env=env)


@pytest.mark.parametrize(
    ("ranks", "gpus", "options"),
    [
        pytest.param(4, 4, (), id="4 GPUs"),
        pytest.param(2, 2, (), id="2 GPUs"),
        pytest.param(4, 2, (), id="4 ranks on 2 GPUs"),
        pytest.param(3, 3, ("--chaos", "5"), id="chaos 5"),
        pytest.param(4, 1, ("--chaos", "11"), id="chaos 11, one GPU"),
    ],
)
def test_scenarios(ranks_job, ranks: int, gpus: int, options: tuple[str, ...]) -> None:
    ranks_job("scenarios.py", ranks, gpus=gpus, options=options)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("seed", range(100, 120))
def test_scenarios_in_chaos(ranks_job, seed: int) -> None:
    ranks_job("scenarios.py", 3, gpus=1 + seed % 3, options=("--chaos", str(seed)))


@pytest.mark.parametrize("gpus", [2, 3])
def test_one_process_with_all_gpus(run_job, gpus: int) -> None:
    done = run_job(sys.executable, str(FOLDER / "all_devices.py"), options=["--gpus", str(gpus)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "PASS"


@pytest.mark.every
def test_the_failures_are_found() -> None:
    assert {"server_dies", "other_count", "wrong_arguments"} <= set(FAILURES)


@pytest.mark.parametrize("name", [name for name in FAILURES if name != "server_dies"])
def test_failures(ranks_job, name: str) -> None:
    ranks_job("failures.py", 4, name)


def test_a_server_dies(job_env: dict[str, str], tmp_path: Path) -> None:
    """kill -9 of the server of GPU 2 under an all_reduce: the other ranks learn which one it was."""
    job = subprocess.Popen(
        [*RUN, "--device", "soft", "--gpus", "4", "--gpu-memory", "256MiB", "--",
         sys.executable, str(FOLDER / "failures.py"), str(tmp_path), "4", "server_dies"],
        env=job_env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until = time.monotonic() + 60
    while not all((tmp_path / f"posted{rank}").exists() for rank in range(4)):
        assert time.monotonic() < until
        assert job.poll() is None, job.communicate()
        time.sleep(0.01)
    servers = [
        p for p in psutil.Process(job.pid).children(recursive=True)
        if p.name() == "devproxy-server" and "--gpu 2 " in " ".join(p.cmdline())
    ]  # fmt: skip
    assert len(servers) == 1
    servers[0].kill()
    (tmp_path / "killed").touch()
    out, err = job.communicate(timeout=60)
    assert job.returncode == EXIT_SERVER_LOST, f"{out}\n{err}"
    assert out.splitlines()[-1] == "PASS", f"{out}\n{err}"


@pytest.mark.every
def test_every_answered_function_is_called(ranks_job, run_job, tmp_path: Path) -> None:
    """What docs/support.md says is answered: some program has called it."""
    called = tmp_path / "called"
    ranks_job("collectives.py", 2, 0, PARTS, env={"TEST_CALLED": str(called)})
    ranks_job("scenarios.py", 3, gpus=2, env={"TEST_CALLED": str(called)})
    done = run_job(
        sys.executable,
        str(FOLDER / "all_devices.py"),
        options=["--gpus", "2"],
        env={"TEST_CALLED": str(called)},
    )
    assert done.returncode == 0, done.stderr
    ranks_job("failures.py", 3, "use_after_the_end", env={"TEST_CALLED": str(called)})
    answered = {export.name for export in tables.library_exports("nccl") if export.api}
    assert len(answered) > 30
    assert set(called.read_text().split()) == answered
