# SPDX-License-Identifier: Apache-2.0
"""The server's pure cores and the software GPU, in C++ against models, with sanitizers."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "tests"
SERVER = "devproxy/csrc/server"
SOFT = "devproxy/hal/soft"
# program -> what it is built from, the sanitizer that looks for what it could do wrong, and what is built without UBSan,
# which more than doubles the time that the JSON library's templates take to compile
PROGRAMS = {
    "server_cores": (
        [
            "devproxy/csrc/base/json.cc",
            "devproxy/csrc/base/log.cc",
            *(
                f"{SERVER}/{name}.cc"
                for name in ("memory_mirror", "replay_log", "ledger", "process_id", "image_store")
            ),
            f"{SERVER}/live_trace.cc",
            f"{SERVER}/locked_file.cc",
        ],
        ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
        [f"{SERVER}/state_record.cc"],
    ),
    "server_engine": (["devproxy/hal/engine.cc"], ["-fsanitize=thread"], []),
    "server_blocks": (
        [f"{SERVER}/{name}.cc" for name in ("block_index", "staged_dump", "state_files")],
        ["-O2", "-fsanitize=thread", "-DDEVPROXY_TSAN", "-Wno-tsan"],
        [],
    ),
    "server_splice": (
        [
            "devproxy/hal/engine.cc",
            f"{SOFT}/splice/loans.cc",
            f"{SOFT}/splice/page_pool.cc",
            f"{SOFT}/splice/splicer.cc",
        ],
        ["-fsanitize=thread", "-DDEVPROXY_TSAN", "-Wno-tsan"],
        [],
    ),
    "server_soft_space": (
        [
            f"{SOFT}/soft_device.cc",
            f"{SOFT}/soft_space.cc",
            f"{SOFT}/../engine.cc",
            f"{SOFT}/splice/loans.cc",
            f"{SOFT}/splice/page_pool.cc",
            f"{SOFT}/splice/splicer.cc",
            *(
                f"{SOFT}/comm/{name}.cc"
                for name in (
                    "board",
                    "links",
                    "peers",
                    "receiver",
                    "reduce",
                    "roster",
                    "shadow",
                    "soft_comm",
                )
            ),
            "devproxy/csrc/base/log.cc",
            "devproxy/hal/host_module/descriptor.cc",
            "devproxy/hal/host_module/host_module.cc",
        ],
        ["-fsanitize=thread", "-DDEVPROXY_TSAN", "-Wno-tsan"],
        [],
    ),
}
GEN = ROOT / "build/gen"
HEADERS = (
    "csrc/args",
    "csrc/base",
    "csrc/server",
    "csrc/wire",
    "hal",
    "hal/soft",
    "hal/soft/comm",
    "hal/soft/splice",
    "hal/host_module",
)


def as_one(sources: Iterable[str]) -> str:
    """One translation unit of several; a path may be relative to the checkout."""
    return "".join(f'#include "{ROOT / source}"\n' for source in sources)


def built(program: str) -> Path:
    """The compiled program; compiled again when a source or header has changed."""
    sources, sanitizer, plain = PROGRAMS[program]
    sources = [f"tests/unit/{program}.cc", *sources]
    headers = [p for folder in HEADERS for p in sorted((ROOT / "devproxy" / folder).glob("*.h"))]
    headers += sorted(GEN.glob("*/*.gen.h"))
    text = b"".join(p.read_bytes() for p in [*(ROOT / s for s in sources + plain), *headers])
    out = BUILD / f"{program}-{hashlib.blake2b(text, digest_size=8).hexdigest()}"
    if not out.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        # Debug information of lines alone, and all as one file: a third to a half of the work.
        command = ["g++", "-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread"]
        command += [
            *sanitizer,
            f"-I{ROOT}",
            *(f"-I{GEN}/{layer}" for layer in ("args", "wire", "server")),
        ]
        objects = []
        for source in plain:
            objects.append(f"{out}.{Path(source).stem}.o")
            one = [*command, "-fno-sanitize=undefined", "-c", source, "-o", objects[-1]]
            subprocess.run(one, check=True, cwd=ROOT)
        command += ["-o", f"{out}.part", "-x", "c++", "-", "-x", "none", *objects, "-ldl"]
        subprocess.run(command, check=True, cwd=ROOT, input=as_one(sources), text=True)
        Path(f"{out}.part").rename(out)
        for name in objects:
            Path(name).unlink()
    return out


@pytest.mark.parametrize("program", PROGRAMS)
def test_native(program: str) -> None:
    done = subprocess.run([built(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
