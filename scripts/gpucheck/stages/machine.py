# SPDX-License-Identifier: Apache-2.0
"""The bundle, the machine, its driver."""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import hashlib
import importlib.util
import json
import os
import re
import shutil
import site
import sys
import zipfile
from importlib import metadata
from pathlib import Path

from gpucheck.driver import INT, SIZE, Gpu
from gpucheck.ends import Failed
from gpucheck.report import Report
from gpucheck.running import read, run
from gpucheck.setup import Setup
from gpucheck.stage import stage
from gpucheck.torch_sides import find_torch

MODULE_OF = {"nvidia_ml_py": "pynvml"}  # of wheels that have another name


@stage(40, 5)
def prepare(setup: Setup, report: Report) -> None:
    """Is the bundle whole, and which of its parts does this machine take?"""
    facts = setup.manifest
    wrong = [
        name
        for name, want in facts["files"].items()
        if not (setup.bundle / name).is_file()
        or hashlib.sha256((setup.bundle / name).read_bytes()).hexdigest() != want["sha256"]
    ]
    report.put("files", len(facts["files"]))
    if wrong:
        report.put("changed_files", wrong[:20])
    made_for = facts["python"] == ".".join(map(str, sys.version_info[:2]))
    if not made_for:
        report.say(f"the wheels are for Python {facts['python']}, not for this one: left out")
    for wheel in (setup.bundle / "wheels").glob("*.whl"):
        if made_for:
            unpack(wheel, setup.work / "site")
    for wheel in (setup.bundle / "spare").glob("*.whl"):
        name = wheel.name.split("-")[0]
        if made_for and not has_module(MODULE_OF.get(name, name.replace("_", "."))):
            unpack(wheel, setup.work / "spare")
            report.say(f"{name} is not here: taken from the bundle")
    missing = {}
    for name in ("devproxy-server", "devproxy-init", "libcuda.so.1", "libdevproxy_host.so"):
        done = run(["ldd", str(setup.bundle / "lib" / name)], dict(os.environ), 10)
        lost = re.findall(r"(\S+) => not found|(version `\S+' not found)", done.out + done.err)
        if lost:
            missing[name] = [a or b for a, b in lost]
    if missing:
        report.put("missing_libraries", missing)
        (setup.work / "runtime").touch()
    server = run([str(setup.bundle / "lib" / "devproxy-server"), "--print-abi"], setup.proxied_env(), 10)  # fmt: skip
    report.put("server_starts", server.code == 0)
    with_devproxy = run([*setup.proxied().prefix[:3], "--version"], setup.proxied_env(), 20)
    report.put("devproxy", with_devproxy.out.strip() or with_devproxy.brief())
    report.put("genuine_cudart", find_cudart(setup))
    report.put("compilers", find_compilers(setup))
    report.put("torch", find_torch(setup) or None)
    report.put("torch_plugins", facts.get("torch_plugins", []))
    service = "import devproxy.control.agent_service, blake3, zstandard, rich, grpc_health.v1.health, grpc_reflection.v1alpha.reflection"
    imports = run([sys.executable, "-c", service], setup.proxied_env(), 30)
    report.put("imports", imports.code == 0 or imports.brief())
    if wrong:
        raise Failed(f"{len(wrong)} files are not as the manifest says: {', '.join(wrong[:5])}")
    if server.code or with_devproxy.code or imports.code:
        raise Failed("devproxy does not start here: " + (server.err or with_devproxy.err or imports.err)[-600:])  # fmt: skip


def package_folders() -> list[Path]:
    """Where CUDA's own packages put their libraries (nvidia/cu13/lib, nvidia/cuda_runtime/lib), in this Python."""
    roots = {*sys.path, *site.getsitepackages(), site.getusersitepackages()}
    return sorted({f for root in roots if root for f in Path(root).glob("nvidia/*/lib")})


def find_cudart(setup: Setup) -> str | None:
    """NVIDIA's runtime for native runs: this machine's, else the bundle's. Put beside the genuine driver."""
    places = [*package_folders(), Path("/usr/local/cuda/lib64")]
    found = [f / "libcudart.so.13" for f in places if (f / "libcudart.so.13").exists()]
    if not found:
        for wheel in (setup.bundle / "cudart").glob("*.whl"):
            unpack(wheel, setup.work / "cudart")
        found = sorted((setup.work / "cudart").rglob("libcudart.so.13"))
    if not found:
        return None
    (setup.work / "native" / "libcudart.so.13").symlink_to(found[0])
    return str(found[0])


def find_compilers(setup: Setup) -> list[str]:
    """libnvrtc and libnvJitLink, which need no device: the same for native and proxied runs."""
    folder = setup.work / "compilers"
    folder.mkdir()
    for place in [*package_folders(), Path("/usr/local/cuda/lib64")]:
        for path in [*place.glob("libnvrtc*.so*"), *place.glob("libnvJitLink.so*")]:
            if not (folder / path.name).exists():
                (folder / path.name).symlink_to(path.resolve())
    return sorted(p.name for p in folder.iterdir())


def unpack(wheel: Path, to: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(to)


def has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


@stage(40, 3)
def machine(setup: Setup, report: Report) -> None:
    """What is here: kernel, limits, tools, packages."""
    report.put("uname", list(os.uname())[2:])
    report.put("os", re.findall(r'PRETTY_NAME="(.*)"', read("/etc/os-release") or ""))
    report.put("libc", os.confstr("CS_GNU_LIBC_VERSION"))
    report.put("python", sys.version)
    report.put("uid", os.getuid())
    report.put("cpus", len(os.sched_getaffinity(0)))
    status = read("/proc/self/status") or ""
    report.put("capabilities", re.findall(r"^Cap(?:Eff|Bnd):\s*(\w+)", status, re.M))
    report.put("meminfo", re.findall(r"^(Mem\w+|Hugepagesize|HugePages_Total):\s*(.*)", read("/proc/meminfo") or "", re.M))  # fmt: skip
    free = {}
    for what, place in (("/dev/shm", "/dev/shm"), ("work", str(setup.work))):
        with contextlib.suppress(OSError):
            found = os.statvfs(place)
            free[what] = found.f_bavail * found.f_frsize >> 20
    report.put("free_MiB", free)
    report.put("memlock", re.findall(r"Max locked memory\s+(\S+)\s+(\S+)", read("/proc/self/limits") or ""))  # fmt: skip
    report.put("nvidia_nodes", sorted(map(str, Path("/dev").glob("nvidia*"))))
    report.put("nvidia_kernel_driver", read("/proc/driver/nvidia/version"))
    report.put("driver_library", [setup.driver, os.path.realpath(setup.driver)] if setup.driver else None)  # fmt: skip
    report.put("beside_it", sorted(p.name for p in Path(setup.driver).resolve().parent.glob("lib*nv*.so*"))[:60] if setup.driver else None)  # fmt: skip
    report.put("yama_ptrace_scope", read("/proc/sys/kernel/yama/ptrace_scope"))
    report.put("mmap_min_addr, overcommit", [read("/proc/sys/vm/mmap_min_addr"), read("/proc/sys/vm/overcommit_memory")])  # fmt: skip
    with contextlib.suppress(OSError), gzip.open("/proc/config.gz", "rt") as config:
        wanted = re.compile(r"CHECKPOINT_RESTORE|USERFAULTFD|SOFT_DIRTY|_DIAG|NAMESPACES|_NS=|MEMFD|KCMP")  # fmt: skip
        report.put("kernel_config", [line.strip() for line in config if wanted.search(line)])
    tools = (
        "nvidia-smi",
        "nvcc",
        "gcc",
        "g++",
        "ldd",
        "unshare",
        "criu",
        "cuda-checkpoint",
        "make",
    )
    report.put("tools", {t: shutil.which(t) for t in tools})
    versions = {}
    for package in ("torch", "numpy", "numba", "numba-cuda", "cuda-bindings", "triton", "nvidia-ml-py", "grpcio", "protobuf", "psutil"):  # fmt: skip
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    report.put("packages", versions)
    if shutil.which("nvidia-smi"):
        fields = "name,driver_version,memory.total,memory.used,pcie.link.gen.current,pcie.link.width.current,compute_mode,persistence_mode,ecc.mode.current"
        smi = run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv"], dict(os.environ), 20)
        report.put("nvidia_smi", smi.out.strip().splitlines() or smi.brief())
    code = "import json, sys; from devproxy.hal import nvml; print(json.dumps(nvml.read(sys.argv[1]).as_json()))"
    health = run([sys.executable, "-c", code, setup.driver], setup.proxied_env(), 15)
    report.put(
        "nvml", json.loads(health.out) if health.code == 0 else health.brief().split(" | ")[-1]
    )


@stage(30, 3, direct=True)
def driver(setup: Setup, report: Report) -> None:
    """The driver: version, device, the calls that hal/cuda makes, the attributes that it asks for."""
    gpu = Gpu(setup.driver)
    version, name, total = INT(), ctypes.create_string_buffer(200), SIZE()
    gpu.call("cuDriverGetVersion", ctypes.byref(version))
    gpu.call("cuDeviceGetName", name, INT(199), gpu.device)
    gpu.call("cuDeviceTotalMem_v2", ctypes.byref(total), gpu.device)
    report.put("cuda_version", version.value)
    report.put("name", name.value.decode())
    report.put("total_bytes", total.value)
    attributes = {
        "compute_major": 75, "compute_minor": 76, "multiprocessors": 16, "unified_addressing": 41,
        "virtual_memory_management": 102, "64_bit_stream_mem_ops": 122, "host_register_supported": 99,
        "host_pointer_for_registered_mem": 91, "concurrent_kernels": 31, "async_engines": 40,
        "compute_preemption": 90, "gpu_direct_rdma_with_vmm": 110, "host_numa_vmm": 141,
    }  # fmt: skip
    values, value = {}, INT()
    for text, number in attributes.items():
        code = gpu.result("cuDeviceGetAttribute", ctypes.byref(value), INT(number), gpu.device)
        values[text] = value.value if code == 0 else gpu.text(code)
    report.put("attributes", values)
    missing = [s for s in setup.manifest["driver_symbols"] if not gpu.has(s)]
    report.put("driver_table", {"asked": len(setup.manifest["driver_symbols"]), "missing": missing})
    # Each of them is missed only by the jobs that ask for what it does.
    optional = setup.manifest.get("optional_driver_symbols", [])
    report.put("optional_missing", [s for s in optional if not gpu.has(s)])
    extra = ("cuKernelGetParamInfo", "cuCtxCreate_v4", "cuMemcpyBatchAsync", "cuCheckpointProcessLock")  # fmt: skip
    report.put("also_there", {s: gpu.has(s) for s in extra})
    if missing:
        raise Failed(f"the driver lacks {', '.join(missing)}")
