# SPDX-License-Identifier: Apache-2.0
"""The supervisor, the stats query, the ABI check and all of devproxy-run over a fake server.

What the ABI check reads is a library of a few lines, which gcc makes here."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil
import pytest

from devproxy.errors import Refused
from devproxy.proxy import elf
from tests import own_state
from tests.living import matching

ROOT = Path(__file__).resolve().parent.parent.parent
FAKE = Path(__file__).parent / "fake_server.py"
ABI = bytes(range(32))


@pytest.fixture(scope="session")
def fake_lib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that exports what the ABI check reads."""
    folder = tmp_path_factory.mktemp("lib")
    source = folder / "a.c"
    source.write_text(
        "const unsigned char devproxy_abi_id[32] = {"
        + ",".join(map(str, ABI))
        + "};\nint cuInit() { return 0; }\n"
    )
    subprocess.run(
        [
            "gcc",
            "-shared",
            "-fPIC",
            "-Wl,-soname,libcuda.so.1",
            "-o",
            folder / "libcuda.so.1",
            source,
        ],
        check=True,
    )
    return folder


@pytest.fixture
def env(fake_lib: Path):
    shm = Path(tempfile.mkdtemp(prefix="devproxy-test-", dir="/dev/shm"))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DEVPROXY_", "FAKE_"))}
    yield env | {
        "DEVPROXY_SHM_DIR": str(shm),
        "DEVPROXY_STATE_DIR": own_state.folder(),
        "DEVPROXY_LIB": str(fake_lib),
        "DEVPROXY_SERVER": str(FAKE),
        "FAKE_SERVER_ABI": ABI.hex(),
        "PYTHONPATH": str(ROOT),
        "DEVPROXY_DAEMON_IDLE_S": "0.1",
    }
    deadline = time.monotonic() + 10
    while (left := list(shm.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.05)  # devproxyd leaves last
    shutil.rmtree(shm)
    assert left == []


def start(env: dict[str, str], *arguments: str, **keywords: object) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "devproxy.cli.run", "--device", "soft", "--plain", *arguments]
    return subprocess.Popen(line, env=env, text=True, stdout=-1, stderr=-1, stdin=-3, **keywords)


def run(env: dict[str, str], *arguments: str) -> tuple[int, str, str]:
    job = start(env, *arguments)
    out, err = job.communicate(timeout=60)
    return job.returncode, out, err


def test_elf_constant(fake_lib: Path, tmp_path: Path) -> None:
    library = str(fake_lib / "libcuda.so.1")
    assert elf.exported_bytes(library, "devproxy_abi_id", 32) == ABI
    assert elf.exported_bytes(library, "abi_id", 32) is None  # the tail of a name is not the name
    assert elf.exported_bytes(library, "nothing", 32) is None
    image = Path(library).read_bytes()
    for damaged in (b"", b"text", image[:100], image[:-64]):
        (tmp_path / "x").write_bytes(damaged)
        with pytest.raises(Refused):
            elf.exported_bytes(str(tmp_path / "x"), "devproxy_abi_id", 32)


def test_exit_codes_and_output(env: dict[str, str]) -> None:
    assert run(env, "--", "sh", "-c", "echo out; echo err >&2; exit 5") == (5, "out\n", "err\n")
    assert run(env, "--", "sh", "-c", "kill -9 $$")[0] == 137


def test_its_state_is_not_the_users(env: dict[str, str]) -> None:
    name = f"untouched-{uuid.uuid4().hex[:12]}"
    assert run(env, "--name", name, "--", "true")[0] == 0
    assert matching(Path(f"/var/tmp/devproxy-{os.getuid()}"), f"*/{name}*") == []
    assert matching(Path(env["DEVPROXY_STATE_DIR"]), f"records/{name}.json")


def test_a_job_does_not_end_well_before_its_crashing_server_has_ended(env: dict[str, str]) -> None:
    env |= {"FAKE_SERVER": "crash-slowly:0.1"}
    until_gone = 'while [ -e "$DEVPROXY_JOB_DIR/gpu0.sock" ]; do sleep 0.02; done'
    status, _, err = run(env, "--", "sh", "-c", until_gone)
    assert status == 3
    assert "SIGABRT) while the job ran" in err


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        ("error", 2, "refused: no device memory on GPU 0"),
        ("die", 2, "exit code 7 before it was ready (fatal: something broke)"),
        ("silent", 2, "not ready within 0.5 s"),
        ("other-abi", 2, "of another version"),
        ("crash:0.2", 3, "SIGABRT) while the job ran; its last words: fatal: crashed as told"),
    ],
)
def test_a_server_that_fails(env: dict[str, str], how: str, code: int, says: str) -> None:
    # The limit is for the silent one; on a loaded machine the others may take longer to say what they have to.
    env |= {"FAKE_SERVER": how, "DEVPROXY_START_TIMEOUT_S": "0.5" if how == "silent" else "20"}
    status, _, err = run(env, "--gpus", "2", "--", "sleep", "0.6")
    assert status == code
    assert says in err
    assert code == 3 or err.count("\n") == 1


def test_summary(env: dict[str, str]) -> None:
    status, _, err = run(
        env, "--gpus", "2", "--summary", "--json", "--name", "j", "--", "sleep", "0.1"
    )
    summary = json.loads(err)
    assert status == 0
    assert [gpu["totals"]["launches"] for gpu in summary["gpus"]] == [3, 3]
    assert summary["proof"]["looks"] >= 1
    assert summary["proof"]["held_device"] is False


def test_stragglers_end_with_the_command(env: dict[str, str]) -> None:
    status, out, err = run(env, "--", "sh", "-c", "setsid sleep 1000 >/dev/null & echo $!")
    assert status == 0
    assert "ended 1 process(es)" in err
    assert not psutil.pid_exists(int(out))


def test_kill_9_leaves_nothing(env: dict[str, str]) -> None:
    job = start(env, "--gpus", "2", "--", "sh", "-c", "sleep 1000 & echo up; wait")
    assert job.stdout is not None
    assert job.stdout.readline() == "up\n"
    tree = psutil.Process(job.pid).children(recursive=True)
    assert len(tree) >= 5  # two servers, the janitor, sh, sleep
    job.kill()
    job.communicate(timeout=20)
    gone, alive = psutil.wait_procs(tree, timeout=10)
    assert alive == []
    root = Path(env["DEVPROXY_SHM_DIR"])
    deadline = time.monotonic() + 5
    while list(root.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)


def test_interrupted_before_ready(env: dict[str, str]) -> None:
    job = start(env | {"FAKE_SERVER": "silent"}, "--", "sleep", "1000")
    while not matching(Path(env["DEVPROXY_SHM_DIR"]), "devproxy-*/*/gpu0.sock"):
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=20)
    assert job.returncode == 128 + signal.SIGTERM


def test_ps_and_status(env: dict[str, str]) -> None:
    job = start(env, "--name", "seen", "--gpus", "2", "--", "sh", "-c", "echo up; sleep 1000")
    assert job.stdout is not None
    job.stdout.readline()

    def ctl(*arguments: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "devproxy.cli.ctl", *arguments],
            env=env,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout, done.stderr

    deadline = time.monotonic() + 20
    while (
        "fake GPU" not in ctl("status", "seen")[1]
    ):  # its control socket comes after its processes
        assert time.monotonic() < deadline
    listed = json.loads(ctl("ps", "--json")[1])["jobs"]
    assert [(j["job"], j["gpus"], j["pid"]) for j in listed] == [("seen", [0, 1], job.pid)]
    assert json.loads(ctl("status", "seen", "--json")[1])["servers"][1]["gpu"] == 1
    assert "seen" in ctl("ps")[1]
    code, _, err = ctl("status", "other")
    assert (code, err.count("\n")) == (2, 1)
    job.terminate()
    job.communicate(timeout=20)
    assert job.returncode == 143
    assert json.loads(ctl("ps", "--json")[1])["jobs"] == []
