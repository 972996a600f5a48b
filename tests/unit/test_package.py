# SPDX-License-Identifier: Apache-2.0
"""The package: one version, and where an installed devproxy finds and puts its pieces."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from devproxy import __version__, config, state
from devproxy.checkpoint import criu
from devproxy.errors import Refused

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_version_is_said_once() -> None:
    said = subprocess.run(
        ["git", "grep", "-lFw", __version__, "--", "*.py", "*.toml", "*.txt", "*.sh", "*.in"],
        cwd=ROOT, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    assert [name for name in said if not name.startswith("tests/")] == ["devproxy/__init__.py"]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(__version__)}\b", changelog, re.M)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library folder as a wheel has it, and a state folder; returns the latter."""
    lib = tmp_path / "site-packages/devproxy/lib"
    lib.mkdir(parents=True)
    for name in ("devproxy-server", "libcuda.so.1"):
        (lib / name).touch()
    (lib / "plugin-key").write_text("0123\n")
    monkeypatch.setattr(config, "PACKAGED_LIB", str(lib))
    monkeypatch.delenv("DEVPROXY_LIB", raising=False)
    monkeypatch.delenv("DEVPROXY_CRIU", raising=False)
    monkeypatch.setenv("DEVPROXY_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def test_what_an_installed_devproxy_makes_goes_into_the_state_folder(installed: Path) -> None:
    """Not beside its libraries: pip removes only what it has installed."""
    assert config.plugin_dir() == str(installed / "plugins/0123")
    assert config.criu_dir() == str(installed / "criu")
    plugin = installed / "plugins/0123/torch-2.13/libdevproxy_torch.so"
    plugin.parent.mkdir(parents=True)
    plugin.touch()
    pylib = installed.parent / "pylib"
    pylib.mkdir()
    build = state.ensure_build(config.lib_dir(), str(pylib), config.plugin_dir())
    files = state.build_files(state.build_path(build))
    assert "torch-2.13/libdevproxy_torch.so" in files
    assert "devproxy-server" in files


def test_a_program_or_plugin_in_a_state_folder_that_others_may_change_is_not_run(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = installed / "criu/sbin/criu"
    program.parent.mkdir(parents=True)
    ran = installed.parent / "ran"
    program.write_text(f"#!/bin/sh\ntouch {ran}\necho 'Version: 4.2'\n")
    program.chmod(0o755)
    pylib = installed.parent / "pylib"
    pylib.mkdir()
    (installed / "plugins/0123").mkdir(parents=True)
    monkeypatch.setattr("os.getuid", lambda: 12345)  # the folder is another user's
    with pytest.raises(Refused, match="belongs to user"):
        criu.find()
    with pytest.raises(Refused, match="belongs to user"):
        state.ensure_build(config.lib_dir(), str(pylib), config.plugin_dir())
    assert not ran.exists()


def test_a_checkout_keeps_what_it_makes_in_its_build_folder() -> None:
    assert config.criu_dir() == str(ROOT / "build/criu")
    assert config.script("install_criu.sh") == str(ROOT / "scripts/install_criu.sh")


def test_an_sdist_has_all_that_a_wheel_is_built_from(tmp_path: Path) -> None:
    make = (
        "import sys; from setuptools.build_meta import build_sdist; print(build_sdist(sys.argv[1]))"
    )
    made = subprocess.run(
        [sys.executable, "-c", make, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert made.returncode == 0, made.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        inside = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    parts = ["devproxy", "codegen", "scripts", "requirements", "CMakeLists.txt", "setup.py"]
    listed = subprocess.run(
        ["git", "ls-files", *parts, "pyproject.toml", "LICENSE", "README.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert len(listed) > 300
    assert not set(listed) - inside
    assert not [name for name in inside if "/_pb/" in name or name.startswith(("build/", "tests/"))]
