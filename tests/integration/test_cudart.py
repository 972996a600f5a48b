# SPDX-License-Identifier: Apache-2.0
"""Our libcudart, both majors: every program of tests/subjects/cudart over the software GPU, and what is exported.

The programs need no device code of NVIDIA's: kernels are the software GPU's own module, registered by hand as nvcc's
output does it. devproxy-run puts our libraries on the search path, so a program finds the runtime by its SONAME.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from codegen import tables
from devproxy.proxy import preflight
from tests.integration.needs import require_nvcc
from tests.integration.test_programs import LIB, ROOT, devproxy_run, newer, run

SOURCES = ROOT / "tests" / "subjects" / "cudart"
BUILD = ROOT / "build" / "tests" / "programs_cudart"
HEADERS = ROOT / "build" / "headers"
MAJORS = ("12", "13")
PROGRAMS = sorted(path.stem for path in SOURCES.glob("*.cc"))
FLAVOURS = {"default": [], "chaos": ["--chaos", "7"]}
# arrays: the software GPU has no texture units
OPTIONS = {"devices": ["--gpus", "2"], "arrays": ["--device", "record"]}


def build(name: str, major: str) -> Path:
    """The program against one major's header and library."""
    out, source = BUILD / f"{name}-{major}", SOURCES / f"{name}.cc"
    library = LIB / f"libcudart.so.{major}"
    if newer(out, source, SOURCES / "program.h", library):
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [
        "g++", "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror",
        "-isystem", HEADERS / f"cuda-{major}", "-isystem", HEADERS / "crt", source,
        library, LIB / "libcuda.so.1", "-pthread", "-o", out,
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, major: str, flavour: str) -> None:
    """The program's own checks hold, and its last line says so."""
    options = ["--gpu-memory", "512MiB", *OPTIONS.get(name, []), *FLAVOURS[flavour]]
    done = run(options, [str(build(name, major))])
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert done.stdout.splitlines()[-1] == f"PASS {name}"


def exported(library: Path) -> dict[str, str]:
    """Symbol -> version node of what a library defines."""
    text = subprocess.run(
        ["nm", "-D", "--defined-only", "--with-symbol-versions", str(library)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    rows = [line.split() for line in text.splitlines()]
    pairs = [row[2].partition("@@") for row in rows if len(row) == 3 and row[1] == "T"]
    return {name: node for name, _, node in pairs}


@pytest.mark.parametrize("major", MAJORS)
def test_every_function_of_the_header_is_exported_under_the_version_node(major: str) -> None:
    found = exported(LIB / f"libcudart.so.{major}")
    functions = tables.facts(f"cudart-{major}").functions
    assert len(functions) > 390
    wanted = {*functions, *tables.RUNTIMES[f"cudart-{major}"].declared}
    wanted |= set(tables.RUNTIMES[f"cudart-{major}"].also)
    assert {name for name in found if name.startswith(("cuda", "__cuda"))} == wanted
    assert {node for name, node in found.items() if name in wanted} == {f"libcudart.so.{major}"}


@pytest.mark.parametrize("major", MAJORS)
def test_it_knows_the_driver_by_its_exports_only(major: str) -> None:
    library = LIB / f"libcudart.so.{major}"
    dynamic = subprocess.run(
        ["readelf", "-d", str(library)], capture_output=True, text=True, check=True
    ).stdout
    needed = {line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "NEEDED" in line}
    assert needed <= {"libcuda.so.1", "libc.so.6", "ld-linux-x86-64.so.2"}
    assert f"soname: [libcudart.so.{major}]" in dynamic
    assert "PATH)" not in dynamic  # no machine's folder in it
    undefined = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout.split()
    drivers = {name for name in undefined if name.startswith("cu")}
    assert drivers <= {e.name for e in tables.driver_exports()}


def test_a_refusal_is_said_once_and_strict_mode_aborts() -> None:
    program = str(build("errors", "13"))
    done = run(["--gpu-memory", "64MiB"], [program])
    assert done.stderr.count("cudaIpcGetMemHandle is refused") == 1, done.stderr
    strict = run(["--gpu-memory", "64MiB"], [program], DEVPROXY_STRICT="1")
    assert strict.returncode == 134
    assert "cudaIpcGetMemHandle is refused" in strict.stderr


# -- nvcc's own output, over the recording GPU: real images, no kernel executed

NVCC = SOURCES / "nvcc"
USUAL = ["-std=c++17", "-O1", "-cudart", "shared"]
# flavour -> nvcc's options; a program's device code is for the recording GPU's own architecture unless it says so
BUILDS = {
    "plain": ["-arch=sm_90"],
    "linked": ["-arch=sm_90", "-rdc=true", "-DUNITS_LINKED"],
    "per-thread": ["-arch=sm_90", "-default-stream", "per-thread"],
    "ptx": ["-gencode", "arch=compute_80,code=compute_80"],
    "several": [
        *("-gencode", "arch=compute_80,code=sm_80"),
        *("-gencode", "arch=compute_90,code=sm_90"),
        "-compress-mode=size",
    ],
    "foreign": ["-gencode", "arch=compute_80,code=sm_80"],
    "library": ["-arch=sm_90", "-shared", "-Xcompiler", "-fPIC"],
}


def build_nvcc(name: str, flavour: str, sources: list[str]) -> Path:
    nvcc = require_nvcc()
    out = BUILD / f"{name}-{flavour}"
    inputs = [*NVCC.glob("*"), SOURCES / "program.h"]
    if not newer(out, *inputs):
        out.parent.mkdir(parents=True, exist_ok=True)
        fresh = out.with_name(f"{out.name}.{os.getpid()}")
        command = [nvcc, *USUAL, *BUILDS[flavour], "-o", fresh, *(NVCC / s for s in sources)]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        fresh.rename(out)
    return out


def record(
    command: list[str], log: Path, **env: str
) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    """A run on the recording GPU, and what reached the device."""
    with tempfile.TemporaryDirectory(prefix="devproxy-test-", dir="/dev/shm") as shm:
        done = subprocess.run(
            [*devproxy_run(), "--device", "record", "--gpu-memory", "256MiB", "--", *command],
            capture_output=True, text=True, timeout=120, cwd=ROOT, errors="replace",
            env=os.environ | {"DEVPROXY_SHM_DIR": shm, "DEVPROXY_RECORD": str(log)} | env,
        )  # fmt: skip
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return done, rows


def launches(rows: list[Any]) -> list[tuple[str, list[int], list[int], int, int]]:
    return [
        (r["function"], r["grid"], r["block"], r["shared"], r["params"])
        for r in rows
        if r["op"] == "launch"
    ]


UNITS = ["units.cu", "units_other.cu"]
ADD = "_Z3addPfPKfi"


@pytest.mark.parametrize("flavour", [f for f in BUILDS if f not in ("foreign", "library")])
def test_what_nvcc_compiled_launches(flavour: str, tmp_path: Path) -> None:
    done, rows = record([str(build_nvcc("units", flavour, UNITS))], tmp_path / "record")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "PASS units"
    found = launches(rows)
    assert found[0] == (ADD, [4, 2, 1], [64, 2, 2], 512, 20)
    assert found[1] == ("_Z4fillIdEvPT_S0_c", [1, 1, 1], [32, 1, 1], 0, 17)
    assert found[2] == ("_Z4fillIsEvPT_S0_c", [2, 1, 1], [16, 1, 1], 0, 11)
    assert found[3] == ("_Z7nothingv", [1, 1, 1], [1, 1, 1], 0, 0)
    assert found[4][0].endswith("otherPi") and found[4][1:] == ([5, 1, 1], [1, 1, 1], 0, 8)
    assert found[-2] == (ADD, [1, 1, 1], [1, 1, 1], 0, 20)
    assert found[-1] == (ADD, [2, 1, 1], [32, 1, 1], 0, 20)
    # The null stream: the legacy one, or the thread's own where the program was compiled for that.
    streams = [r["stream"] for r in rows if r["op"] == "launch"]
    assert (streams[1] == 0) == (flavour != "per-thread")
    assert streams[0] != streams[1]


def test_code_for_another_gpu_fails_at_the_launch_by_its_own_error(tmp_path: Path) -> None:
    program = str(build_nvcc("units", "foreign", UNITS))
    done, rows = record([program, "209"], tmp_path / "record")  # cudaErrorNoKernelImageForDevice
    assert done.returncode == 0, done.stderr
    assert launches(rows) == []
    assert "cannot be loaded: CUDA_ERROR_NO_BINARY_FOR_GPU" in done.stderr


def test_a_managed_variable_is_refused_by_name(tmp_path: Path) -> None:
    done, rows = record([str(build_nvcc("managed", "plain", ["managed.cu"]))], tmp_path / "record")
    assert done.returncode == 0, done.stderr
    assert "__managed__ variable number is refused" in done.stderr
    assert launches(rows) == []


def test_a_closed_library_takes_its_device_code_along(tmp_path: Path) -> None:
    plugin = build_nvcc("plugin", "library", ["plugin.cu"])
    program = build_nvcc("plugins", "plain", ["plugins.cu"])
    log = tmp_path / "record"
    done, rows = record([str(program), str(plugin)], log, DEVPROXY_TRACE="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "PASS plugins"
    shapes = [(row[0], row[2][0]) for row in launches(rows)]
    own, other = ("_Z14of_the_programPi", 3), ("_Z11of_a_pluginPi", 7)
    assert shapes == [own, other, other, other, own]
    # Loaded anew each time it was opened, unloaded each time; the program's own is left to the end of the process.
    assert len([r for r in rows if r["op"] == "load_module"]) == 4
    assert done.stderr.count("call cuLibraryUnload\n") == 3


def test_the_runtime_is_preloaded_where_kernels_are_real() -> None:
    names = preflight.shims("record")
    assert names.index("libcuda.so.1") < names.index("libcudart.so.13")
    assert names.index("libcudart.so.13") < names.index("libcudart.so.12")
    assert preflight.shims("cuda") == names
    assert not any("cudart" in name for name in preflight.shims("soft"))
