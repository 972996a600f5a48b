# SPDX-License-Identifier: Apache-2.0
"""The libraries that refuse by name, and every symbol that torch's wheels import from a library that devproxy replaces."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from codegen import elf, tables
from codegen.__main__ import ROOT
from codegen.apis.mathlibs import SHIMS
from codegen.emit import mathlibs
from devproxy.proxy import preflight

LIB = ROOT / "build/lib"
WHEELS = ROOT / "codegen/ir/wheels"
# Of the wheels' DT_NEEDED: host-only libraries stay NVIDIA's own (design.md).
GENUINE = {"libnvrtc.so.13"}
OURS = ("libcuda.so.1", "libnccl.so.2", "libcudart.so.13")


def built(soname: str) -> Path:
    """A missing build fails the test: it does not pass by skipping."""
    path = LIB / soname if soname in OURS else LIB / "refused" / soname
    if not path.exists():
        pytest.fail(f"{path} is not built: run make build", pytrace=False)
    return path


def versions() -> list[str]:
    return sorted(tables.wheel_imports())


def test_the_wheels_that_are_supported_are_known() -> None:
    oldest, newest = preflight.OLDEST_TORCH, preflight.NEWEST_TORCH
    minors = {tuple(map(int, version.split(".")[:2])) for version in versions()}
    assert minors == {(2, minor) for minor in range(oldest[1], newest[1] + 1)}


@pytest.mark.parametrize("version", versions())
def test_every_library_of_the_wheel_is_replaced_or_host_only(version: str) -> None:
    assert set(tables.wheel_imports()[version]) == (
        (set(SHIMS) | set(OURS) | GENUINE) - ({"libcurand.so.10"} if version >= "2.15" else set())
    )


@pytest.mark.parametrize("version", versions())
@pytest.mark.parametrize("soname", [*OURS, *SHIMS])
def test_every_imported_symbol_is_exported_with_its_version_node(version: str, soname: str) -> None:
    exports = {(s.name, s.version) for s in elf.read(built(soname)).exports}
    nodes = {node for _, node in exports} - {""}
    wanted = tables.wheel_imports()[version].get(soname, {})
    for node, names in wanted.items():
        # A name without a version takes whatever the library has under that name.
        missing = {
            n
            for n in names
            if not any((n, v) in exports for v in ({node} if node else nodes | {""}))
        }
        assert missing == set()


@pytest.mark.parametrize("soname", SHIMS)
def test_a_shim_has_its_soname_needs_only_libc_and_has_the_vendors_functions(soname: str) -> None:
    found = elf.read(built(soname))
    assert (found.soname, found.needed) == (soname, ("libc.so.6",))
    node = tables.shim_node(soname)
    names = {s.name for s in found.exports if s.is_function}
    assert names == {e.name for e in tables.shim_exports(soname)}
    assert {s.version for s in found.exports if s.is_function} == {node}
    assert built(soname).stat().st_size < 40_000


def test_lists_of_the_libraries_agree() -> None:
    """The SONAMEs are told to CMake, which runs before the generator, and to devproxy-run, which has no generator."""
    text = re.search(r"set\(MATHLIBS ([^)]*)\)", (ROOT / "CMakeLists.txt").read_text())
    assert text is not None
    assert text[1].split() == list(SHIMS)
    assert set(preflight.REFUSED["13"]) == set(SHIMS)


def test_every_function_that_tells_something_is_one_of_the_library() -> None:
    for soname, shim in SHIMS.items():
        names = {e.name for e in tables.shim_exports(soname)}
        assert {*shim.answers, *shim.returns, *shim.also} <= names
        assert not set(shim.answers) & set(shim.returns)


def test_cudnn_is_no_older_than_what_any_wheel_was_compiled_with() -> None:
    """torch.backends.cudnn raises where the library is of another major or an older minor version."""
    newest = (0, 0, 0)
    for path in WHEELS.glob("*.json"):
        for row in json.loads(path.read_text())["requires"]:
            if found := re.match(r"nvidia-cudnn-cu13==(\d+)\.(\d+)\.(\d+)", row):
                newest = max(newest, (int(found[1]), int(found[2]), int(found[3])))
    shim = SHIMS["libcudnn.so.9"]
    assert shim.version == newest
    major, minor, patch = shim.version
    assert shim.answers["cudnnGetVersion"][1] == major * 10000 + minor * 100 + patch


def test_a_map_names_the_node() -> None:
    assert mathlibs.emit_map("libcublas.so.13") == "libcublas.so.13 { global: *; };\n"
    assert mathlibs.emit_map("libcusparseLt.so.0") == "{ global: *; };\n"


def run(body: str, *sonames: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`body` in a Python with the libraries preloaded, each known by the name before its dot."""
    code = "import ctypes as c\n" + "".join(
        f"{name.split('.')[0][3:]} = c.CDLL({name!r})\n" for name in sonames
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DEVPROXY_")}
    return subprocess.run(
        [sys.executable, "-c", code + body],
        env=clean | {"LD_PRELOAD": ":".join(str(built(s)) for s in sonames)} | env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_call_is_refused_by_name_with_the_librarys_own_result_and_said_once() -> None:
    done = run(
        "print([cublas.cublasCreate_v2(0) for _ in range(3)], cufft.cufftCreate(0))",
        "libcublas.so.13",
        "libcufft.so.12",
    )
    assert done.stdout == "[15, 15, 15] 16\n"
    assert done.stderr.splitlines() == [
        "devproxy: libcublas.so.13: cublasCreate_v2 is refused: devproxy does not carry cuBLAS to a GPU yet;"
        " run the job with --device soft, or without such calls (CUBLAS_STATUS_NOT_SUPPORTED; see docs/support.md)",
        "devproxy: libcufft.so.12: cufftCreate is refused: devproxy does not carry cuFFT to a GPU yet;"
        " run the job with --device soft, or without such calls (CUFFT_NOT_SUPPORTED; see docs/support.md)",
    ]


def test_results_of_other_kinds() -> None:
    body = """
cufile.cuFileRead.restype = c.c_ssize_t
nvshmem_host.nvshmem_malloc.restype = c.c_void_p
class Error(c.Structure):
    _fields_ = [("err", c.c_int), ("cu_err", c.c_int)]
cufile.cuFileBufRegister.restype = Error
e = cufile.cuFileBufRegister(0, 0, 0)
print(cufile.cuFileRead(0, 0, 0, 0, 0), nvshmem_host.nvshmem_malloc(1), e.err, e.cu_err)
"""
    done = run(body, "libcufile.so.0", "libnvshmem_host.so.3")
    assert done.stdout == "-5007 None 5007 0\n"
    assert done.stderr.count(" is refused: ") == 3


def test_versions_and_texts_are_answered_in_silence() -> None:
    body = """
cudnn.cudnnGetVersion.restype = c.c_size_t
cudnn.cudnnGetErrorString.restype = c.c_char_p
n, t, b = c.c_int(-1), c.c_char_p(), c.create_string_buffer(16)
print(cudnn.cudnnGetVersion())
for which in (0, 1, 2, 3):
    print(cudnn.cudnnGetProperty(which, c.byref(n)), n.value)
print(cudnn.cudnnGetErrorString(0), cudnn.cudnnGetErrorString(3000)[:8], cudnn.cudnnGetErrorString(7)[:8])
cudnn.cudnnGetLastErrorString(b, c.c_size_t(16))
print(b.value)
print(cupti.cuptiGetVersion(c.byref(n)), n.value, cupti.cuptiGetVersion(None))
print(cupti.cuptiGetResultString(27, c.byref(t)), t.value[:8])
"""
    done = run(body, "libcudnn.so.9", "libcupti.so.13")
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "92600",
        "0 9",
        "0 26",
        "0 0",
        "3000 0",
        "b'success' b'devproxy' b'an error'",
        "b'devproxy does n'",
        "0 130001 27",
        "0 b'devproxy'",
    ]


def test_strict_mode_aborts_and_the_log_level_silences() -> None:
    body = "cublas.cublasCreate_v2(0)"
    assert run(body, "libcublas.so.13", DEVPROXY_STRICT="1").returncode == -6
    assert run(body, "libcublas.so.13", DEVPROXY_LOG="error").stderr == ""


def test_the_loader_takes_a_preloaded_shim_for_a_library_of_another_file_name(
    tmp_path: Path,
) -> None:
    """What it checks before main: SONAME and version node. The stand-in has both, as the vendor's library would."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.fail("no C compiler on this machine", pytrace=False)
    (tmp_path / "vendor.c").write_text("int cublasCreate_v2(void *h) { return 77; }\n")
    (tmp_path / "map").write_text(mathlibs.emit_map("libcublas.so.13"))
    (tmp_path / "main.c").write_text(
        "int cublasCreate_v2(void *);\nint main(void) { return cublasCreate_v2(0); }\n"
    )
    library = tmp_path / "libcublas.so.13"
    options = ["-shared", "-fPIC", "-Wl,-soname,libcublas.so.13", "-Wl,--version-script=map"]
    for line in (
        [compiler, *options, "vendor.c", "-o", str(library)],
        [compiler, "main.c", str(library), "-Wl,-rpath,$ORIGIN", "-o", "main"],
    ):
        subprocess.run(line, cwd=tmp_path, check=True)
    program = str(tmp_path / "main")
    assert subprocess.run([program], check=False).returncode == 77
    env = os.environ | {"LD_PRELOAD": str(built("libcublas.so.13"))}
    done = subprocess.run([program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 15
    assert "cublasCreate_v2 is refused" in done.stderr
