# SPDX-License-Identifier: Apache-2.0
"""Runs CMake once, puts its libraries into the package. What describes the project is in pyproject.toml."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# What setuptools itself writes. A build leaves the checkout as it was, so all of it goes elsewhere.
WORK = Path(tempfile.mkdtemp(prefix="devproxy-build-"))
atexit.register(shutil.rmtree, WORK, ignore_errors=True)


class BuildWithCMake(build_py):
    """build_py and the C++ side. An editable install uses build/lib of the checkout, which make builds.

    DEVPROXY_BUILD names the folder of CMake's files; one that is there already makes it quick.
    """

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        build = Path(os.environ.get("DEVPROXY_BUILD") or WORK / "native").resolve()
        env = os.environ | {"PYTHON": sys.executable, "DEVPROXY_BUILD": str(build)}
        for command in (["install_system.sh", "--check", "build"], ["build.sh"]):
            done = subprocess.run(["sh", ROOT / "scripts" / command[0], *command[1:]], env=env)
            if done.returncode:
                sys.exit(f"devproxy is not built: scripts/{command[0]} failed (see above)")
        package = Path(self.build_lib) / "devproxy"
        lib = package / "lib"
        for folder in ("", "refused"):  # the others are plugins for this machine's torch
            (lib / folder).mkdir(parents=True, exist_ok=True)
            for path in sorted((build / "lib" / folder).iterdir()):
                if path.is_file():
                    to = lib / folder / path.name
                    shutil.copy2(path, to)
                    # Names of functions stay, for backtraces; nine tenths of the bytes are for a debugger.
                    subprocess.run(["strip", "--strip-debug", to], check=True)
        for script in ("install_criu.sh", "install_system.sh"):  # of `devproxy doctor --fix`
            shutil.copy2(ROOT / "scripts" / script, lib / script)
        (lib / "plugin-key").write_text(self.plugin_key())
        stubs = ROOT / "devproxy" / "control" / "_pb"
        if build != ROOT / "build":
            stubs = build / "_pb"
        # Whole packages: setuptools looked for modules before these were made.
        shutil.rmtree(package / "control" / "_pb", ignore_errors=True)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(stubs, package / "control" / "_pb", ignore=ignored)

    def plugin_key(self) -> str:
        """Changes when a plugin for torch has to be built again (devproxy/config.py, plugin_dir)."""
        digest = hashlib.sha256()
        for top in ("torch", "csrc/wire", "hal/host_module/include"):
            for path in sorted((ROOT / "devproxy" / top).rglob("*")):
                if path.suffix in (".cc", ".h"):
                    digest.update(path.read_bytes())
        return digest.hexdigest()[:16]


class Platform(Distribution):
    """There are binaries in the package, though no Python extension."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """One wheel serves every Python 3 of the platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    options={"build": {"build_base": str(WORK)}, "egg_info": {"egg_base": str(WORK)}},
    distclass=Platform,
    cmdclass={"build_py": BuildWithCMake, "bdist_wheel": PlatformWheel},
)
