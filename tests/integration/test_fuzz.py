# SPDX-License-Identifier: Apache-2.0
"""The server under a hostile client (tests/fuzz), built with AddressSanitizer + UBSan, and with ThreadSanitizer.

`make test` sends a sample, `make soak` a million messages (DEVPROXY_FUZZ_MESSAGES, DEVPROXY_FUZZ_SEED).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_model import CXX, ROOT
from tests.integration.test_programs import build_kernels, cuda_include, devproxy_run
from tests.living import matching

BUILD = ROOT / "build"
PYTHON = sys.executable
SAMPLE_MESSAGES = 20_000


def build_server(sanitizer: str) -> Path:
    """devproxy-server with a sanitizer, in build/<sanitizer>/lib; does nothing when it is up to date."""
    folder = BUILD / sanitizer
    configure = [
        "cmake", "-S", str(ROOT), "-B", str(folder / "cmake"), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
        f"-DDEVPROXY_PYTHON={PYTHON}", f"-DDEVPROXY_CUDA_INCLUDE={cuda_include()}",
        # The longest build of all: the sanitizers' own pages advise these flags, several files are compiled as one, and
        # the devices that are not tried here are left out.
        "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1", "-DCMAKE_UNITY_BUILD=ON", "-DDEVPROXY_ONLY_SOFT=ON",
        f"-DDEVPROXY_SANITIZE={sanitizer}", f"-DDEVPROXY_LIB_DIR={folder / 'lib'}",
        # TSan does not model fences; what they order has acquire and release of its own (tests/model covers the fences)
        "-DCMAKE_CXX_FLAGS=-Wno-tsan",
    ]  # fmt: skip
    for command in (
        configure,
        ["cmake", "--build", str(folder / "cmake"), "--target", "devproxy-server", "-j2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return folder / "lib" / "devproxy-server"


def build_fuzzer(name: str, *flags: str) -> Path:
    """The hostile client. It must see the address ranges of the server it talks to, hence the flags."""
    out = BUILD / "tests" / name
    out.parent.mkdir(parents=True, exist_ok=True)
    inputs = [
        ROOT / "tests/fuzz/server_fuzz.cc",
        BUILD / "gen" / "wire" / "wire.gen.h",
        *(ROOT / "devproxy/csrc").rglob("*.h"),
    ]
    if not out.exists() or any(p.stat().st_mtime > out.stat().st_mtime for p in inputs):
        fresh = out.with_name(f"{name}.{os.getpid()}")
        source = str(ROOT / "tests/fuzz/server_fuzz.cc")
        cmd = [
            *CXX,
            "-O1",
            "-g",
            *flags,
            "-I",
            str(BUILD / "gen" / "wire"),
            source,
            "-o",
            str(fresh),
            "-pthread",
        ]
        done = subprocess.run(cmd, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        fresh.rename(out)
    return out


def fuzz(
    server: Path,
    fuzzer: Path,
    tmp_path: Path,
    messages: int,
    seed: int,
    *options: str,
    seconds: float = 280,
) -> dict[str, Any]:
    """Runs the fuzzer; fails on its word, on the server's end, and on any sanitizer's report."""
    report = tmp_path / "sanitizer"
    suppressions = ROOT / "tests" / "fuzz" / "tsan.supp"
    with tempfile.TemporaryDirectory(prefix="devproxy-fuzz-", dir="/dev/shm") as shm:
        env = os.environ | {
            "DEVPROXY_SHM_DIR": shm,
            "DEVPROXY_SERVER": str(server),
            "ASAN_OPTIONS": f"log_path={report}",
            "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={report}",
            "TSAN_OPTIONS": f"log_path={report}:suppressions={suppressions}",
        }
        kernels = build_kernels(BUILD / "tests" / "programs" / "kernels.so")
        command = [
            str(fuzzer),
            "--messages",
            str(messages),
            "--seed",
            str(seed),
            "--kernels",
            str(kernels),
        ]
        done = subprocess.run(
            [*devproxy_run(), "--device", "soft", "--gpu-memory", "256MiB", *options, "--", *command],
            capture_output=True, text=True, timeout=seconds, env=env, cwd=ROOT,
        )  # fmt: skip
        left = [p.name for end in ("seg", "pinned") for p in matching(Path(shm), f"**/*.{end}")]
    reports = "".join(p.read_text(errors="replace") for p in tmp_path.glob("sanitizer*"))
    assert not reports, reports[:6000]
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert not left, f"segments left behind: {left}"
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(result)
    return result


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_server_survives_hostile_messages(tmp_path: Path) -> None:
    """A sample under ASan and UBSan; what is sent must reach the handlers, or the sample shows nothing."""
    server = build_server("address")
    result = fuzz(server, build_fuzzer("server_fuzz"), tmp_path, SAMPLE_MESSAGES, 1)
    assert result["ok"]
    assert result["allocs"] > 500
    assert result["launches"] > 50
    assert result["collectives"] > 50
    assert result["poisoned"] > 10


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chaos", [[], ["--chaos", "3"]], ids=["default", "chaos"])
def test_server_has_no_data_race(tmp_path: Path, chaos: list[str]) -> None:
    """The same under ThreadSanitizer: dispatch threads, streams, host functions, clients that vanish."""
    fuzzer = build_fuzzer("server_fuzz_tsan", "-DDEVPROXY_TSAN")
    assert fuzz(build_server("thread"), fuzzer, tmp_path, 10_000, 2, *chaos)["ok"]


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_server_survives_a_million_messages(tmp_path: Path) -> None:
    """DEVPROXY_FUZZ_MESSAGES (1,000,000) from DEVPROXY_FUZZ_SEED (100) on, in pieces of a seed each."""
    total = int(os.environ.get("DEVPROXY_FUZZ_MESSAGES", "1000000"))
    seed = int(os.environ.get("DEVPROXY_FUZZ_SEED", "100"))
    server, fuzzer = build_server("address"), build_fuzzer("server_fuzz")
    sent = 0
    while sent < total:
        piece = tmp_path / str(seed)
        piece.mkdir()
        sent += fuzz(server, fuzzer, piece, min(100_000, total - sent), seed, seconds=1200)[
            "messages"
        ]
        seed += 1
    print(f"{sent} messages")
