# SPDX-License-Identifier: Apache-2.0
"""A job's copy of devproxy's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from devproxy import config, state


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Library folder and plugin folder, with a state folder of the test's own."""
    monkeypatch.setenv("DEVPROXY_STATE_DIR", str(tmp_path / "state"))
    lib, pylib = tmp_path / "lib", tmp_path / "pylib"
    (lib / "refused").mkdir(parents=True)
    pylib.mkdir()
    (lib / "libcuda.so.1").write_text("shim")
    (lib / "refused/libx.so.1").write_text("x")
    (pylib / "boot.py").write_text("pass")
    return lib, pylib


def test_another_name_of_a_file_is_a_link_and_no_file_of_the_build(
    folders: tuple[Path, Path],
) -> None:
    lib, pylib = folders
    (lib / "libcuda.so").symlink_to(
        "libcuda.so.1"
    )  # a developer's own: neither copied nor in the way
    path = Path(state.build_path(state.ensure_build(str(lib), str(pylib))))
    assert os.readlink(path / "libcuda.so") == "libcuda.so.1"
    assert (path / "libcuda.so").samefile(path / "libcuda.so.1")
    assert state.build_files(str(path)) == ["libcuda.so.1", "pylib/boot.py", "refused/libx.so.1"]
    assert config.job_pylib_dir(str(path)) == str(path / "pylib")


def test_the_runtime_is_mapped_under_a_name_that_torch_does_not_look_for(
    folders: tuple[Path, Path],
) -> None:
    lib, pylib = folders
    (lib / "libcudart.so.13").write_text("runtime")
    path = Path(state.build_path(state.ensure_build(str(lib), str(pylib))))
    assert "libcudart.so" not in str((path / "libcudart.so.13").resolve())
    assert (path / "libcudart.so.13").read_text() == "runtime"
    assert "libcudart-13.so" in state.build_files(str(path))
    assert not (path / "libcudart.so.12").is_symlink()


def test_a_link_without_its_file_is_not_made(folders: tuple[Path, Path]) -> None:
    lib, pylib = folders
    (lib / "libcuda.so.1").unlink()
    path = Path(state.build_path(state.ensure_build(str(lib), str(pylib))))
    assert not (path / "libcuda.so").is_symlink()


def test_a_build_is_copied_once(folders: tuple[Path, Path]) -> None:
    lib, pylib = folders
    first = state.ensure_build(str(lib), str(pylib))
    inode = os.stat(os.path.join(state.build_path(first), "libcuda.so.1")).st_ino
    assert state.ensure_build(str(lib), str(pylib)) == first
    assert os.stat(os.path.join(state.build_path(first), "libcuda.so.1")).st_ino == inode
    (lib / "libcuda.so.1").write_text("another shim")
    assert state.ensure_build(str(lib), str(pylib)) != first
