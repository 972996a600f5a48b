"""Runs CMake once, puts build/lib into the package, declares the two commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, find_namespace_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
TORCH = "devproxy.hal.soft.torch"


class BuildWithCMake(build_py):
    """build_py and the C++ side. An editable install uses build/lib of the checkout, which make builds."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        script = ["sh", str(ROOT / "scripts" / "build.sh")]
        subprocess.run(script, check=True, env=os.environ | {"PYTHON": sys.executable})
        target = Path(self.build_lib) / "devproxy" / "lib"
        target.mkdir(parents=True, exist_ok=True)
        for path in (ROOT / "build" / "lib").iterdir():
            if path.is_file():
                shutil.copy2(path, target / path.name)


class Platform(Distribution):
    """There are binaries in the package, though no Python extension."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """One wheel serves every Python 3 of the platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    name="devproxy",
    version="0.1.0",
    description="Runs unmodified training jobs behind a device proxy",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_namespace_packages(include=["devproxy", "devproxy.*"]),
    # The torch plugin's sources travel along: it is built on the user's machine, for the user's torch.
    package_data={
        "": ["*.h", "py.typed"],
        f"{TORCH}.client": ["*.cc"],
        f"{TORCH}.executor": ["*.cc"],
    },
    install_requires=["rich"],
    entry_points={
        "console_scripts": ["devproxy-run=devproxy.cli.run:main", "devproxy=devproxy.cli.ctl:main"]
    },
    options={"build": {"build_base": "build/wheel"}},  # build/lib is CMake's
    distclass=Platform,
    cmdclass={"build_py": BuildWithCMake, "bdist_wheel": PlatformWheel},
)
