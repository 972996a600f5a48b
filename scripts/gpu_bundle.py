# SPDX-License-Identifier: Apache-2.0
"""Prepares build/gpu-bundle: everything that scripts/gpu_check.py needs on a bare machine with a GPU and no network.

    python scripts/gpu_bundle.py [--out DIR] [--without wheels,criu,kernels,torch] [--as-built]

Runs on a machine without a GPU, after `make build`. It needs nvcc 13.0 for the kernels (not for anything else), and pip
for the wheels of the device's Python. The torch plugin for the device's version of PyTorch is built where there is an
environment with that version (make .venv-cuda-2.11.0/.ready TORCH=2.11.0 PYTHON=python3.12: several GB, so nothing does it unasked). The bundle:

    manifest.json        versions, commit, what each binary needs of the device; size and sha256 of every file
    gpu_check.py         the check itself, with gpucheck/; standard library and py/ only
    lib/                 client libraries, devproxy-server, devproxy-init, without debug information
    lib/torch-2.11-cuda/ the torch plugin with its executors
    py/                  the Python side of devproxy
    wheels/, spare/      what it imports, for cp312; spare ones are used where the device's Python has none
    programs/            tests/subjects with those of driver compiled, what they take of tests/torch; comm/ of tests/comm
    programs/cudart/     tests/cudart compiled, with the shared runtime
    cudart/              NVIDIA's libcudart as a wheel, for the native runs on a device that has none
    kernels/             tests/subjects/gpu/kernels.cu as cubin, PTX and fat binary
    criu/, sys/          CRIU with its libraries; C++ runtime, for a device without one

A bundle above 60 MB is refused: 64 MiB is what travels to the device, the checkout included.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT_BYTES = 60_000_000
DEVICE_PYTHON = "3.12"  # of the machine with the GPU
DEVICE_TORCH = "2.11.0"  # of the same
PLUGIN = (
    "libdevproxy_torch.so",
    "_devproxy_torch.so",
    "libdevproxy_torch_cpu.so",
    "libdevproxy_torch_cuda.so",
)
CUBIN_ARCH = "sm_90"  # H100, H200; other GPUs compile the PTX
LIBRARIES = (
    "libcuda.so.1", "libcudart.so.13", "libcudart.so.12", "libnvidia-ml.so.1", "libnccl.so.2", "libdevproxy_host.so",
    "devproxy-server", "devproxy-init",
)  # fmt: skip
# What devproxy imports at run time. The device's own grpcio and protobuf may be older than our generated code.
PACKAGES = (
    "grpcio", "protobuf", "typing_extensions", "rich", "markdown-it-py", "mdurl", "Pygments", "blake3",
    "zstandard", "grpcio-health-checking", "grpcio-reflection",
)  # fmt: skip
RUNTIME = "nvidia-cuda-runtime"
COMM_PROGRAMS = ("nccl.py", "model.py", "collectives.py", "scenarios.py")  # of tests/comm
# Only where the device's Python has none, and only as long as there is room.
# filecheck, expecttest: what numba-cuda's own tests and torch's op_db import, and that machine may lack.
SPARE_PACKAGES = (
    "expecttest==0.3.0",
    "nvidia-ml-py",
    "filecheck==1.0.6",
    "cuda-pathfinder",
    "cuda-bindings",
)
# What the parts that come from elsewhere may take of LIMIT_BYTES: so a test of our own parts needs neither.
MOST_BYTES = {"wheels": 31_000_000, "criu": 4_000_000}
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 26, 24, 17)] + [
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
]


class Refused(Exception):
    """Something is missing here; the text says what, and what to do."""


def output(*command: str | Path) -> str:
    """stdout of a command, or Refused with what it said."""
    try:
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=ROOT)
    except OSError as error:
        raise Refused(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        raise Refused(f"{' '.join(map(str, command))[:300]}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def copy(source: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, to)


def copy_tree(source: Path, to: Path, *patterns: str) -> None:
    for pattern in patterns:
        for path in sorted(source.rglob(pattern)):
            if path.is_file() and "__pycache__" not in path.parts:
                copy(path, to / path.relative_to(source))


# -- the parts ------------------------------------------------------------------------------------------------------


def add_libraries(out: Path) -> None:
    """All that a job on a GPU may need of build/lib; not the plugins of the software GPU, which have folders by torch."""
    built = ROOT / "build" / "lib"
    for name in LIBRARIES:
        if not (built / name).exists():
            raise Refused(f"{built / name} is not there: make build")
    for path in sorted([*built.glob("*"), *(built / "refused").glob("*")]):
        to = out / "lib" / path.relative_to(built)
        to.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            to.symlink_to(os.readlink(path))
        elif path.is_file():
            copy(path, to)
            if path.read_bytes()[:4] == b"\x7fELF":
                output("strip", "--strip-debug", to)


def add_python(out: Path) -> None:
    if not (ROOT / "devproxy/control/_pb/job_pb2.py").exists():
        raise Refused("devproxy/control/_pb is not there: make build")
    copy_tree(ROOT / "devproxy", out / "py" / "devproxy", "*.py", "py.typed")
    copy(ROOT / "scripts" / "gpu_check.py", out / "gpu_check.py")
    copy_tree(ROOT / "scripts" / "gpucheck", out / "gpucheck", "*.py")


def cuda_include() -> Path:
    for header in Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/include/cuda.h"):
        return header.parent
    raise Refused("cuda.h is missing: pip install --no-deps -r requirements/headers.txt")


def add_programs(out: Path) -> None:
    """The driver-API suite, linked against the shim's SONAME: natively the loader finds the genuine driver instead."""
    programs = out / "programs"
    programs.mkdir(parents=True)
    sources = sorted((ROOT / "tests/subjects/driver").glob("*.c")) + [
        ROOT / "tests/subjects/gpu/cost.c"
    ]
    for source in sources:
        if source.stem in ("kernels", "cut"):  # of the software GPU; driven by test_cut.py
            continue
        output(
            "gcc", "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-I", cuda_include(), source,
            "-o", programs / source.stem, "-L", ROOT / "build/lib", "-l:libcuda.so.1", "-pthread",
            "-Wl,--allow-shlib-undefined",
        )  # fmt: skip
    for folder in ("tests/subjects/driver", "tests/subjects/gpu", "tests/subjects"):
        for source in sorted((ROOT / folder).glob("*.py")):
            copy(source, programs / source.name)
    for name in ("opdb.py", "mix.py"):
        copy(ROOT / "tests/torch" / name, programs / name)
    for name in COMM_PROGRAMS:
        copy(ROOT / "tests/comm" / name, programs / "comm" / name)


def torch_environment() -> Path:
    """The Python of an environment with the device's torch; make installs it when it is asked to, and only then."""
    return ROOT / f".venv-cuda-{DEVICE_TORCH}" / "bin" / "python"


def add_torch_plugin(out: Path, as_built: bool) -> list[dict[str, Any]]:
    """Of the device's torch, and of others that are built for a CUDA wheel. Returns what they are for."""
    python = torch_environment()
    wanted = f"torch-{'.'.join(DEVICE_TORCH.split('.')[:2])}-cuda"
    if python.exists() and not as_built:
        output("nice", sys.executable, "-m", "devproxy.torch.build", "--python", python, "--out", ROOT / "build/lib")  # fmt: skip
    built = ROOT / "build" / "lib" / wanted
    if missing := [name for name in PLUGIN if not (built / name).exists()]:
        print(
            f"gpu_bundle: WITHOUT THE TORCH PLUGIN: {', '.join(missing)} not in {built.relative_to(ROOT)}, so no stage t_* can run."
            f" To have it: make {python.parents[1].name}/.ready TORCH={DEVICE_TORCH} PYTHON=python{DEVICE_PYTHON} (several GB),"
            " then make gpu-bundle",
            file=sys.stderr,
        )
        return []
    for name in PLUGIN:
        to = out / "lib" / wanted / name
        copy(built / name, to)
        output("strip", "--strip-debug", to)
        to.write_bytes(without_our_folders(to.read_bytes()))
    facts: dict[str, Any] = {"folder": wanted, "torch": DEVICE_TORCH}
    if python.exists():
        ask = "import json, platform, torch; print(json.dumps([torch.__version__, platform.python_version()]))"
        facts["torch"], facts["python"] = json.loads(output(python, "-c", ask))
        if not facts["python"].startswith(DEVICE_PYTHON + "."):
            raise Refused(
                f"{python.parents[1].name} has Python {facts['python']}, and the device {DEVICE_PYTHON}: the plugin would not"
                f" load there; remove that folder, then make {python.parents[1].name}/.ready TORCH={DEVICE_TORCH}"
                f" PYTHON=python{DEVICE_PYTHON}"
            )
    return [facts]


def without_our_folders(library: bytes) -> bytes:
    """The library with a RUNPATH of $ORIGIN alone, in the place of this machine's torch folder. On the device what it needs
    is loaded before it, by torch itself in the client and by the executor's description in the server; a folder of this
    machine could at best be one that is not there."""
    found = re.search(rb"\0(/[^\0]*/torch/lib(?::\$ORIGIN)?)\0", library)
    if not found:
        return library
    at, size = found.start(1), len(found[1])
    return library[:at] + b"$ORIGIN".ljust(size, b"\0") + library[at + size :]


def nvcc_of_13() -> tuple[str, str]:
    """nvcc and its version."""
    sys.path.insert(0, str(ROOT))
    from tests.cudart.build import find_nvcc

    nvcc = find_nvcc()
    if nvcc is None:
        raise Refused("nvcc of CUDA 13.0 is not here: scripts/install_test_tools.sh")
    version = output(nvcc, "--version")
    if "release 13.0" not in version:
        raise Refused(f"{nvcc} is not of CUDA 13.0: {version.strip().splitlines()[-1]}")
    return nvcc, version


def add_cudart_programs(out: Path) -> list[list[Any]]:
    """tests/cudart, whose programs run unchanged over NVIDIA's runtime and over ours. Returns the runs: name, arguments."""
    sys.path.insert(0, str(ROOT))
    from tests.cudart import build as cudart

    nvcc, _ = nvcc_of_13()
    every = cudart.programs()
    try:
        made = cudart.build_all(nvcc, every, ROOT / "build" / "tests" / "cudart")
    except cudart.Failed as failure:
        raise Refused(str(failure)) from None
    for name, binary in made.items():
        copy(binary, out / "programs" / "cudart" / name)
    return [[one.name, list(run)] for one in every for run in one.runs]


def add_kernels(out: Path) -> str:
    """Returns nvcc's version."""
    nvcc, version = nvcc_of_13()
    source, kernels = ROOT / "tests/subjects/gpu/kernels.cu", out / "kernels"
    kernels.mkdir(parents=True)
    output(nvcc, "-O2", "-cubin", f"-arch={CUBIN_ARCH}", "-o", kernels / "kernels.cubin", source)
    output(nvcc, "-O2", "-ptx", "-arch=compute_75", "-o", kernels / "kernels.ptx", source)
    output(nvcc, "-O2", "-fatbin", f"-arch={CUBIN_ARCH}", "-o", kernels / "kernels.fatbin", source)
    return version.strip().splitlines()[-1]


def pip_download(folder: Path, requirements: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    output(
        sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps",
        "--only-binary=:all:", "--python-version", DEVICE_PYTHON, "--implementation", "cp",
        *platforms, "-d", folder, *requirements,
    )  # fmt: skip


def wheels(names: tuple[str, ...]) -> list[Path]:
    """Wheels for the device's Python, in the versions that are named or installed here; kept in build/gpu-wheels."""
    kept, found = ROOT / "build" / "gpu-wheels", []
    for name in names:
        name, _, named = name.partition("==")
        try:
            version = named or importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise Refused(f"{name} is not installed here: make setup") from None
        start = re.compile(re.escape(f"{name}-{version}-").replace(r"\-", "[-_]"), re.I)
        have = [p for p in kept.glob("*.whl") if start.match(p.name)]
        if not have:
            pip_download(kept, [f"{name}=={version}"])
            have = [p for p in kept.glob("*.whl") if start.match(p.name)]
        found += have[:1]
    return found


def add_wheels(out: Path) -> list[str]:
    """Returns what is in it, by file name."""
    names = []
    folders = (("wheels", PACKAGES), ("cudart", (RUNTIME,)), ("spare", SPARE_PACKAGES))
    for folder, packages in folders:
        for wheel in wheels(packages):
            if folder == "spare" and size_of(out) + wheel.stat().st_size > LIMIT_BYTES:
                print(f"gpu_bundle: no room for {wheel.name}", file=sys.stderr)
                continue
            copy(wheel, out / folder / wheel.name)
            names.append(wheel.name)
    return names


def libraries_of(program: Path) -> dict[str, Path]:
    """SONAME -> file of every library that the loader gives it here."""
    found = {}
    for line in output("ldd", program).splitlines():
        if match := re.match(r"\s*(\S+) => (/\S+)", line):
            found[match[1]] = Path(match[2])
    return found


CRIU_WRAPPER = """#!/bin/sh
# CRIU with the libraries it came with. The C library is always the machine's own.
here=$(cd "$(dirname "$0")" && pwd)
LD_LIBRARY_PATH=$here/../libs${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
exec "$here/criu.bin" "$@"
"""


def add_criu(out: Path) -> str:
    """Returns its version."""
    built = ROOT / "build" / "criu"
    if not (built / ".ready").exists():
        raise Refused("build/criu is not there: make criu")
    criu = out / "criu"
    copy((built / "sbin" / "criu").resolve(), criu / "sbin" / "criu.bin")
    output("strip", "--strip-debug", criu / "sbin" / "criu.bin")
    (criu / "sbin" / "criu").write_text(CRIU_WRAPPER)
    (criu / "sbin" / "criu").chmod(0o755)
    for name, path in libraries_of(criu / "sbin" / "criu.bin").items():
        if not name.startswith(("libc.so", "libm.so", "libpthread", "libdl", "ld-linux")):
            copy(path.resolve(), criu / "libs" / name)
    copy_tree((built / "lib" / "pycriu").resolve(), criu / "lib" / "pycriu", "*.py")
    return (built / ".ready").read_text().strip()


def add_runtime(out: Path) -> None:
    """libstdc++ and libgcc_s as they are here. gpu_check uses them only where the device's loader finds none."""
    for name, path in libraries_of(out / "lib" / "devproxy-server").items():
        if name.startswith(("libstdc++", "libgcc_s")):
            copy(path.resolve(), out / "sys" / name)


# -- the manifest ---------------------------------------------------------------------------------------------------


def size_of(folder: Path) -> int:
    return sum(p.lstat().st_size for p in folder.rglob("*") if p.is_file())


def needs_of(path: Path) -> dict[str, Any]:
    """Of an ELF file: its DT_NEEDED, and the newest version of each library's symbols that it asks for."""
    dynamic = output("readelf", "-dW", path)
    newest: dict[str, tuple[int, ...]] = {}
    for name, version in re.findall(
        r"\b(GLIBC|GLIBCXX|CXXABI)_([\d.]+)", output("readelf", "-VW", path)
    ):
        numbers = tuple(int(n) for n in version.split("."))
        newest[name] = max(newest.get(name, ()), numbers)
    return {
        "libraries": re.findall(r"\(NEEDED\).*\[(.+?)\]", dynamic),
        "newest": {k: ".".join(map(str, v)) for k, v in sorted(newest.items())},
    }


def suite() -> list[Any]:
    """Programs of the driver-API suite: name, arguments, devproxy-run's options."""
    sys.path.insert(0, str(ROOT))
    from tests.integration.test_programs import PROGRAMS

    return [list(program) for program in PROGRAMS]


def driver_symbols(optional: bool = False) -> list[str]:
    """The driver calls of hal/cuda, by the names that the header's macros choose: those that it cannot do without, or
    those that it misses only when a job asks for what they do."""
    header = (ROOT / "devproxy/hal/cuda/driver_table.h").read_text()
    lists = dict(re.findall(r"#define (DP_CUDA_\w*CALLS)\(X\)((?:.*\\\n)*.*)", header))
    body = lists["DP_CUDA_OPTIONAL_CALLS" if optional else "DP_CUDA_CALLS"]
    plain = re.findall(r"X\((cu\w+)\)", body)
    text = "#include <cuda.h>\n" + "".join(f"SYMBOL {name}\n" for name in plain)
    done = subprocess.run(
        ["gcc", "-E", "-P", "-I", str(cuda_include()), "-"],
        input=text, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = re.findall(r"^SYMBOL (\w+)", done.stdout, re.M)
    return found if optional else found + re.findall(r'X\(\w+, "(cu\w+)"', header)


def manifest(out: Path, extra: dict[str, Any]) -> dict[str, Any]:
    files, needs = {}, {}
    for path in sorted(p for p in out.rglob("*") if p.is_file() and not p.is_symlink()):
        data, name = path.read_bytes(), str(path.relative_to(out))
        files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        if data[:4] == b"\x7fELF" and data[18:20] == b"\x3e\x00":
            needs[name] = needs_of(path)
    newest = max(
        (n["newest"].get("GLIBC", "0") for n in needs.values()),
        key=lambda v: tuple(int(x) for x in v.split(".")),
    )
    return {
        "commit": output("git", "rev-parse", "HEAD").strip(),
        "changed": len(output("git", "status", "--porcelain").splitlines()),
        "made_unix_s": int(time.time()),
        "made_on": platform.platform(),
        "python": DEVICE_PYTHON,
        "gcc": output("gcc", "--version").splitlines()[0],
        "abi": output(out / "lib" / "devproxy-server", "--print-abi").strip(),
        "needs_glibc": newest,
        "driver_symbols": driver_symbols(),
        "optional_driver_symbols": driver_symbols(optional=True),
        "programs": suite(),
        **extra,
        "needs": needs,
        "files": files,
    }


def check_size(total: int, files: dict[str, Any]) -> None:
    if total <= LIMIT_BYTES:
        return
    largest = sorted(files.items(), key=lambda item: -item[1]["bytes"])[:5]
    raise Refused(
        f"the bundle has {total / 1e6:.1f} MB, more than {LIMIT_BYTES / 1e6:.0f} MB; largest: "
        + ", ".join(f"{name} {facts['bytes'] / 1e6:.1f} MB" for name, facts in largest)
    )


def check_part(name: str, total: int) -> None:
    if total > MOST_BYTES[name]:
        raise Refused(
            f"{name} in the bundle have {total / 1e6:.1f} MB, more than {MOST_BYTES[name] / 1e6:.0f} MB:"
            " leave something out, or give them more of the bundle's size (MOST_BYTES)"
        )


def build(out: Path, without: set[str], as_built: bool = False) -> dict[str, Any]:
    """The whole bundle, made beside `out` and put in its place when it is whole."""
    fresh = out.with_name(f"{out.name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        extra: dict[str, Any] = {"without": sorted(without)}
        add_libraries(fresh)
        add_python(fresh)
        add_programs(fresh)
        add_runtime(fresh)
        extra["torch_plugins"] = [] if "torch" in without else add_torch_plugin(fresh, as_built)
        if "kernels" not in without:
            extra["nvcc"] = add_kernels(fresh)
            extra["cudart"] = add_cudart_programs(fresh)
        if "criu" not in without:
            extra["criu"] = add_criu(fresh)
            check_part("criu", size_of(fresh / "criu"))
        if "wheels" not in without:
            extra["wheels"] = add_wheels(fresh)
            check_part("wheels", sum(size_of(fresh / f) for f in ("wheels", "cudart", "spare")))
        made = manifest(fresh, extra)
        (fresh / "manifest.json").write_text(json.dumps(made, indent=1) + "\n")
        total = size_of(fresh)
        check_size(total, made["files"])
        shutil.rmtree(out, ignore_errors=True)
        fresh.rename(out)
        return made | {"bytes": total}
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-bundle")
    parser.add_argument(
        "--without", default="", help="parts to leave out: wheels,criu,kernels,torch"
    )
    parser.add_argument(
        "--as-built", action="store_true", help="take the torch plugin as it lies in build/lib"
    )
    options = parser.parse_args()
    try:
        without = set(filter(None, options.without.split(",")))
        made = build(options.out.resolve(), without, options.as_built)
    except Refused as refusal:
        print(f"gpu_bundle: {refusal}", file=sys.stderr)
        return 2
    print(
        f"{options.out}: {len(made['files'])} files, {made['bytes'] / 1e6:.1f} MB, commit {made['commit'][:10]}"
        f"{' and changes' if made['changed'] else ''}; needs glibc {made['needs_glibc']}, Python {DEVICE_PYTHON};"
        f" torch plugin: {', '.join(p['torch'] for p in made['torch_plugins']) or 'NONE'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
