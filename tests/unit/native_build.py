# SPDX-License-Identifier: Apache-2.0
"""Builds the small native libraries of the unit tests, once per change of their sources."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    "cores": ["tests/unit/native/cores.cc", "devproxy/csrc/client/alloc_bidir.cc"],
    "reduce": ["tests/unit/native/reduce.cc", "devproxy/hal/soft/comm/reduce.cc"],
}


def native_library(name: str) -> ctypes.CDLL:
    """The library `name`, compiled with g++ into build/tests when its sources changed."""
    sources = [ROOT / s for s in SOURCES[name]]
    headers = sorted(h for folder in {p.parent for p in sources} for h in folder.glob("*.h"))
    text = b"".join(p.read_bytes() for p in sources + headers)
    out = ROOT / "build" / "tests" / f"{name}-{hashlib.blake2b(text, digest_size=8).hexdigest()}.so"
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_suffix(".part")
        command = [
            "g++",
            "-std=c++20",
            "-O1",
            "-g",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-shared",
            "-fPIC",
        ]
        command += ["-fsanitize=undefined", "-fno-sanitize-recover=undefined"]
        command += ["-ffp-contract=off", f"-I{ROOT}"]  # as CMakeLists.txt has it for reductions
        subprocess.run([*command, "-o", str(part), *map(str, sources)], check=True)
        part.rename(out)
    return ctypes.CDLL(str(out))
