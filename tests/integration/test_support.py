# SPDX-License-Identifier: Apache-2.0
"""What docs/support.md says of the driver's functions is true: each sends the messages that its entry names, no others.

A library of its own (DEVPROXY_CHECK_SENDS, devproxy/csrc/client/sends.h) notes each call and each message that the call's
entry does not name. The whole driver-API suite runs over it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from codegen import tables
from tests.integration.test_programs import (
    EXIT_SERVER_LOST,
    LIB,
    PROGRAMS,
    ROOT,
    build_program,
    cuda_include,
    ids,
    run,
)

FOLDER = ROOT / "build" / "sends"


def library() -> Path:
    """A folder like build/lib whose libcuda.so.1 notes what its calls send."""
    lib = FOLDER / "lib"
    configure = [
        "cmake", "-S", str(ROOT), "-B", str(FOLDER / "cmake"), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
        f"-DDEVPROXY_PYTHON={sys.executable}", f"-DDEVPROXY_CUDA_INCLUDE={cuda_include()}",
        "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1", "-DCMAKE_UNITY_BUILD=ON", "-DDEVPROXY_ONLY_SOFT=ON",
        "-DDEVPROXY_CHECK_SENDS=ON", f"-DDEVPROXY_LIB_DIR={lib}",
    ]  # fmt: skip
    build = ["cmake", "--build", str(FOLDER / "cmake"), "--target", "shim_cuda", "-j2"]
    for command in (configure, build):
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    for path in LIB.iterdir():
        link = lib / path.name
        if path.name != "libcuda.so.1" and not link.exists():
            link.symlink_to(path)
    return lib


def notes(library: Path, to: Path, program: tuple[str, list[str], list[str]]) -> set[str]:
    """What the library noted of a program."""
    name, arguments, options = program
    variables = {"DEVPROXY_LIB": str(library), "DEVPROXY_CHECK_SENDS": str(to)}
    done = run(
        ["--gpu-memory", "512MiB", *options], [*build_program(name), *arguments], **variables
    )
    expected = EXIT_SERVER_LOST if arguments == ["crash"] or name == "lost" else 0
    assert done.returncode == expected, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return set(to.read_text().splitlines())


def test_calls_send_what_their_entries_name(tmp_path: Path) -> None:
    """One test, since tests of a file run side by side and the library is built once."""
    lib = library()
    noted = {ids(p): notes(lib, tmp_path / ids(p), p) for p in PROGRAMS}
    wrong = {
        line: program
        for program, lines in noted.items()
        for line in lines
        if not line.endswith(" called")
    }
    assert wrong == {}
    called = {line.removesuffix(" called") for lines in noted.values() for line in lines}
    local = {e.target for e in tables.driver_exports() if e.api and tables.status(e) == "local"}
    answering = {e.name: e.target for e in tables.driver_exports() if e.api}
    reached = {answering[name] for name in called if name in answering}
    # Every function that is said to send nothing is called by some program, so that somebody has watched it.
    assert local - reached == set()
