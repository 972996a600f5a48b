"""What is refused before anything is started: devices and torch, by files alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from devproxy.errors import Refused
from devproxy.proxy import preflight


def install_torch(prefix: Path, version: str) -> str:
    torch = prefix / "lib/python3.11/site-packages/torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "version.py").write_text(f"from x import y\n__version__ = '{version}'\n")
    (torch / "lib/libtorch_cpu.so").touch()
    (prefix / "bin").mkdir()
    (prefix / "bin/python3").touch()
    return str(prefix / "bin/python3")


def check(python: str, lib: Path, command: str = "python3") -> str:
    return preflight.check_torch(python, [command], str(lib))


def test_a_torch_with_its_plugin(tmp_path: Path) -> None:
    python = install_torch(tmp_path, "2.13.0+cpu")
    plugin = tmp_path / "torch-2.13" / preflight.PLUGIN
    assert "devproxy build-torch --python" in check(python, tmp_path)
    plugin.parent.mkdir()
    plugin.touch()
    assert check(python, tmp_path) == ""


@pytest.mark.parametrize("version", ["1.13.1", "2.10.0", "2.16.0a0+git", "unknown"])
def test_unsupported_torch(tmp_path: Path, version: str) -> None:
    with pytest.raises(Refused, match="is not supported: install torch 2.11 to 2.15"):
        check(install_torch(tmp_path, version), tmp_path)
    assert (
        check(str(tmp_path / "bin/python3"), tmp_path, "bash") == ""
    )  # not a Python: not our business


def test_torch_without_its_library(tmp_path: Path) -> None:
    python = install_torch(tmp_path, "2.13.0")
    (tmp_path / "lib/python3.11/site-packages/torch/lib/libtorch_cpu.so").unlink()
    with pytest.raises(Refused, match="has no lib/libtorch_cpu.so"):
        check(python, tmp_path)


def test_a_python_without_torch(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    assert check(str(tmp_path / "bin/python3"), tmp_path) == ""


def test_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVPROXY_SYSROOT", str(tmp_path))
    assert preflight.choose_device("soft") == ("soft", "")
    device, note = preflight.choose_device("auto")
    assert device == "soft"
    assert "simulated" in note
    with pytest.raises(Refused, match="no CUDA device layer"):
        preflight.choose_device("cuda")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    with pytest.raises(Refused, match="an NVIDIA device is there"):
        preflight.choose_device("auto")
    assert preflight.choose_device("soft") == ("soft", "")


def test_outputs(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="is not there: build devproxy"):
        preflight.check_outputs(str(tmp_path), str(tmp_path / "devproxy-server"))
    spaced = tmp_path / "a b"
    spaced.mkdir()
    (spaced / "libcuda.so.1").touch()
    (spaced / "devproxy-server").touch(0o755)
    with pytest.raises(Refused, match="LD_PRELOAD cannot carry"):
        preflight.check_outputs(str(spaced), str(spaced / "devproxy-server"))
