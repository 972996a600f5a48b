# SPDX-License-Identifier: Apache-2.0
"""How a job's programs come to devproxy's libraries, whatever name they look for, and what is refused on the way."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from devproxy import machine
from tests.integration.needs import require_nvcc

Run = Callable[..., subprocess.CompletedProcess[str]]
OPTIONS = ["--plain"]  # no checkpoint is taken here


@pytest.mark.parametrize("device", ["soft", "record"])
def test_libcuda_so_is_the_preloaded_shim(device: str, run_job: Run) -> None:
    """numba-cuda and others open this name first. Two copies of the shim would be two processes to the server."""
    code = """
import ctypes
one, other = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libcuda.so")
assert one._handle == other._handle
files = {l.split()[-1] for l in open("/proc/self/maps") if "libcuda.so" in l}
print(other.cuInit(0), len(files))
"""
    done = run_job(sys.executable, "-c", code, options=[*OPTIONS, "--device", device])
    assert (done.stdout, done.returncode) == ("0 1\n", 0), done.stderr


def test_pynvml_over_the_nvml_shim(run_job: Run) -> None:
    """The package that torch.cuda, monitoring tools and frameworks ask; health is the host's."""
    code = """
import pynvml as n
n.nvmlInit()
print(n.nvmlDeviceGetCount(), n.nvmlSystemGetCudaDriverVersion() >= 12000)
h = n.nvmlDeviceGetHandleByIndex(1)
print(bool(n.nvmlDeviceGetName(h)), n.nvmlDeviceGetUUID(h)[:4], n.nvmlDeviceGetIndex(h))
m = n.nvmlDeviceGetMemoryInfo(h)
print(0 < m.free <= m.total, m.used == m.total - m.free)
print(n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2).total == m.total)
print(n.nvmlDeviceGetCudaComputeCapability(h)[0] > 0)
place = n.nvmlDeviceGetPciInfo(h).busId
print(n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByPciBusId(place)))
print(n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(h))))
u = n.nvmlDeviceGetUtilizationRates(h)
print(u.gpu, 0 <= u.memory <= 100, n.nvmlDeviceGetTemperature(h, 0), n.nvmlDeviceGetPowerUsage(h))
print(n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM) > 0)
try:
    n.nvmlDeviceGetFanSpeed(h)
except n.NVMLError_NotSupported as e:
    print(e)
n.nvmlShutdown()
"""
    done = run_job(sys.executable, "-c", code, options=[*OPTIONS, "--gpus", "2"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "2 True",
        "True GPU- 1",
        "True True",
        "True",
        "True",
        "1",
        "1",
        "0 True 0 0",
        "True",
        "Not Supported",
    ]
    assert done.stderr.count("nvmlDeviceGetFanSpeed is refused") == 1


def test_the_drivers_log_takes_listeners_and_is_empty(run_job: Run) -> None:
    """PyTorch 2.15 listens from its import on."""
    code = """
import ctypes as c
cuda = c.CDLL("libcuda.so.1")
heard = c.CFUNCTYPE(None, c.c_void_p, c.c_int, c.c_char_p, c.c_size_t)(lambda *a: None)
h, at, b, n = c.c_void_p(), c.c_uint(7), c.create_string_buffer(b"xyz"), c.c_size_t(4)
print(cuda.cuLogsRegisterCallback(None, None, c.byref(h)), cuda.cuLogsRegisterCallback(heard, None, None))
print(cuda.cuLogsRegisterCallback(heard, None, c.byref(h)), cuda.cuLogsUnregisterCallback(h))
print(cuda.cuLogsUnregisterCallback(h), cuda.cuLogsUnregisterCallback(None))
print(cuda.cuLogsCurrent(c.byref(at), 0), at.value, cuda.cuLogsCurrent(c.byref(at), 1))
print(cuda.cuLogsDumpToMemory(None, b, c.byref(n), 0), b.value, n.value)
"""
    done = run_job(sys.executable, "-c", code, options=OPTIONS)
    assert done.stdout.splitlines() == ["1 0", "0 0", "1 1", "0 0 1", "0 b'' 0"], done.stderr


# The first thing that a CUDA runtime of NVIDIA's asks: one of its tables, by UUID.
ASKS = """
#include <dlfcn.h>
#include <stdio.h>
int ask(void) {
  static const unsigned char id[16] = {0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a,
                                       0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9};
  const void *table = id;
  int (*get)(const void **, const void *) = (int (*)(const void **, const void *))dlsym(
      dlopen("libcuda.so.1", RTLD_NOW), "cuGetExportTable");
  const int result = get(&table, id);
  return table == 0 ? result : -1;
}
"""
MAIN = "int ask(void);\nint main(void) { ask(); return ask() == 801 ? 42 : 1; }\n"


@pytest.mark.parametrize(
    ("library", "words"),
    [
        ("", "has a statically linked CUDA runtime, which runs only on NVIDIA's own driver;"
             " relink it with the shared one: nvcc -cudart shared"),
        ("libplugin.so", "has a statically linked CUDA runtime, which runs only on NVIDIA's own driver;"
                         " relink it with the shared one: nvcc -cudart shared"),
        ("libcusolver.so.12", "has a statically linked CUDA runtime inside, which runs only on NVIDIA's own"
                              " driver; devproxy does not carry this library yet"),
        ("libcudart.so.13", "is NVIDIA's own CUDA runtime, which runs only on NVIDIA's own driver;"
                            " load it by its name"),
    ],
)  # fmt: skip
def test_a_foreign_cuda_runtime_is_refused_with_the_file_that_has_it(
    library: str, words: str, run_job: Run, tmp_path: Path
) -> None:
    """Once per file, however often it asks. The call fails, so that the program ends by itself."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.fail("no C compiler on this machine", pytrace=False)
    (tmp_path / "asks.c").write_text(ASKS)
    (tmp_path / "main.c").write_text(MAIN)
    sources = ["asks.c", "main.c"]
    if library:
        # Without a SONAME it is needed by its path, which the preloaded libraries' names do not match.
        file = str(tmp_path / library)
        subprocess.run(
            [compiler, "-shared", "-fPIC", "asks.c", "-o", file], cwd=tmp_path, check=True
        )
        sources = ["main.c", file]
    subprocess.run([compiler, *sources, "-o", "main"], cwd=tmp_path, check=True)
    done = run_job(str(tmp_path / "main"), options=OPTIONS)
    assert done.returncode == 42
    lines = [line for line in done.stderr.splitlines() if "cuGetExportTable" in line]
    assert len(lines) == 1
    assert f"{tmp_path / (library or 'main')} {words}" in lines[0]


@pytest.mark.parametrize("device", ["soft", "record"])
def test_a_program_with_a_static_cuda_runtime_ends_with_its_own_error(
    device: str, run_job: Run, tmp_path: Path
) -> None:
    nvcc = require_nvcc()
    source, program = tmp_path / "program.cu", tmp_path / "program"
    source.write_text(
        """
#include <cstdio>
__global__ void kernel(int* p) { *p = 1; }
int main() {
  int* p = nullptr;
  const cudaError_t error = cudaMalloc(&p, 4);
  std::printf("%s\\n", cudaGetErrorName(error));
  if (error != cudaSuccess) return 3;
  kernel<<<1, 1>>>(p);
  return 0;
}
"""
    )
    line = [nvcc, "-arch=sm_90", "-cudart", "static", str(source), "-o", str(program)]
    subprocess.run(line, check=True, timeout=200)
    done = run_job(str(program), options=[*OPTIONS, "--device", device])
    assert (done.stdout, done.returncode) == ("cudaErrorNotSupported\n", 3)
    lines = [
        line for line in done.stderr.splitlines() if line.startswith("devproxy: libcuda.so.1: ")
    ]
    assert len(lines) == 1
    assert f"{program} has a statically linked CUDA runtime" in lines[0]
    assert "nvcc -cudart shared" in lines[0]


def test_as_many_gpus_as_a_job_may_have(run_job: Run) -> None:
    code = """
import ctypes as c
cuda, runtime = c.CDLL("libcuda.so.1"), c.CDLL("libcudart.so.13")
n, context, memory = c.c_int(), c.c_void_p(), c.c_uint64()
print(cuda.cuInit(0), cuda.cuDeviceGetCount(c.byref(n)), n.value)
print(cuda.cuDevicePrimaryCtxRetain(c.byref(context), n.value - 1), cuda.cuCtxSetCurrent(context))
print(cuda.cuMemAlloc_v2(c.byref(memory), 100), runtime.cudaSetDevice(n.value - 1))
print(runtime.cudaGetDeviceCount(c.byref(n)), n.value)
"""
    options = ["--device", "soft", "--gpus", str(machine.MOST_GPUS)]
    done = run_job(sys.executable, "-c", code, options=options)
    most = machine.MOST_GPUS
    assert done.stdout.splitlines() == [f"0 0 {most}", "0 0", "0 0", f"0 {most}"], done.stderr
