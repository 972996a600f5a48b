# SPDX-License-Identifier: Apache-2.0
"""The plugin needs the CUDA driver API and nothing else: what it imports, and a job over a recording libcuda."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.needs_no_device

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
LIB = os.environ.get("DEVPROXY_LIB") or os.path.join(ROOT, "build", "lib")
KIND = "-cuda" if os.path.exists(os.path.join(torch.__path__[0], "lib", "libtorch_cuda.so")) else ""
PLUGIN = os.path.join(LIB, "torch-" + ".".join(torch.__version__.split(".")[:2]) + KIND)
CORE = "libdevproxy_torch.so"
ALLOWED_LIBRARIES = {
    "libtorch_cpu.so", "libtorch.so", "libtorch_python.so", "libc10.so", "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1",
    "libc.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2", CORE,
    *(("libc10_cuda.so",) if KIND else ()),  # whose current streams it shares with extensions
}  # fmt: skip

needs_build = pytest.mark.skipif(
    not os.path.exists(os.path.join(PLUGIN, CORE)),
    reason="the plugin is not built: devproxy build-torch",
)


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@needs_build
@pytest.mark.parametrize("name", [CORE, "_devproxy_torch.so", "libdevproxy_torch_cpu.so"])
def test_plugin_links_only_torch_and_libc(name: str) -> None:
    dynamic = output("readelf", "-d", os.path.join(PLUGIN, name))
    needed = {
        line.split("[")[1].split("]")[0] for line in dynamic.splitlines() if "(NEEDED)" in line
    }
    assert needed <= ALLOWED_LIBRARIES


@needs_build
def test_core_imports_only_cuda_torch_and_libc() -> None:
    """Every undefined symbol is cu*, nccl*, or defined by torch, c10 or the C and C++ libraries."""
    undefined = {
        line.split()[-1].split("@")[0]
        for line in output("nm", "-Du", os.path.join(PLUGIN, CORE)).splitlines()
    }
    torch_lib = os.path.join(torch.__path__[0], "lib")
    names = ["libtorch_cpu.so", "libc10.so", *(["libc10_cuda.so"] if KIND else [])]
    libraries = [os.path.join(torch_lib, n) for n in names]
    for line in output("ldd", os.path.join(PLUGIN, CORE)).splitlines():
        path = line.split("=>")[-1].split("(")[0].strip()
        if os.path.basename(path).startswith(
            ("libstdc++", "libc.", "libm.", "libgcc_s", "libdl", "libpthread", "ld-")
        ):
            libraries.append(path)
    defined: set[str] = set()
    for library in libraries:
        for line in output("nm", "-D", "--defined-only", library).splitlines():
            defined.add(line.split()[-1].split("@")[0])
    weak = {
        "__gmon_start__",
        "_ITM_deregisterTMCloneTable",
        "_ITM_registerTMCloneTable",
        "__tls_get_addr",
    }
    strange = {s for s in undefined - defined - weak if not s.startswith(("cu", "nccl"))}
    assert not strange


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording libcuda.so.1, compiled."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.fail("no g++ on this machine", pytrace=False)
    from devproxy.torch import build

    try:
        include = build.find_cuda_include("", build.ask_torch(sys.executable))
    except build.BuildError as error:
        pytest.fail(str(error), pytrace=False)
    library = tmp_path_factory.mktemp("stand-in") / "libcuda.so.1"
    subprocess.run(
        [
            compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-I", ROOT, "-I", include,
            os.path.join(HERE, "stand_in_libcuda.cc"), "-o", str(library), "-Wl,-soname,libcuda.so.1", "-ldl",
        ],
        check=True,
    )  # fmt: skip
    return library


def run_over(library: Path, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("DEVPROXY_")}
    env.update(
        LD_PRELOAD=str(library),
        DEVPROXY_DEVICE="soft",
        DEVPROXY_LIB=LIB,
        PYTHONPATH=os.path.join(ROOT, "devproxy", "torch", "pylib"),
        **more,
    )
    return subprocess.run(command, env=env, capture_output=True, text=True)


@needs_build
def test_training_over_a_recording_libcuda(stand_in: Path, tmp_path: Path) -> None:
    record = tmp_path / "calls"
    script = os.path.join(HERE, "models.py")
    done = run_over(stand_in, sys.executable, script, "--model", "mlp", STAND_IN_CALLS=str(record))
    assert done.returncode == 0, done.stderr
    calls = dict(line.split() for line in record.read_text().splitlines())
    assert set(calls) <= {
        "cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDevicePrimaryCtxRetain",
        "cuCtxSetCurrent", "cuCtxSynchronize", "cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel",
        "cuMemAllocAsync", "cuMemFreeAsync", "cuMemHostAlloc", "cuMemFreeHost", "cuPointerGetAttribute",
        "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyDtoDAsync_v2", "cuMemsetD8Async", "cuMemGetInfo_v2",
        "cuStreamSynchronize", "cuStreamWaitEvent", "cuEventCreate", "cuEventRecord", "cuEventQuery",
        "cuStreamIsCapturing", "cuEventDestroy_v2", "cuDeviceGetName", "cuDeviceGetUuid_v2", "cuDeviceTotalMem_v2", "cuDeviceGetAttribute",
    }  # fmt: skip
    assert int(calls["cuLaunchKernel"]) > 100
    assert int(calls["cuMemAllocAsync"]) >= int(calls["cuMemFreeAsync"]) > 0


@needs_build
def test_recurrent_layers_of_cudnn(stand_in: Path) -> None:
    """The client's half: nothing asks cuDNN in the job's process, weights lie as the executor says, and are not copied."""
    script = os.path.join(HERE, "rnn_program.py")
    done = run_over(
        stand_in, sys.executable, script, DEVPROXY_TORCH_OPS="cuda", DEVPROXY_TORCH_RNN="cudnn", OMP_NUM_THREADS="1"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all as on the CPU" in done.stdout


@needs_build
def test_executor_survives_damaged_blocks(stand_in: Path) -> None:
    executor = os.path.join(PLUGIN, "libdevproxy_torch_cpu.so")
    script = os.path.join(HERE, "fuzz_block.py")
    count = os.environ.get("DEVPROXY_FUZZ_BLOCKS", "5000")
    done = run_over(
        stand_in, sys.executable, script, executor, count, "1", STAND_IN_NO_STICKY="1", OMP_NUM_THREADS="1"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "nothing broke" in done.stdout


@needs_build
def test_missing_plugin_says_what_to_do(stand_in: Path, tmp_path: Path) -> None:
    env_lib = str(tmp_path)
    env = {
        **os.environ,
        "LD_PRELOAD": str(stand_in),
        "DEVPROXY_DEVICE": "soft",
        "DEVPROXY_LIB": env_lib,
    }
    env["PYTHONPATH"] = os.path.join(ROOT, "devproxy", "torch", "pylib")
    done = subprocess.run(
        [sys.executable, "-c", "import torch"], env=env, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "devproxy build-torch" in done.stderr.splitlines()[-1]


def test_sitecustomize_runs_the_one_it_shadows(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['SHADOWED'] = 'ran'\n")
    pylib = os.path.join(ROOT, "devproxy", "torch", "pylib")
    env = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "DEVPROXY_DEVICE")}
    env["PYTHONPATH"] = os.pathsep.join([pylib, str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", "import os, sys; print(os.environ['SHADOWED'], 'devproxy_torch.boot' in sys.modules)"],
        env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == ["ran", "False"]
