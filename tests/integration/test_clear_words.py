# SPDX-License-Identifier: Apache-2.0
"""What is in the way is said in one line: what, on which object, what to do."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import RUN

CTL = [sys.executable, "-m", "devproxy.cli.ctl"]


@pytest.fixture
def refused(job_env: dict[str, str], tmp_path: Path) -> Callable[..., str]:
    """refused(command, ...) -> the one line; exit code 2, in less than ten seconds."""

    def run(
        command: list[str],
        env: dict[str, str] | None = None,
        cwd: Path = tmp_path,
        first: Callable[[], None] | None = None,
    ) -> str:
        done = subprocess.run(
            command,
            env=job_env | {"DEVPROXY_STATE_DIR": str(tmp_path / "state")} | (env or {}),
            cwd=cwd,
            preexec_fn=first,
            capture_output=True,
            text=True,
            timeout=10,
        )
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
        return done.stderr

    return run


JOB = [*RUN, "--device", "soft", "--name", "words"]


def test_a_working_folder_that_was_removed(refused: Callable[..., str], tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    line = refused([*JOB, "--", "true"], cwd=gone, first=lambda: os.rmdir(gone))
    assert "the working folder cannot be used: No such file or directory" in line


@pytest.mark.parametrize("limit", [12, 30, 60])
def test_few_descriptors(refused: Callable[..., str], limit: int) -> None:
    def first() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    line = refused([*JOB, "--", "true"], first=first)
    assert f"a process may have {limit} open files here, and 68 are needed" in line


@pytest.mark.parametrize("store", ["/proc", "/proc/x"])
def test_a_store_where_no_folder_can_be_made(refused: Callable[..., str], store: str) -> None:
    line = refused([*JOB, "--store", store, "--", "true"])
    assert f"--store {store} cannot be used (open failed on store file://{store}: " in line
    done = subprocess.run(
        [*CTL, "images", "--store", "/proc"], capture_output=True, text=True, timeout=20
    )
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1, done.stderr


def test_a_full_state_folder(refused: Callable[..., str], tmp_path: Path) -> None:
    state = tmp_path / "full"
    state.mkdir(mode=0o700)
    words = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "none", str(state)]
    subprocess.run(words, check=True)
    try:
        line = refused([*JOB, "--", "true"], env={"DEVPROXY_STATE_DIR": str(state)})
    finally:
        subprocess.run(["umount", "-l", str(state)], check=True)
    assert f"devproxy's own files cannot be kept in {state}: No space left on device" in line


def an_image(env: dict[str, str], store: Path) -> None:
    body = """
import sys
from devproxy.checkpoint.store import Store
with Store.open(sys.argv[1]).writer("words-1") as writer:
    writer.put_bytes(b"x", kind="host")
    writer.commit({"job": "words", "job_id": "id", "epoch": 1})
"""
    subprocess.run([sys.executable, "-c", body, str(store)], env=env, check=True, timeout=20)


@pytest.mark.parametrize("what", ["missing", "a FIFO"])
@pytest.mark.parametrize("verb", ["restore", "images"])
def test_a_key_that_is_none(
    refused: Callable[..., str], job_env: dict[str, str], tmp_path: Path, what: str, verb: str
) -> None:
    """A new key would help nobody, and the image is whole."""
    key, store = tmp_path / "key", tmp_path / "store"
    an_image(job_env | {"DEVPROXY_KEY_FILE": str(key)}, store)
    key.unlink()
    if what == "a FIFO":
        os.mkfifo(key, 0o600)
    words = (
        ["restore", "words", "--store", str(store)]
        if verb == "restore"
        else ["images", "--store", str(store)]
    )
    line = refused([*CTL, *words], env={"DEVPROXY_KEY_FILE": str(key)})
    assert f"key file {key} " in line
    assert "not whole" not in line
    assert ("does not exist" if what == "missing" else "is not a file") in line
    assert what == "a FIFO" or not key.exists()
