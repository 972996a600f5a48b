# SPDX-License-Identifier: Apache-2.0
"""libnvidia-ml.so.1 and libnccl.so.2 as they are generated, over a driver of a few lines."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from codegen.__main__ import ROOT, outputs, write

DRIVER = """
#include <cstdio>
#include <cstring>
#define EXPORT extern "C" __attribute__((visibility("default")))
static int g_inits;
EXPORT int inits() { return g_inits; }
EXPORT int cuInit(unsigned) { ++g_inits; return 0; }
EXPORT int cuDriverGetVersion(int* v) { *v = 13000; return 0; }
EXPORT int cuDeviceGetCount(int* n) { *n = 2; return 0; }
EXPORT int cuDeviceGetName(char* name, int len, int d) { std::snprintf(name, len, "soft %d", d); return 0; }
EXPORT int cuDeviceGetUuid_v2(unsigned char* u, int) { for (int i = 0; i < 16; ++i) u[i] = i; return 0; }
EXPORT int cuDeviceGetPCIBusId(char* t, int n, int d) { std::snprintf(t, n, "0000:%02x:00.0", 0x1a + d); return 0; }
EXPORT int cuDeviceComputeCapability(int* a, int* b, int) { *a = 9; *b = 0; return 0; }
EXPORT int cuDevicePrimaryCtxRetain(void** c, int) { *c = &g_inits; return 0; }
EXPORT int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
EXPORT int cuCtxPushCurrent_v2(void*) { return 0; }
EXPORT int cuCtxPopCurrent_v2(void**) { return 0; }
EXPORT int cuMemGetInfo_v2(size_t* f, size_t* t) { *f = 75; *t = 100; return 0; }
// What libnccl.so.2 links to; a driver that is not devproxy's has no core.
EXPORT const void* devproxy_core(unsigned) { return nullptr; }
EXPORT int cuMemAlloc_v2(unsigned long*, size_t) { return 801; }
EXPORT int cuMemFree_v2(unsigned long) { return 801; }
EXPORT int cuMemcpyHtoD_v2(unsigned long, const void*, size_t) { return 801; }
EXPORT int cuMemcpyDtoH_v2(void*, unsigned long, size_t) { return 801; }
EXPORT int cuEventCreate(unsigned long*, unsigned) { return 801; }
EXPORT int cuEventRecord(unsigned long, unsigned long) { return 801; }
EXPORT int cuEventDestroy_v2(unsigned long) { return 801; }
EXPORT int cuStreamWaitEvent(unsigned long, unsigned long, unsigned) { return 801; }
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with both libraries and the driver."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.fail("no g++ on this machine", pytrace=False)
    folder = tmp_path_factory.mktemp("libraries")
    for name in ("nvml_decl.gen.h", "nvml_client.gen.cc", "nccl_decl.gen.h", "nccl_client.gen.cc"):
        write(folder / name, outputs()[f"{name.split('_')[0]}/{name}"])
    (folder / "driver.cc").write_text(DRIVER)
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden"]
    flags += ["-Wl,-z,defs", f"-I{folder}", f"-I{ROOT}"]
    parts = {
        "libcuda.so.1": [str(folder / "driver.cc")],
        "libnvidia-ml.so.1": [
            str(folder / "nvml_client.gen.cc"),
            str(ROOT / "devproxy/interceptors/nvml/client.cc"),
        ],
        "libnccl.so.2": [
            str(folder / "nccl_client.gen.cc"),
            *map(str, sorted((ROOT / "devproxy/interceptors/nccl").glob("*.cc"))),
            str(folder / "libcuda.so.1"),
        ],
    }
    for soname, sources in parts.items():
        out = ["-Wl,-soname," + soname, "-o", str(folder / soname)]
        subprocess.run([compiler, *flags, *sources, *out, "-ldl"], check=True)
    return folder


def run(libraries: Path, body: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `body` in a process with the libraries preloaded, as devproxy-run does it."""
    names = ("libcuda.so.1", "libnvidia-ml.so.1", "libnccl.so.2")
    preload = ":".join(str(libraries / name) for name in names)
    code = (
        "import ctypes as c\ncuda, nvml, nccl = (c.CDLL(n) for n in"
        f" {names!r})\nb = c.create_string_buffer(96)\nn = c.c_uint()\nh = c.c_void_p()\n{body}"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DEVPROXY_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=clean | {"LD_PRELOAD": preload} | env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_counting_devices_does_not_attach(libraries: Path) -> None:
    body = (
        "assert nvml.nvmlDeviceGetCount_v2(c.byref(n)) == 1\n"  # not initialised
        "assert nvml.nvmlInit_v2() == 0\n"
        "assert nvml.nvmlDeviceGetCount_v2(c.byref(n)) == 0\n"
        "assert nvml.nvmlDeviceGetHandleByIndex_v2(2, c.byref(h)) == 0\n"
        "assert nvml.nvmlDeviceGetHandleByIndex_v2(3, c.byref(h)) == 2\n"
        "print(n.value, cuda.inits())"
    )
    done = run(libraries, body, DEVPROXY_GPUS="3")
    assert (done.stdout, done.stderr) == ("3 0\n", "")


def test_facts_come_from_the_driver(libraries: Path) -> None:
    body = """
class Memory(c.Structure):
    _fields_ = [("total", c.c_ulonglong), ("free", c.c_ulonglong), ("used", c.c_ulonglong)]
m = Memory()
assert nvml.nvmlInit() == 0
assert nvml.nvmlDeviceGetCount(c.byref(n)) == 0
assert nvml.nvmlDeviceGetHandleByIndex(1, c.byref(h)) == 0
assert nvml.nvmlDeviceGetName(h, b, 96) == 0
print(n.value, b.value.decode())
assert nvml.nvmlDeviceGetName(h, b, 3) == 7
assert nvml.nvmlDeviceGetUUID(h, b, 96) == 0
print(b.value.decode())
assert nvml.nvmlDeviceGetMemoryInfo(h, c.byref(m)) == 0
print(m.total, m.free, m.used)
assert nvml.nvmlDeviceGetName(c.c_void_p(8), b, 96) == 2
assert nvml.nvmlDeviceGetName(h, None, 96) == 2
assert nvml.nvmlShutdown() == 0
assert nvml.nvmlShutdown() == 1
"""
    done = run(libraries, body)
    assert done.stderr == ""
    uuid = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert done.stdout.splitlines() == ["2 soft 1", uuid, "100 75 25"]


def test_a_device_is_found_by_its_place_on_the_bus_and_by_its_uuid(libraries: Path) -> None:
    body = """
class Pci(c.Structure):
    _fields_ = [("legacy", c.c_char * 16), ("domain", c.c_uint), ("bus", c.c_uint), ("device", c.c_uint),
                ("id", c.c_uint), ("subsystem", c.c_uint), ("name", c.c_char * 32)]
p, i = Pci(), c.c_uint(9)
assert nvml.nvmlInit_v2() == 0
for text in (b"00000000:1b:00.0", b"0000:1B:00.0", b"1b:00.0", b"GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"):
    find = nvml.nvmlDeviceGetHandleByUUID if text.startswith(b"GPU") else nvml.nvmlDeviceGetHandleByPciBusId_v2
    assert find(text, c.byref(h)) == 0
    assert nvml.nvmlDeviceGetIndex(h, c.byref(i)) == 0
    print(i.value)
print([nvml.nvmlDeviceGetHandleByPciBusId_v2(t, c.byref(h)) for t in (b"1c:00.0", b"1:1b:00.0", b"", b"x")])
print(nvml.nvmlDeviceGetHandleByUUID(b"GPU-0", c.byref(h)))
assert nvml.nvmlDeviceGetHandleByIndex_v2(1, c.byref(h)) == 0
assert nvml.nvmlDeviceGetPciInfo_v3(h, c.byref(p)) == 0
for name in ("", "_v2", "_v3"):
    n.value = 5
    assert getattr(nvml, "nvmlDeviceGetComputeRunningProcesses" + name)(h, c.byref(n), None) == 0
    assert n.value == 0
print(p.name.decode(), p.legacy.decode(), p.domain, p.bus, p.device)
"""
    done = run(libraries, body, DEVPROXY_GPUS="2")
    assert done.stderr == ""
    # All devices of this driver have one UUID: the first is found.
    assert done.stdout.splitlines() == [
        "1",
        "1",
        "1",
        "0",
        "[6, 6, 2, 2]",
        "6",
        "00000000:1b:00.0 0000:1b:00.0 0 27 0",
    ]


def test_refused_function_says_so_once(libraries: Path) -> None:
    body = "print([nccl.ncclSignal() for _ in range(3)], nvml.nvmlDeviceGetFanSpeed())"
    done = run(libraries, body)
    assert done.stdout == "[5, 5, 5] 3\n"
    assert done.stderr.count("ncclSignal is refused") == 1
    assert done.stderr.count("nvmlDeviceGetFanSpeed is refused") == 1


def test_strict_mode_aborts_at_a_refusal(libraries: Path) -> None:
    done = run(libraries, "nccl.ncclDevCommCreate()", DEVPROXY_STRICT="1")
    assert done.returncode == -6
    assert "ncclDevCommCreate is refused" in done.stderr


def test_nccl_version_and_texts(libraries: Path) -> None:
    """In a process of its own: another libcuda.so.1 that a test has loaded would be found first."""
    body = """
nccl.ncclGetErrorString.restype = nccl.ncclGetLastError.restype = c.c_char_p
assert nccl.ncclGetVersion(c.byref(n)) == 0
assert n.value == 22907
assert nccl.ncclGetVersion(None) == 4
assert b"version is null" in nccl.ncclGetLastError(None)
assert b"invalid usage" in nccl.ncclGetErrorString(5)
assert nccl.ncclCommFinalize(None) == 3  # over a driver that is not devproxy's
assert b"not of the same devproxy" in nccl.ncclGetLastError(None)
"""
    done = run(libraries, body)
    assert (done.returncode, done.stderr) == (0, "")
