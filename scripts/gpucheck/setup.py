# SPDX-License-Identifier: Apache-2.0
"""What a stage knows of the machine, and of the stages before it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpucheck.ends import Refused
from gpucheck.running import Done, Way


@dataclass(frozen=True)
class Setup:
    """What a stage knows of the machine. work: a folder for this campaign alone."""

    bundle: Path
    work: Path
    driver: str
    sysroot: str = ""  # tests: where devproxy looks for the device
    small: bool = False  # tests: megabytes and one turn, where a GPU is given gigabytes and three
    # Developers: a device of devproxy's own (record, soft) in the place of the GPU, on both sides of each comparison.
    rehearse: str = ""
    keep: Path = Path()  # what is written there comes back from the device
    ops_start: str = ""  # where the sweep of torch's ops begins
    ops: str = ""  # of the sweep only these
    spoil: str = ""  # tests: this case has other numbers on the proxied side

    @property
    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.bundle / "manifest.json").read_text())
        return found

    def _env(self, libraries: Sequence[str], python: Sequence[str]) -> dict[str, str]:
        """Ours without devproxy's variables, and with these folders before those of the user."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("DEVPROXY_")}
        # The driver opens its own parts (the PTX compiler) by name: its folder, where the loader may not know it.
        beside = os.path.dirname(self.driver) if self.driver.startswith("/usr/local") else ""
        libraries = [*libraries, env.get("LD_LIBRARY_PATH", ""), beside]
        python = [
            *python,
            str(self.bundle / "programs"),
            str(self.work / "spare"),
            env.get("PYTHONPATH", ""),
        ]
        return env | {
            "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
            "PYTHONPATH": ":".join(filter(None, python)),
            "TEST_KERNELS": str(self.kernels()),
        }

    def native(self, gpus: int = 1) -> Way:
        """gpus: which a rehearsal needs."""
        if self.rehearse:
            return self.proxied("--plain", "--gpus", str(gpus))
        return Way([], self.native_env())

    def proxied(self, *options: str, registered: bool = False) -> Way:
        """registered: pinned memory is registered with the driver, so that kernels see it and copies go straight."""
        device = self.rehearse or "cuda"
        run = [sys.executable, "-m", "devproxy.cli.run", "--device", device, *options, "--"]
        env = self.proxied_env()
        if registered:
            env["DEVPROXY_CUDA_REGISTER_WINDOW"] = "1"
        return Way(run, env)

    def past_the_proxy(self, done: Done) -> bool:
        """Does a program's list of mapped files have the genuine driver?"""
        return not self.rehearse and os.path.realpath(self.driver) in done.out

    def native_env(self) -> dict[str, str]:
        """Where `libcuda.so.1` and `libcudart.so.13` are the genuine ones, under these very names."""
        return self._env([str(self.work / "native"), str(self.work / "compilers")], []) | {
            "TRITON_LIBCUDA_PATH": str(self.work / "native")
        }

    def proxied_env(self) -> dict[str, str]:
        """For devproxy-run and devproxy: our Python side, a runtime folder and a state folder of this campaign."""
        without_runtime = (self.work / "runtime").exists()  # the device has no C++ runtime
        libraries = [str(self.bundle / "sys")] if without_runtime else []
        libraries.append(str(self.work / "compilers"))
        told = {"DEVPROXY_TEST_NO_KERNELS": "1"} if self.rehearse == "record" else {}
        return (
            self._env(libraries, [str(self.bundle / "py"), str(self.work / "site")])
            | told
            | {
                "DEVPROXY_LIB": str(self.bundle / "lib"),
                "DEVPROXY_CUDA_DRIVER": self.driver,
                "DEVPROXY_SHM_DIR": str(self.shm()),
                "DEVPROXY_STATE_DIR": str(self.work / "state"),
                "DEVPROXY_KEY_FILE": str(self.work / "key"),
                "DEVPROXY_DAEMON_IDLE_S": "1",
                "DEVPROXY_CRIU": str(self.bundle / "criu" / "sbin" / "criu"),
                "DEVPROXY_SYSROOT": self.sysroot,
                # Triton links its launcher to the file in this folder; that it is the preloaded one, its name says.
                "TRITON_LIBCUDA_PATH": str(self.work / "shim"),
            }
        )

    def shm(self) -> Path:
        """The runtime folder. Made by the campaign, in /dev/shm."""
        return Path((self.work / "shm").read_text())

    def kernels(self, form: str = "cubin") -> Path:
        return self.bundle / "kernels" / f"kernels.{form}"


def report_of(work: Path, name: str) -> Path:
    return work / f"report-{name}.json"


def earlier(setup: Setup, name: str) -> dict[str, Any]:
    """The figures of a stage that has run in this campaign, or nothing."""
    try:
        figures: dict[str, Any] = json.loads(report_of(setup.work, name).read_text())["figures"]
    except (OSError, ValueError):
        return {}
    return figures


def kernels(setup: Setup, form: str = "cubin") -> bytes:
    path = setup.kernels(form)
    if not path.exists():
        raise Refused(f"{path.name} is not in the bundle (made without nvcc)")
    return path.read_bytes()


def cannot_register(setup: Setup) -> str:
    """What e_host_memory heard when it registered shared memory as hal/cuda does it: a piece of a file of /dev/shm."""
    found = earlier(setup, "e_host_memory").get("tmpfs", {}).get("64MiB", {})
    return f"the driver does not register shared memory: {found}" if isinstance(found, str) else ""
