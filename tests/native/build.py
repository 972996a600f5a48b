# SPDX-License-Identifier: Apache-2.0
"""What CMakeLists.txt beside this builds. `python -m tests.native.build` builds all of it and runs its tests by ctest."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "native"


def cmake(*targets: str) -> None:
    """Builds the targets; all where none is named. Raises CalledProcessError with the compiler's words on stderr."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / ".lock", "w") as lock:  # ninja has no lock of its own
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (BUILD / "build.ninja").exists():
            make = ["cmake", "-S", str(ROOT / "tests/native"), "-B", str(BUILD), "-G", "Ninja"]
            subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        build = ["cmake", "--build", str(BUILD), "-j", "2"]
        if targets:
            build += ["--target", *targets]
        subprocess.run(build, check=True, stdout=sys.stderr)


@functools.cache
def built(program: str) -> Path:
    """The program of that name."""
    cmake(program)
    return BUILD / program


@functools.cache
def library(name: str) -> ctypes.CDLL:
    cmake(name)
    return ctypes.CDLL(str(BUILD / f"{name}.so"))


def as_one(sources: Iterable[str]) -> str:
    """One translation unit of several; a path may be relative to the checkout."""
    return "".join(f'#include "{ROOT / source}"\n' for source in sources)


def main() -> int:
    cmake()
    test = ["ctest", "--test-dir", str(BUILD), "--output-on-failure", "-j", "2", "--quiet"]
    code = subprocess.run(test, env=os.environ, check=False).returncode
    print("ctest: the programs of tests/native", "have failed" if code else "are right")
    return code


if __name__ == "__main__":
    sys.exit(main())
