"""Runs CMake once, puts build/lib into the package, declares the two commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithCMake(build_py):
    """build_py, and the C++ side; an editable install uses build/lib of the checkout, which make builds."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        subprocess.run(
            ["sh", str(ROOT / "scripts" / "build.sh")],
            check=True,
            env=os.environ | {"PYTHON": sys.executable},
        )
        target = Path(self.build_lib) / "devproxy" / "lib"
        target.mkdir(parents=True, exist_ok=True)
        for path in (ROOT / "build" / "lib").iterdir():
            if path.is_file():
                shutil.copy2(path, target / path.name)


class PlatformWheel(bdist_wheel):
    """The libraries are no Python extensions: one wheel serves every Python 3 of the platform."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

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
    package_data={"": ["*.h", "*.cc", "*.cpp", "py.typed"]},
    install_requires=["rich"],
    entry_points={
        "console_scripts": ["devproxy-run=devproxy.cli.run:main", "devproxy=devproxy.cli.ctl:main"]
    },
    cmdclass={"build_py": BuildWithCMake, "bdist_wheel": PlatformWheel},
)
