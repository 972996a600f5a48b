"""Our libcudart, both majors: every program of tests/programs_cudart over the software GPU, and what is exported.

The programs need no device code of NVIDIA's: kernels are the software GPU's own module, registered by hand as nvcc's
output does it. devproxy-run puts our libraries on the search path, so a program finds the runtime by its SONAME.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from codegen import tables
from tests.integration.test_programs import BUILD as KERNELS
from tests.integration.test_programs import LIB, ROOT, build_kernels, newer, run

SOURCES = ROOT / "tests" / "programs_cudart"
BUILD = ROOT / "build" / "tests" / "programs_cudart"
HEADERS = ROOT / "build" / "headers"
MAJORS = ("12", "13")
PROGRAMS = sorted(path.stem for path in SOURCES.glob("*.cc"))
FLAVOURS = {"default": [], "chaos": ["--chaos", "7"]}


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
    options = ["--gpu-memory", "512MiB", *FLAVOURS[flavour]]
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
    assert done.stderr.count("cudaMallocManaged is refused") == 1, done.stderr
    strict = run(["--gpu-memory", "64MiB"], [program], DEVPROXY_STRICT="1")
    assert strict.returncode == 134
    assert "cudaMallocManaged is refused" in strict.stderr


def test_kernels_are_there() -> None:
    """The registration program launches kernels of this module."""
    assert build_kernels(KERNELS / "kernels.so").exists()
