# SPDX-License-Identifier: Apache-2.0
"""How the programs of this folder are compiled; used by tests/integration/test_cudart_programs.py and gpu_bundle.py.

A program says itself what is special about it, in comments that begin a line:

    // build: OPTION...      options of nvcc besides the usual ones; -gencode replaces the architecture
    // also: FILE.cu         another translation unit of it
    // part of: FILE.cu      this is one, and no program
    // run: ARGUMENT...      it is run with these; several such lines are several runs
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
USUAL = ("-std=c++17", "-O1", "-cudart", "shared", "-Xcompiler", "-Wall,-Wextra,-Werror")
ARCHITECTURE = "-arch=sm_90"  # Hopper, with its PTX for later ones


class Failed(Exception):
    """nvcc does not compile it; the text is what it said."""


@dataclass(frozen=True)
class Program:
    name: str
    sources: tuple[Path, ...]
    options: tuple[str, ...]
    runs: tuple[tuple[str, ...], ...]

    @property
    def titles(self) -> list[str]:
        return [" ".join((self.name, *run)) for run in self.runs]


def said(text: str, word: str) -> list[str]:
    return [line.strip() for line in re.findall(rf"^// {word}:(.*)$", text, re.M)]


def program(source: Path) -> Program | None:
    """None for a file that is a part of another's program."""
    text = source.read_text()
    if said(text, "part of"):
        return None
    options = tuple(word for line in said(text, "build") for word in line.split())
    if "-gencode" not in options:
        options = (ARCHITECTURE, *options)
    more = tuple(source.parent / name for name in said(text, "also"))
    runs = tuple(tuple(line.split()) for line in said(text, "run")) or ((),)
    return Program(source.stem, (source, *more), (*USUAL, *options), runs)


def programs() -> list[Program]:
    found = (program(source) for source in sorted(HERE.glob("*.cu")))
    return [one for one in found if one]


def find_nvcc() -> str | None:
    """The machine's, else the one that scripts/install_test_tools.sh fetched."""
    places = ("/usr/local/cuda/bin", str(HERE.parents[1] / "build" / "cuda" / "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(places))


def find_nvrtc() -> str | None:
    """The folder of libnvrtc.so.13, found in the same way."""
    for folder in (Path("/usr/local/cuda/lib64"), HERE.parents[1] / "build" / "nvrtc" / "lib"):
        if (folder / "libnvrtc.so.13").exists():
            return str(folder)
    return None


def version_of(nvcc: str) -> str:
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


def build(nvcc: str, version: str, one: Program, to: Path, *more: str) -> Path:
    """The binary, in a folder named by everything that it is made of: what is there is not made again."""
    options = [*one.options, *more]
    sources = [*one.sources, *sorted(HERE.glob("*.cuh"))]
    content = [version, *options, *(f"{p.name}\n{p.read_text()}" for p in sources)]
    key = hashlib.sha256("\0".join(content).encode()).hexdigest()[:16]
    out = to / key / one.name
    if out.exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = out.with_name(f"{out.name}.{os.getpid()}")  # another test run may build the same
    # From its own folder: what a program says of a line then names no place of this machine.
    command = [nvcc, *options, *(source.name for source in one.sources), "-o", str(fresh.resolve())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=HERE)
    if done.returncode:
        raise Failed(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    fresh.rename(out)
    return out


def build_all(nvcc: str, which: Iterable[Program], to: Path, at_once: int = 2) -> dict[str, Path]:
    """By name. Raises Failed with the first that does not compile."""
    version = version_of(nvcc)
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        made = pool.map(lambda one: (one.name, build(nvcc, version, one, to)), which)
        return dict(made)
