# SPDX-License-Identifier: Apache-2.0
"""The server under a hostile client, and the receivers of frames under hostile servers of other trees (tests/fuzz), with
AddressSanitizer + UBSan; the server with ThreadSanitizer too.

`make test` sends a sample, `make soak` millions (DEVPROXY_FUZZ_MESSAGES, DEVPROXY_FUZZ_SEED).
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
SAMPLE_FRAMES = 60_000
FRAMES = [  # what tests/fuzz/frame_fuzz.cc is about
    *sorted((ROOT / "devproxy/hal/soft/comm").glob("*.cc")),
    *(ROOT / f"devproxy/hal/links/{name}.cc" for name in ("links", "receiver", "roster", "tls")),
    *(ROOT / f"devproxy/hal/cuda/{name}.cc" for name in ("comm_board", "comm_receiver")),
    ROOT / "devproxy/csrc/base/log.cc",
]


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


def build_fuzzer(name: str, *flags: str, source: str = "server_fuzz.cc") -> Path:
    """A program of tests/fuzz. It must see the address ranges of the server it talks to, hence the flags."""
    out = BUILD / "tests" / name
    out.parent.mkdir(parents=True, exist_ok=True)
    main = ROOT / "tests/fuzz" / source
    sources = [Path(flag) for flag in flags if flag.endswith(".cc")]
    inputs = [main, *sources, BUILD / "gen/wire/wire.gen.h"]
    inputs += [p for folder in ("csrc", "hal") for p in (ROOT / "devproxy" / folder).rglob("*.h")]
    if not out.exists() or any(p.stat().st_mtime > out.stat().st_mtime for p in inputs):
        fresh = out.with_name(f"{name}.{os.getpid()}")
        includes = ["-I", str(BUILD / "gen/wire")]
        command = [*CXX, "-O1", "-g", *flags, *includes, str(main), "-o", str(fresh), "-pthread"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        fresh.rename(out)
    return out


def build_frame_fuzzer() -> Path:
    sanitizers = "-fsanitize=address,undefined"
    return build_fuzzer("frame_fuzz", sanitizers, *map(str, FRAMES), source="frame_fuzz.cc")


def fuzz_frames(device: str, frames: int, seed: int, seconds: float = 280) -> dict[str, int]:
    """Runs the fuzzer of frames; fails on its word and on any sanitizer's report."""
    words = ["--frames", str(frames), "--seed", str(seed), "--device", device]
    env = os.environ | {"UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}
    done = subprocess.run(
        [str(build_frame_fuzzer()), *words],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=env,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    result: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    print(result)
    return result


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


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("device", ["soft", "cuda"])
def test_receivers_survive_hostile_frames(device: str) -> None:
    """What is sent must lead to operations that end, or the sample shows nothing."""
    result = fuzz_frames(device, SAMPLE_FRAMES, 1)
    assert result["ok"]
    assert result["connections"] > 30
    assert result["operations"] > 20
    assert result["private"] > 50


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
