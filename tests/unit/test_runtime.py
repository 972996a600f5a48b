# SPDX-License-Identifier: Apache-2.0
"""The runtime folder: names, ownership, the living and the dead."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from devproxy import runtime
from devproxy.errors import Refused


@pytest.fixture(autouse=True)
def private_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="devproxy-test-") as folder:  # short: sockets are in it
        monkeypatch.setenv("DEVPROXY_SHM_DIR", folder)
        yield Path(folder)


@pytest.mark.parametrize("name", ["a", "train-1", "A.b_c-9", "x" * 64])
def test_names(name: str) -> None:
    assert runtime.check_job_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "-a", ".a", "x" * 65, "a b", "ä", "ledger-x"]
)
def test_bad_names(name: str) -> None:
    with pytest.raises(Refused):
        runtime.check_job_name(name)


def test_default_name_is_a_name() -> None:
    for command in ("python", "/a/b/train.py", "...", "a b/ü", "x" * 300):
        runtime.check_job_name(runtime.default_job_name(command))


def test_a_job_comes_and_goes(private_root: Path) -> None:
    job = runtime.create_job("one")
    assert os.stat(job.path).st_mode & 0o777 == 0o700
    assert runtime.list_jobs() == [("one", job.path, True)]
    with pytest.raises(Refused, match="already running"):
        runtime.create_job("one")
    other = runtime.create_job("two")
    Path(runtime.ledger_path(job, "soft", 0)).touch()
    runtime.remove_job(job)
    assert [name for name, _, _ in runtime.list_jobs()] == ["two"]
    assert Path(runtime.ledger_path(job, "soft", 0)).exists()  # the other job's servers use it
    runtime.remove_job(other)
    assert list(private_root.iterdir()) == []


def test_the_dead_are_swept_and_the_living_stay() -> None:
    dead, living = runtime.create_job("dead"), runtime.create_job("living")
    (Path(dead.path) / "sub").mkdir()
    (Path(dead.path) / "sub" / "link").symlink_to("/etc")
    os.close(dead.lock_fd)  # as when devproxy-run was killed
    again = runtime.create_job("dead")
    assert not (Path(again.path) / "sub").exists()
    assert Path("/etc/passwd").exists()
    runtime.remove_job(again)
    runtime.remove_job(living)


HOLDER = "import fcntl, os, signal, sys; fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600);\
fcntl.flock(fd, fcntl.LOCK_EX); print(1, flush=True); os.kill(os.getpid(), signal.SIGSTOP)"


def test_a_lock_that_is_held_for_long_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stopped process, or a stranger: a start says so, an end leaves the folder to the next sweep."""
    monkeypatch.setattr(runtime, "LOCK_S", 0.3, raising=False)
    first = runtime.create_job("first")
    lock = os.path.join(runtime.root_path(), ".lock")
    with subprocess.Popen([sys.executable, "-c", HOLDER, lock], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"1\n"
            os.waitid(os.P_PID, holder.pid, os.WSTOPPED)
            words = f"/.lock is locked by process {holder.pid} .*kill -CONT {holder.pid}"
            with pytest.raises(Refused, match=words):
                runtime.create_job("second")
            runtime.remove_job(first)
            assert os.path.isdir(first.path)
        finally:
            holder.kill()
    runtime.sweep()
    assert not os.path.exists(runtime.root_path())


def test_an_inherited_lock_keeps_the_folder() -> None:
    job = runtime.create_job("held")
    server_side = os.dup(job.lock_fd)
    runtime.remove_job(job)
    assert Path(job.path).exists()
    os.close(server_side)
    runtime.sweep()
    assert not Path(job.path).exists()


def test_root_that_is_a_link() -> None:
    Path(runtime.root_path()).symlink_to("/tmp")
    with pytest.raises(Refused, match="is not a folder"):
        runtime.create_job("x")
    with pytest.raises(Refused):
        runtime.list_jobs()


def test_root_that_is_a_file() -> None:
    Path(runtime.root_path()).touch()
    with pytest.raises(Refused, match="is not a folder"):
        runtime.create_job("x")


def test_root_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes has another number than the folder's owner; so it needs no root to give it away."""
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    os.mkdir(runtime.root_path())
    with pytest.raises(Refused, match=rf"belongs to user {owner}, not to you \({owner + 1}\)"):
        runtime.create_job("x")


def test_root_open_to_others_is_closed() -> None:
    os.mkdir(runtime.root_path())
    os.chmod(runtime.root_path(), 0o777)
    job = runtime.create_job("x")
    assert os.stat(runtime.root_path()).st_mode & 0o777 == 0o700
    runtime.remove_job(job)


def test_a_folder_too_deep_for_a_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("DEVPROXY_SHM_DIR", str(deep))
    with pytest.raises(Refused, match="too long for a socket"):
        runtime.create_job("x")


def test_no_shm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEVPROXY_SHM_DIR", str(tmp_path / "none"))
    with pytest.raises(Refused, match="is not there"):
        runtime.create_job("x")


def test_a_folder_that_two_remove_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At each step the other may have been faster: the tree, an entry, the folder itself."""
    runtime._remove_tree(str(tmp_path / "gone"))
    unlink, rmdir = os.unlink, os.rmdir

    def twice(do: Callable[[str], None]) -> Callable[[str], None]:
        def late(path: str) -> None:
            do(path)
            do(path)

        return late

    (tmp_path / "job" / "stage").mkdir(parents=True)
    for name in ("job/a", "job/stage/b", "job/stage/c"):
        (tmp_path / name).touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", twice(unlink))
        patch.setattr(os, "rmdir", twice(rmdir))
        runtime._remove_tree(str(tmp_path / "job"))
    assert list(tmp_path.iterdir()) == []
