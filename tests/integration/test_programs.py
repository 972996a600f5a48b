# SPDX-License-Identifier: Apache-2.0
"""The driver-API suite: every program of tests/subjects/driver under devproxy-run, each in two flavours.

A program checks its own results and ends with a line "PASS <name>". The flavour `chaos` lets the software GPU delay and
reorder what CUDA allows it to; a right program does not notice, and a race shows.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests" / "subjects" / "driver"
BUILD = ROOT / "build" / "tests" / "programs"
LIB = ROOT / "build" / "lib"

EXIT_SERVER_LOST = 3  # devproxy-run: the command ended well, but a server had died under it

# in the order of tests/subjects/driver/kernels.c
KERNELS = (
    "fill slow_fill saxpy copy_words affine slow noop64 fail crash shape sum_struct sum_extra mixed"
)

# program, its arguments, devproxy-run's options; --plain where it must see the server among the processes
PROGRAMS: list[tuple[str, list[str], list[str]]] = [
    ("context", [], []),
    ("streams", [], []),
    ("stream_attributes", [], []),
    ("enumerate", KERNELS.split(), []),
    ("events", [], []),
    ("waits", [], []),
    ("ordering", [], []),
    ("copies", [], []),
    ("arrays", [], []),
    ("batches", [], []),
    ("memset", [], []),
    ("module", [], []),
    ("launch", [], []),
    ("attributes", [], []),
    ("errors", [], []),
    ("fault", ["assert"], []),
    ("fault", ["address"], []),
    ("fault", ["crash"], []),
    ("lost", ["poll"], ["--plain"]),
    ("lost", ["wait"], ["--plain"]),
    ("lost", ["post"], ["--plain"]),
    ("lost", ["ask"], ["--plain"]),
    ("threads", [], []),
    ("fork", [], []),
    ("host_function", [], []),
    ("out_of_memory", [], ["--gpu-memory", "256MiB"]),
    ("pointers", [], []),
    ("pinned", [], []),
    ("mapped", [], []),
    ("managed", [], []),
    ("managed", ["two"], ["--gpus", "2"]),
    ("pool", [], []),
    ("pool_held", [], []),
    ("vmm", [], []),
    ("linking", ["refused"], []),
    ("queries", [], []),
    ("first_use", [], ["--gpus", "2"]),
    ("race", ["sync"], []),
    ("peer", [], ["--gpus", "2"]),
    ("graphs", ["explicit"], []),
    ("graphs", ["capture"], []),
    ("graphs", ["errors"], []),
    ("graphs", ["update"], []),
    ("graphs", ["launches"], []),
    ("graphs", ["threads"], []),
    ("graphs", ["objects"], []),
    ("graphs", ["random", "1"], []),
    ("graphs", ["random", "2"], []),
    ("graph_memory", ["explicit"], []),
    ("graph_memory", ["capture"], []),
    ("graph_memory", ["rules"], []),
    ("graph_memory", ["frees"], []),
    ("graph_memory", ["lifetimes"], []),
    ("graph_memory", ["contexts"], []),
    ("graph_memory", ["account"], []),
    ("graph_memory", ["devices"], ["--gpus", "2"]),
    ("graph_memory", ["threads"], []),
    ("graph_memory", ["random", "1"], []),
    ("graph_memory", ["random", "2"], []),
    ("ctypes_driver.py", [], []),
    ("third_party_cuda_bindings.py", [], []),
]
FLAVOURS: dict[str, list[str]] = {"default": [], "chaos": ["--chaos", "7"]}
CHAOS_SEEDS_FOR_THE_RACE = range(1, 9)


def cuda_include() -> Path:
    """Folder of <cuda.h>: the PyPI package nvidia-cuda-runtime, or DEVPROXY_CUDA_INCLUDE."""
    if given := os.environ.get("DEVPROXY_CUDA_INCLUDE"):
        return Path(given)
    for header in Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/include/cuda.h"):
        return header.parent
    pytest.fail(
        "cuda.h is missing: pip install nvidia-cuda-runtime==13.0.96, or set DEVPROXY_CUDA_INCLUDE"
    )


def newer(out: Path, *inputs: Path) -> bool:
    """True when `out` exists and no input has changed since."""
    return out.exists() and all(out.stat().st_mtime >= p.stat().st_mtime for p in inputs)


def compile_c(out: Path, *argv: str | Path) -> None:
    """Runs gcc; its complaint is the test's failure."""
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = out.with_name(f"{out.name}.{os.getpid()}")  # another test run may build the same
    cmd = [
        "gcc",
        "-std=gnu11",
        "-O1",
        "-g",
        "-Wall",
        "-Wextra",
        "-Werror",
        *map(str, argv),
        "-o",
        str(fresh),
    ]
    done = subprocess.run(cmd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    fresh.rename(out)


def build_kernels(out: Path, *defines: str) -> Path:
    """The suite's kernels as a module of the software GPU."""
    soft = ROOT / "devproxy" / "hal" / "host_module" / "include"
    source = SOURCES / "kernels.c"
    if not newer(out, source, soft / "devproxy_soft_module.h"):
        compile_c(out, "-shared", "-fPIC", *defines, "-I", soft, source)
    return out


def build_program(name: str) -> list[str]:
    """The command that runs a program: its interpreter, or the binary built against the shim."""
    if name.endswith(".py"):
        return [sys.executable, str(SOURCES / name)]
    out, source, header = BUILD / name, SOURCES / f"{name}.c", SOURCES / "program.h"
    if not newer(out, source, header):
        compile_c(
            out, "-I", cuda_include(), source, "-L", LIB, "-l:libcuda.so.1", "-pthread",
            "-Wl,--allow-shlib-undefined",
        )  # fmt: skip
    return [str(out)]


def devproxy_run() -> list[str]:
    """devproxy-run beside this interpreter, else from the checkout."""
    script = Path(sys.executable).parent / "devproxy-run"
    return [str(script)] if script.exists() else [sys.executable, "-m", "devproxy.cli.run"]


def run(
    options: list[str], command: list[str], seconds: float = 150, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command under devproxy-run on the software GPU."""
    kernels = {"TEST_KERNELS": str(build_kernels(BUILD / "kernels.so"))}
    # A tmpfs folder of its own: other jobs of this user share the GPU's ledger, and out_of_memory counts bytes.
    with tempfile.TemporaryDirectory(prefix="devproxy-test-", dir="/dev/shm") as shm:
        return subprocess.run(
            [*devproxy_run(), "--device", "soft", *options, "--", *command],
            capture_output=True, text=True, timeout=seconds, cwd=ROOT, errors="replace",
            env=os.environ | kernels | {"DEVPROXY_SHM_DIR": shm} | env,
        )  # fmt: skip


def ids(program: tuple[str, list[str], list[str]]) -> str:
    """A test's name: the program and its arguments."""
    return "-".join([program[0].removesuffix(".py"), *program[1]])


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("program", PROGRAMS, ids=ids)
def test_program(program: tuple[str, list[str], list[str]], flavour: str) -> None:
    """The program's own checks hold, and its last line says so."""
    name, arguments, options = program
    options = ["--gpu-memory", "512MiB", *options, *FLAVOURS[flavour]]
    done = run(options, [*build_program(name), *arguments])
    # A kernel that segfaults takes its own server along: the job sees a CUDA error, and devproxy-run says the rest.
    expected = EXIT_SERVER_LOST if arguments == ["crash"] or name == "lost" else 0
    assert done.returncode == expected, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert done.stdout.splitlines()[-1].startswith("PASS "), done.stdout


def test_a_race_is_not_hidden() -> None:
    """Two streams without an event: wrong results under some chaos seed. Its synchronised twin is right under all."""
    wrong = {}
    for seed in CHAOS_SEEDS_FOR_THE_RACE:
        chaos = ["--gpu-memory", "64MiB", "--chaos", str(seed)]
        done = run(chaos, [*build_program("race"), "bug"])
        assert done.returncode == 0, done.stderr
        found = re.search(r"wrong rounds: (\d+)", done.stdout)
        assert found, done.stdout
        wrong[seed] = int(found[1])
        twin = run(chaos, [*build_program("race"), "sync"])
        assert twin.returncode == 0, f"seed {seed}: {twin.stdout}{twin.stderr}"
    print(f"wrong rounds by seed: {wrong}")
    assert any(wrong.values()), wrong


@pytest.mark.parametrize("arguments", [["refused"], ["many", "200"]], ids=" ".join)
def test_kernels_are_listed_or_refused_by_name(arguments: list[str]) -> None:
    """A module that does not list its kernels says so; names that fill several answers come in order."""
    define = "-DUNLISTED" if arguments == ["refused"] else "-DMANY"
    module = build_kernels(BUILD / f"kernels{define}.so", define)
    program = [*build_program("enumerate"), *arguments]
    done = run(["--gpu-memory", "64MiB"], program, TEST_KERNELS=str(module))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "PASS enumerate"
    if arguments == ["refused"]:
        assert "ask for them by name" in done.stderr, done.stderr


@pytest.mark.parametrize("define", ["-DREFUSES_TO_LOAD", "-DTABLE_ABI=999"])
def test_a_module_that_cannot_be_used_is_refused(define: str) -> None:
    """A module that refuses, or of another ABI, is an error of cuModuleLoad and harms nobody."""
    bad = build_kernels(BUILD / f"kernels{define}.so", define)
    done = run(["--gpu-memory", "64MiB"], build_program("race"), TEST_KERNELS=str(bad))
    assert done.returncode == 1, done.stderr
    assert "cuModuleLoad" in done.stderr
