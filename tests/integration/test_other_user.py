# SPDX-License-Identifier: Apache-2.0
"""A user without privilege: the job runs plain, says so, and every verb that needs an image is refused by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devproxy import config

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
# The checkout and the Python may lie where only root gets to: they are shown to the other user by mounts that end with
# the command.
SHOW = """
set -e
mount --bind "$1" "$2/checkout"; mount --bind "$3" "$2/python"; mount --bind "$4" "$2/packages"; shift 4
exec setpriv --reuid 65534 --regid 65534 --clear-groups -- "$@"
"""
JOB = """
import ctypes, os, sys
cu = ctypes.CDLL("libcuda.so.1"); context = ctypes.c_void_p(); p = ctypes.c_uint64()
assert cu.cuInit(0) == 0
assert cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 and cu.cuCtxSetCurrent(context) == 0
assert cu.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(1 << 20)) == 0
assert cu.cuMemsetD32_v2(p, 7, ctypes.c_size_t(1 << 18)) == 0
got = (ctypes.c_uint32 * 4)()
assert cu.cuMemcpyDtoH_v2(got, p, ctypes.c_size_t(16)) == 0
print(os.getuid(), list(got), flush=True)
sys.stdin.readline()
"""


class OtherUser:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("checkout", "python", "packages", "shm", "home"):
            (folder / name).mkdir()
        for name in ("shm", "home"):
            os.chown(folder / name, NOBODY, NOBODY)
        python = folder / "python"
        self.python = str(python / "bin" / Path(sys.executable).resolve().name)
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder / "home"),
            "PYTHONHOME": str(python),
            "LD_LIBRARY_PATH": str(python / "lib"),
            "PYTHONPATH": f"{folder / 'checkout'}:{folder / 'packages'}",
            "DEVPROXY_SHM_DIR": str(folder / "shm"),
            "DEVPROXY_STATE_DIR": str(folder / "home" / "state"),
            "DEVPROXY_LIB": str(folder / "checkout" / os.path.relpath(config.lib_dir(), ROOT)),
            "DEVPROXY_DAEMON_IDLE_S": "1",
        }

    def command(self, *words: str) -> list[str]:
        show = (str(ROOT), str(self.folder), sys.base_prefix, sysconfig.get_path("purelib"))
        return [
            "unshare", "--mount", "--propagation", "private", "sh", "-c", SHOW, "sh", *show, self.python, *words,
        ]  # fmt: skip

    def run(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command("-m", "devproxy.cli.run", "--device", "soft", "--gpu-memory", "64MiB", *words),
            env=self.env, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command("-m", "devproxy.cli.ctl", *words),
            env=self.env, cwd="/", capture_output=True, text=True, timeout=60,
        )  # fmt: skip


@pytest.fixture
def nobody() -> Iterator[OtherUser]:
    if os.getuid() != 0:
        pytest.fail("this test changes its user, which needs root", pytrace=False)
    made = Path(tempfile.mkdtemp(prefix="devproxy-user-", dir="/dev/shm"))
    made.chmod(0o755)
    yield OtherUser(made)
    shutil.rmtree(made, ignore_errors=True)


def test_without_privilege_a_job_runs_plain_and_checkpoints_are_refused(nobody: OtherUser) -> None:
    job = nobody.run("--name", "j", "--", nobody.python, "-c", JOB)
    assert job.stdout is not None
    said = job.stdout.readline()
    assert said == f"{NOBODY} [7, 7, 7, 7]\n", job.communicate()
    deadline = time.monotonic() + 30  # the service starts a moment after the job
    listed: list[dict[str, Any]] = []
    while time.monotonic() < deadline:
        listed = json.loads(nobody.ctl("ps", "--json").stdout)["jobs"]
        if "namespaces" in listed[0]["why_not"]:
            break
    assert [(j["job"], j["checkpointable"]) for j in listed] == [("j", False)]
    for verb in (["checkpoint", "j"], ["suspend", "j"], ["migrate", "j", "--to", "1"]):
        refused = nobody.ctl(*verb)
        assert refused.returncode == 2, refused
        assert (
            "the job runs without namespaces (--plain, or no privilege for them)" in refused.stderr
        )
        assert "devproxy doctor" in refused.stderr
    assert "CAP_SYS_ADMIN" in nobody.ctl("doctor").stdout
    assert job.poll() is None  # none of this disturbed it
    _, errors = job.communicate("\n", timeout=60)
    assert job.returncode == 0, errors


def test_capabilities_are_not_enough_and_that_is_said_first(
    nobody: OtherUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRIU would dump this job, and nobody could restore it: refused before anything stops."""
    given = "+sys_admin,+sys_ptrace,+checkpoint_restore"
    words = f"--clear-groups --inh-caps={given} --ambient-caps={given}"
    monkeypatch.setitem(globals(), "SHOW", SHOW.replace("--clear-groups", words))
    job = nobody.run("--name", "j", "--", nobody.python, "-c", JOB)
    assert job.stdout is not None
    assert job.stdout.readline() == f"{NOBODY} [7, 7, 7, 7]\n"
    for verb in ("checkpoint", "suspend"):
        refused = nobody.ctl(verb, "j", "--progress", "none")
        assert (refused.returncode, refused.stdout) == (2, ""), refused
        assert f"{verb} of job j: an image needs root" in refused.stderr
    (listed,) = json.loads(nobody.ctl("ps", "--json").stdout)["jobs"]
    assert listed["why_not"].startswith("an image needs root")
    assert not (nobody.folder / "home" / "state" / "store").exists()
    _, errors = job.communicate("\n", timeout=60)
    assert job.returncode == 0, errors


def test_another_users_job_is_not_seen_and_not_reached(nobody: OtherUser) -> None:
    """Its folder is closed to others; root, who may look into it, is no user of it either."""
    job = nobody.run("--name", "j", "--", nobody.python, "-c", JOB)
    assert job.stdout is not None
    assert job.stdout.readline().startswith(str(NOBODY))
    folder = nobody.folder / "shm" / f"devproxy-{NOBODY}" / "j"
    assert folder.is_dir()
    assert folder.stat().st_mode & 0o777 == 0o700
    mine = subprocess.run(
        [sys.executable, "-m", "devproxy.cli.ctl", "kill", "j"], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {
            "DEVPROXY_SHM_DIR": nobody.env["DEVPROXY_SHM_DIR"],
            "DEVPROXY_STATE_DIR": str(nobody.folder / "root"),
        },
    )  # fmt: skip
    assert (mine.returncode, "there is no job 'j'" in mine.stderr) == (2, True), mine
    assert job.poll() is None
    job.communicate("\n", timeout=60)
    assert job.returncode == 0
