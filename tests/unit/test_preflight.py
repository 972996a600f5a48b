# SPDX-License-Identifier: Apache-2.0
"""What is refused before anything is started: devices and torch, by files alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from devproxy import config, machine
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


def install_cuda_torch(prefix: Path, cuda: str) -> str:
    python = install_torch(prefix, "2.13.0+cu130")
    version = prefix / "lib/python3.11/site-packages/torch/version.py"
    version.write_text(version.read_text() + f"debug = False\ncuda: Optional[str] = {cuda}\n")
    return python


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
    assert preflight.choose_device("soft", [0]) == ("soft", "")
    device, note = preflight.choose_device("auto", [0])
    assert device == "soft"
    assert "simulated" in note
    with pytest.raises(Refused, match="no NVIDIA device is here"):
        preflight.choose_device("cuda", [0])
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    with pytest.raises(Refused, match="an NVIDIA device is there"):
        preflight.choose_device("auto", [0])
    assert preflight.choose_device("soft", [0]) == ("soft", "")


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with an NVIDIA device and no driver library."""
    monkeypatch.setenv("DEVPROXY_SYSROOT", str(tmp_path))
    monkeypatch.delenv(config.CUDA_DRIVER, raising=False)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    return tmp_path


def put(root: Path, place: str) -> None:
    path = root / place.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def test_cuda_needs_the_driver(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match=r"libcuda\.so\.1 is not: .*DEVPROXY_CUDA_DRIVER") as refusal:
        preflight.choose_device("cuda", [0])
    assert refusal.value.exit_code == 2
    monkeypatch.setenv(config.CUDA_DRIVER, "/opt/libcuda.so.1")
    put(gpu, machine.CUDA_DRIVER_PLACES[0])  # the named one counts, and no other
    with pytest.raises(Refused, match=r"but /opt/libcuda\.so\.1 is not"):
        preflight.choose_device("cuda", [0])
    put(gpu, "/opt/libcuda.so.1")
    device, note = preflight.choose_device("cuda", [0])
    assert device == "cuda"
    assert note.endswith("/opt/libcuda.so.1")


@pytest.mark.parametrize("place", machine.CUDA_DRIVER_PLACES)
def test_cuda_says_that_it_is_experimental(gpu: Path, place: str) -> None:
    put(gpu, place)
    device, note = preflight.choose_device("cuda", [0])
    assert device == "cuda"
    assert "experimental: it has been seen on H100 and H200" in note
    assert note.endswith(place)
    assert "\n" not in note
    with pytest.raises(Refused, match="seen on H100 and H200 alone"):  # only when asked for
        preflight.choose_device("auto", [0])


def test_the_server_looks_for_the_driver_in_the_same_places() -> None:
    source = (Path(__file__).resolve().parents[2] / "devproxy/hal/cuda/driver_table.cc").read_text()
    places = re.findall(r'"(/\S+libcuda\.so\.1)"', source)
    others = {p for p in places if "-linux-gnu" in p and os.uname().machine not in p}
    assert [p for p in places if p not in others] == list(machine.CUDA_DRIVER_PLACES)


def test_cuda_on_a_machine_without_a_driver() -> None:
    """devproxy-run as a whole: exit code 2, one line, nothing started. The server itself refuses the same way."""
    bare = {k: v for k, v in os.environ.items() if not k.startswith("DEVPROXY_")}
    run = [sys.executable, "-m", "devproxy.cli.run", "--device", "cuda", "--", "true"]
    done = subprocess.run(
        run, env=bare | {"DEVPROXY_SYSROOT": "/nonexistent"}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "--device cuda: no NVIDIA device is here" in done.stderr


def test_libraries_that_refuse_come_with_a_cuda_wheel_on_a_device_of_nvidia(tmp_path: Path) -> None:
    python = install_cuda_torch(tmp_path / "cuda", "'13.0'")
    refused = [f"refused/{name}" for name in preflight.REFUSED["13"]]
    assert len(refused) == 11
    compiler = str(tmp_path / "cuda/lib/python3.11/site-packages/nvidia/cu13/lib")
    assert preflight.cuda_wheel("cuda", python) == (refused, compiler)
    assert preflight.cuda_wheel("record", python) == (refused, compiler)
    assert preflight.cuda_wheel("soft", python) == ([], "")
    torchrun = tmp_path / "cuda/bin/torchrun"
    assert preflight.cuda_wheel("cuda", str(torchrun)) == (refused, compiler)
    other = install_cuda_torch(tmp_path / "older", "'12.8'")
    assert preflight.cuda_wheel("cuda", other) == ([], "")
    for name, cuda in (("cpu", "None"), ("rocm", "''")):
        python = install_cuda_torch(tmp_path / name, cuda)
        assert preflight.cuda_wheel("cuda", python) == ([], "")
    bare = install_torch(tmp_path / "bare", "2.13.0")
    assert preflight.cuda_wheel("cuda", bare) == ([], "")


def test_debians_python_has_what_pip_installs_in_a_place_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = []

    def look(path: str) -> list[str]:
        looked.append(path)
        raise FileNotFoundError

    monkeypatch.setattr(os, "listdir", look)
    assert preflight.find_torch("/usr/bin/python3-of-nobody") is None
    assert "/usr/lib" in looked and looked[-1] == "/usr/local/lib"


def test_a_shell_script_in_an_activated_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Python is the first on PATH; a command that is a Python is that one and no other."""
    python = Path(install_cuda_torch(tmp_path / "cuda", "'13.0'"))
    python.chmod(0o755)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert preflight.cuda_wheel("cuda", "/bin/sh") == ([], "")
    monkeypatch.setenv("PATH", f"/nonexistent:{python.parent}")
    assert len(preflight.cuda_wheel("cuda", "/bin/sh")[0]) == 11
    assert preflight.cuda_wheel("cuda", str(tmp_path / "other/bin/python3")) == ([], "")


def test_outputs(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="is not there: build devproxy"):
        preflight.check_outputs(str(tmp_path), str(tmp_path / "devproxy-server"))
    spaced = tmp_path / "a b"
    spaced.mkdir()
    (spaced / "libcuda.so.1").touch()
    (spaced / "devproxy-server").touch(0o755)
    with pytest.raises(Refused, match="LD_PRELOAD cannot carry"):
        preflight.check_outputs(str(spaced), str(spaced / "devproxy-server"))


def test_a_gpu_that_is_not_there() -> None:
    preflight.check_there("soft", [0, machine.MOST_GPUS - 1])
    with pytest.raises(Refused, match="no GPU 64, 99: its GPUs are numbered from 0 to 63"):
        preflight.check_there("soft", [64, 1, 99])
