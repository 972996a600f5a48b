# SPDX-License-Identifier: Apache-2.0
"""numba-cuda's own tests of its driver layer, and Triton's launcher, over the recording device: `make test-third-party-record`.

No kernel is executed, so a test that looks at what one computed fails here; KNOWN is the list of these and of what is
refused, word for word. On a GPU gpu_check's stages c_numba_tests and c_triton run the same programs against native runs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "tests" / "subjects" / "gpu"
PYTHON = os.environ["DEVPROXY_WHEEL_PYTHON"]
PACKAGE = "numba.cuda.tests.cudadrv"
# As scripts/gpu_check.py has it: managed memory beyond a card's, and what looks at the machine and not at the driver.
LEFT_OUT = ("test_managed_alloc", "test_detect", "test_is_fp16")
# They look at what a kernel computed. By class.
VALUES = {
    "test_context_stack.Test3rdPartyContext": "test_cudajit_in_attached_primary_context",
    "test_cuda_array_slicing.CudaArraySetting": "test_array_assign_all test_array_assign_column test_array_assign_deep_subarray test_array_assign_row test_array_assign_subarray test_broadcast test_rank test_scalar test_strides",
    "test_cuda_devicerecord.TestRecordDtypeWithStructArrays": "test_structured_array2 test_structured_array3 test_structured_array4",
    "test_cuda_driver.TestAcceleratedArchitecture": "test_device_arch_specific",
    "test_cuda_driver.TestCudaDriver": "test_cuda_cache_config test_cuda_core_graph_builder_launch_user_facing test_cuda_core_stream_launch_user_facing test_cuda_core_stream_operations test_cuda_driver_basic test_cuda_driver_stream_operations test_cuda_set_shared_memory_carveout",
    "test_cuda_ndarray.TestCudaNDArray": "test_devicearray_transpose_T test_devicearray_transpose_ok",
    "test_cuda_ndarray.TestRecarray": "test_recarray",
    "test_linker.TestLinker": "test_linking_cu test_linking_eager_compile test_linking_lazy_compile",
    "test_module_callbacks.TestModuleCallbacks": "test_decldevice_arg test_jitarg",
}
MANAGED, MAPPED = (
    "CUDA_ERROR_NOT_SUPPORTED: 801>] Call to cuMemAllocManaged",
    "CUDA_ERROR_NOT_SUPPORTED: 801>] Call to cuMemHostGetDevicePointer",
)
# Test -> how it ends, by words that its line must have.
KNOWN = {
    f"cudadrv.{place}.{name}": "failed AssertionError"
    for place, names in VALUES.items()
    for name in names.split()
} | {
    "cudadrv.test_cuda_memory.TestCudaMemory.test_managed_memory": MANAGED,
    "cudadrv.test_deallocations.TestDeallocation.test_del_managed_memory": MANAGED,
    "cudadrv.test_cuda_memory.TestCudaMemory.test_pinned_memory": MAPPED,
    "cudadrv.test_deallocations.TestDeallocation.test_del_mapped_contextmanager": MAPPED,
    # What that one had registered before it was refused is the same array.
    "cudadrv.test_deallocations.TestDeallocation.test_del_pinned_contextmanager": "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
    "cudadrv.test_profiler.TestProfiler.test_profiling": "CUDA_ERROR_NOT_SUPPORTED: 801>] Call to cuProfilerStart",
    "cudadrv.test_cuda_ndarray.TestCoreContiguous.test_kernel_with_buffer": "No module named 'cupy'",
    "cudadrv.test_cuda_ndarray.TestCoreContiguous.test_kernel_with_strided_memory_view": "No module named 'cupy'",
}


def run(env: dict[str, str], *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "devproxy.cli.run", "--device", "record", "--plain", "--"]
    told = {"DEVPROXY_TEST_NO_KERNELS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/subjects'}"}
    return subprocess.run(
        [*line, PYTHON, *command], env=env | told | more, capture_output=True, text=True, timeout=280, check=False
    )  # fmt: skip


@pytest.mark.timeout(1500)
def test_numba_cudas_own_tests(job_env: dict[str, str]) -> None:
    program = str(GPU / "numba_tests.py")
    names = run(job_env, program, "--list", PACKAGE)
    assert names.returncode == 0, names.stderr[-3000:]
    modules = [n for n in names.stdout.split() if n.rsplit(".", 1)[1] not in LEFT_OUT]
    assert len(modules) >= 20
    with ThreadPoolExecutor(2) as pool:
        every = list(pool.map(lambda module: run(job_env, program, module), modules))
    results: dict[str, str] = {}
    for module, done in zip(modules, every, strict=True):
        assert "\nDONE" in f"\n{done.stdout}", f"{module}: {done.stderr[-3000:]}"
        results |= dict(re.findall(r"^test (\S+) (.*)$", done.stdout, re.M))
    ended = {name: how for name, how in results.items() if not how.startswith(("ok", "skipped"))}
    assert {n: how for n, how in ended.items() if KNOWN.get(n, "\0") not in how} == {}
    assert set(KNOWN) - set(ended) == set(), "no longer so: take them out of KNOWN"
    assert sum(how == "ok" for how in results.values()) >= 190


def test_tritons_own_launcher(job_env: dict[str, str], tmp_path: Path) -> None:
    """It is compiled here, against the file that TRITON_LIBCUDA_PATH names, and calls the shim."""
    done = run(
        job_env, str(GPU / "triton_program.py"),
        TRITON_CACHE_DIR=str(tmp_path), TRITON_LIBCUDA_PATH=str(ROOT / "build" / "lib"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "PASS triton_program" in done.stdout
    assert not re.search(r"refused", done.stderr.replace("--device record", "")), done.stderr
