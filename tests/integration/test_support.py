# SPDX-License-Identifier: Apache-2.0
"""What docs/support.md says of the driver's functions and NCCL's is true: each sends the messages that its entry names, no
others.

Libraries of their own (DEVPROXY_CHECK_SENDS, devproxy/csrc/client/sends.h) note each call and each message, and whether the
call's entry names it. The whole driver-API suite runs over them, and programs that call all that NCCL answers.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from codegen import tables
from codegen.spec import Api
from codegen.tables import Export
from tests.conftest import RUN
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
WATCHED = ("libcuda.so.1", "libnccl.so.2")


def library() -> Path:
    """A folder like build/lib whose libcuda.so.1 and libnccl.so.2 note what their calls send."""
    lib = FOLDER / "lib"
    configure = [
        "cmake", "-S", str(ROOT), "-B", str(FOLDER / "cmake"), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
        f"-DDEVPROXY_PYTHON={sys.executable}", f"-DDEVPROXY_CUDA_INCLUDE={cuda_include()}",
        "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1", "-DCMAKE_UNITY_BUILD=ON", "-DDEVPROXY_ONLY_SOFT=ON",
        "-DDEVPROXY_CHECK_SENDS=ON", f"-DDEVPROXY_LIB_DIR={lib}",
    ]  # fmt: skip
    build = ["cmake", "--build", str(FOLDER / "cmake"), "--target", "shim_cuda", "shim_nccl", "-j2"]
    for name in WATCHED:
        if (lib / name).is_symlink():  # of an older checkout, which watched fewer
            (lib / name).unlink()
    for command in (configure, build):
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    for path in LIB.iterdir():
        link = lib / path.name
        if path.name not in WATCHED and not link.exists():
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


# Of tests/comm, as test_every_answered_function_is_called runs them: program, GPUs, its arguments.
NCCL_PROGRAMS: list[tuple[str, int, list[str]]] = [
    ("collectives.py", 2, ["2", "0", "40"]),
    ("scenarios.py", 2, ["3"]),
    ("all_devices.py", 2, []),
    ("failures.py", 3, ["3", "use_after_the_end"]),
]


def notes_of_nccl(
    library: Path, folder: Path, job_env: dict[str, str], program: tuple[str, int, list[str]]
) -> set[str]:
    name, gpus, arguments = program
    to, ranks = folder / name, folder / f"{name}.ranks"
    ranks.mkdir()
    done = subprocess.run(
        [
            *(*RUN, "--device", "soft", "--gpus", str(gpus), "--gpu-memory", "256MiB", "--"),
            *(sys.executable, str(ROOT / "tests/comm" / name)),
            *([str(ranks), *arguments] if arguments else []),
        ],
        env=job_env | {"DEVPROXY_LIB": str(library), "DEVPROXY_CHECK_SENDS": str(to)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return set(to.read_text().splitlines())


class Unseen(NamedTuple):
    """Messages that no program makes these functions send, and why their entries name them all the same."""

    messages: str
    names: str
    why: str


# Which of these a call needs depends on what the process has done before: one that is seen excuses the entry's others.
KINDRED = (
    {"MEM_ALLOC", "MEM_FREE", "MEM_INFO", "MEM_CREDIT", "MEM_CREDIT_RETURN"},  # the client's credit
    {"FUNCTION_GET", "MODULE_LOAD", "IMAGE_PUT"},  # a kernel's first use
)
UNSEEN = (
    Unseen(
        "HOST_WINDOW HOST_ALLOC HOST_DEVICE_ADDRESS",
        "cuCtxCreate_v2 cuCtxCreate_v4",
        "the process's first context; in the programs that is a primary one",
    ),
    Unseen(
        "ARRAY_DESTROY EVENT_DESTROY HOST_FREE MODULE_UNLOAD STREAM_DESTROY TEXTURE_DESTROY MEM_FREE",
        "cuCtxDestroy_v2 cuCtxDetach cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxReset_v2",
        "what the context still holds at its end",
    ),
    Unseen(
        "HOST_ALLOC HOST_FREE",
        "cuGraphExecChildGraphNodeSetParams cuGraphExecNodeSetParams cuGraphExecUpdate_v2 cuGraphInstantiateWithParams "
        "cuGraphNodeSetEnabled",
        "a buffer for the pageable memory of the graph's copies, which these calls of the programs have none of",
    ),
    Unseen("EVENT_RECORD", "cuEventRecordWithFlags", "the programs call it in captures"),
    Unseen(
        "FUNCTION_GET MODULE_LOAD IMAGE_PUT",
        "cuGraphAddKernelNode cuGraphExecKernelNodeSetParams_v2 cuGraphKernelNodeSetParams cuLaunchCooperativeKernel "
        "cuLibraryGetKernel cuLibraryLoadData cuOccupancyMaxActiveClusters cuOccupancyMaxPotentialClusterSize",
        "the programs have used the kernel, or its library, before",
    ),
    Unseen(
        "OCCUPANCY",
        "cuLaunchCooperativeKernel",
        "the programs have asked for the shape's occupancy before, and the client keeps the answer",
    ),
    Unseen(
        "OCCUPANCY",
        "cuOccupancyMaxActiveClusters cuOccupancyMaxPotentialClusterSize",
        "the software GPU has no clusters, so the client refuses before it asks",
    ),
    Unseen(
        "HOST_FUNC_DONE",
        "cuGraphLaunch cuLaunchHostFunc cuStreamAddCallback",
        "the thread that calls the functions sends it",
    ),
    Unseen(
        "COPY",
        "cuMemcpy2DAsync_v2 cuMemcpy2DUnaligned_v2 cuMemcpy2D_v2 cuMemcpy3DAsync_v2 cuMemcpy3DBatchAsync "
        "cuMemcpy3DBatchAsync_v2 cuMemcpy3D_v2",
        "a copy whose bytes lie in one piece; the programs' have rows",
    ),
    Unseen("ARRAY_COPY", "cuMemcpy3DPeer cuMemcpy3DPeerAsync", "a copy of arrays within one GPU"),
    Unseen(
        "FUNCTION_NAMES",
        "cuModuleEnumerateFunctions",
        "the programs have asked for the count before, and the client keeps the names",
    ),
    Unseen(
        "MEM_FREE",
        "ncclCommGrow ncclCommInitAll ncclCommInitRank ncclCommInitRankConfig ncclCommInitRankScalable ncclCommShrink",
        "small blocks that the client keeps back: a process says all that it has freed when it gets its first communicator",
    ),
    Unseen("STREAM_DESTROY", "ncclCommAbort", "of a communicator that is not made yet"),
    Unseen("COMM_ABORT", "ncclCommShrink", "with NCCL_SHRINK_ABORT; the programs' ranks pass 0"),
    Unseen("COMM_DESTROY", "ncclGroupEnd", "a split of a revoked communicator, in a group"),
)

EXCUSED = {(n, m) for row in UNSEEN for n in row.names.split() for m in row.messages.split()}


def kindred(message: str) -> set[str]:
    return {other for family in KINDRED if message in family for other in family}


def check(exports: tuple[Export, ...], noted: dict[str, set[str]]) -> set[str]:
    """Compares what was noted with the entries. Returns the entries that were called."""
    wrong = {
        line: program
        for program, lines in noted.items()
        for line in lines
        if " sends " in line  # not named
    }
    assert wrong == {}
    lines = {tuple(line.split()) for every in noted.values() for line in every}
    called, sent = set(), set()
    named: set[tuple[str, str]] = set()
    for export in exports:
        if export.api and (export.name, "called") in lines:
            called.add(export.target)
            messages = {*export.api.ops, *export.api.first}
            named |= {(export.target, message) for message in messages}
            sent |= {(export.target, m) for m in messages if (export.name, "sent", m) in lines}
    # An entry that names a message which its call never sends says too much.
    unseen = {(n, m) for n, m in named - sent if not kindred(m) & {o for s, o in sent if s == n}}
    assert unseen - EXCUSED == set()
    return called


def test_calls_send_what_their_entries_name(tmp_path: Path, job_env: dict[str, str]) -> None:
    """One test, since tests of a file run side by side and the library is built once."""
    lib = library()
    noted = {ids(p): notes(lib, tmp_path / ids(p), p) for p in PROGRAMS}
    called = check(tables.driver_exports(), noted)
    local = {e.target for e in tables.driver_exports() if e.api and tables.status(e) == "local"}
    # Every function that is said to send nothing is called by some program, so that somebody has watched it.
    assert local - called == set()

    nccl = tables.library_exports("nccl")
    noted = {p[0]: notes_of_nccl(lib, tmp_path, job_env, p) for p in NCCL_PROGRAMS}
    # The programs ask for a text only where a call failed.
    assert {e.target for e in nccl if e.api} - check(nccl, noted) <= {"ncclGetErrorString"}


def test_no_excuse_is_for_what_no_entry_names() -> None:
    exports = (*tables.driver_exports(), *tables.library_exports("nccl"))
    known = {e.target: {*e.api.ops, *e.api.first} for e in exports if e.api}
    assert {row.names for row in UNSEEN if not set(row.names.split()) <= set(known)} == set()
    for row in UNSEEN:
        for message in row.messages.split():
            assert any(message in known[name] for name in row.names.split()), (message, row.names)


@pytest.mark.parametrize(
    ("ops", "lines"),
    [
        (("MEM_FREE",), ["sends COMM_GROUP"]),
        (("COMM_GROUP", "MEM_FREE"), ["sent COMM_GROUP"]),
        (("COMM_GROUP",), ["sent COMM_GROUP", "sends MEM_FREE"]),
    ],
)
def test_an_entry_that_is_wrong_is_found(ops: tuple[str, ...], lines: list[str]) -> None:
    export = Export("ncclAllReduce", "nccl", Api("nccl", ops=ops), "ncclAllReduce")
    noted = {"program": {f"ncclAllReduce {line}" for line in ["called", *lines]}}
    with pytest.raises(AssertionError):
        check((export,), noted)
    right = replace(export, api=Api("nccl", ops=("COMM_GROUP",)))
    right_lines = {"ncclAllReduce called", "ncclAllReduce sent COMM_GROUP"}
    assert check((right,), {"program": right_lines}) == {"ncclAllReduce"}
