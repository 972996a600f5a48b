# SPDX-License-Identifier: Apache-2.0
"""Builds the torch plugin for one Python's torch: python -m devproxy.torch.build --python PY --out DIR.

Makes DIR/torch-<major.minor>[-cuda]/ with the client's core library, its Python bindings and the executor module for the
server, on the host and, for the CUDA wheel, on CUDA. Each object file carries the hash of all that went into it; what has not changed is not compiled again.
Exit codes: 0 built or up to date, 1 a compiler failed, 2 something is missing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fcntl
import glob
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

from devproxy import config

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.abspath(os.path.join(HERE, "..", ".."))
JOBS = 2
OLDEST, NEWEST = (2, 11), (2, 15)

CORE_SOURCES = (
    "driver",
    "device",
    "allocator",
    "hooks",
    "executor",
    "op_meta",
    "op_plan",
    "encoder",
    "infer",
    "worker",
    "forward",
    "small_ops",
    "kernels",
    "copy",
    "composites",
    "graph",
    "history",
    "profile",
    "rnn",
    "sparse",
    "sync_batch_norm",
)
# torch.distributed's backend 'nccl': beside the bindings, because only Python makes one.
C10D_SOURCES = (
    "nccl_api",
    "comm",
    "work",
    "watchdog",
    "operands",
    "process_group",
    "launch",
    "collectives",
    "point_to_point",
    "gloo",
    "bind",
)
EXECUTOR_SOURCES = ("client", "decode", "footprint", "half", "module", "other_types", "placement")
CORE, BINDINGS, EXECUTOR, CUDA_EXECUTOR = (
    "libdevproxy_torch.so",
    "_devproxy_torch.so",
    "libdevproxy_torch_cpu.so",
    "libdevproxy_torch_cuda.so",
)
SOURCES = {
    CORE: [f"client/{name}.cc" for name in CORE_SOURCES],
    BINDINGS: [
        "client/bind.cc",
        "client/snapshot.cc",
        *(f"client/c10d/{name}.cc" for name in C10D_SOURCES),
    ],
    EXECUTOR: [f"executor/{name}.cc" for name in ("cpu", *EXECUTOR_SOURCES)],
    CUDA_EXECUTOR: [f"executor/{name}.cc" for name in ("cuda", *EXECUTOR_SOURCES)],
}
CXXFLAGS = ["-O2", "-fPIC", "-std=c++20", "-Wall", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]
ASK = (
    "import json, sys, sysconfig, torch\n"
    "json.dump(dict(version=torch.__version__, folder=torch.__path__[0], cuda=torch.version.cuda,"
    " include=sysconfig.get_paths()['include'], abi=torch._C._GLIBCXX_USE_CXX11_ABI), sys.stdout)"
)


IMPORT_S = 600.0  # of torch, from a slow file system


class BuildError(Exception):
    """What is missing or failed, in one line, and the exit code."""

    def __init__(self, text: str, code: int = 2) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Torch:
    """One Python's torch."""

    version: str
    folder: str
    include: str  # of that Python
    cuda: str | None
    abi: bool

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])

    @property
    def build_name(self) -> str:
        """Folder of the plugin's build: the CUDA wheel has one of its own (see pylib/devproxy_torch/plugin.py)."""
        return f"torch-{self.minor}" + ("-cuda" if self.cuda is not None else "")

    @property
    def lib(self) -> str:
        return os.path.join(self.folder, "lib")


def ask_torch(python: str) -> Torch:
    """Raises BuildError where that Python has no torch, or one that this plugin does not know."""
    # Without our own environment: a torch with the plugin in it would say that it is a CUDA build.
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ("LD_PRELOAD", "PYTHONPATH", "DEVPROXY_DEVICE")
    }
    try:
        done = subprocess.run(
            [python, "-c", ASK],
            capture_output=True,
            text=True,
            env=env,
            check=False,
            timeout=IMPORT_S,
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"{python} has not imported torch within {IMPORT_S:g} s") from None
    except OSError as error:
        raise BuildError(f"{python} cannot be run: {error.strerror}") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise BuildError(
            f"{python} has no usable torch ({last}); install it: {python} -m pip install torch"
        )
    found = Torch(**json.loads(done.stdout))
    numbers = tuple(int(n) for n in found.minor.split("."))
    if not OLDEST <= numbers <= NEWEST:
        raise BuildError(
            f"torch {found.version} is not supported; install torch {OLDEST} to {NEWEST}"
        )
    if not os.path.isfile(os.path.join(found.include, "Python.h")):
        raise BuildError(
            f"{found.include}/Python.h is missing; install that Python's development package"
        )
    return found


def _packages_and_toolkits(torch: Torch) -> list[str]:
    """Folders that may have headers of the CUDA toolkit: of packages beside that torch or this Python, then of toolkits."""
    found: list[str] = []
    for packages in [os.path.dirname(torch.folder), *sys.path]:
        found += glob.glob(os.path.join(packages, "nvidia", "*", "include"))
    return found + glob.glob("/usr/local/cuda*/include")


def find_cuda_include(given: str, torch: Torch) -> str:
    """Folder of cuda.h: as given, of a package (nvidia-cuda-runtime), of a toolkit, or fetched by devproxy."""
    candidates = [given] if given else []
    candidates += _packages_and_toolkits(torch)
    candidates.append(os.path.join(config.made_here_dir(), "headers", "cuda-13"))
    for folder in candidates:
        if os.path.isfile(os.path.join(folder, "cuda.h")):
            return folder
    raise BuildError("cuda.h is missing; fetch it: devproxy doctor --fix")


# Headers of the toolkit that torch's CUDA headers include and its wheel may lack, with the package that has them.
VENDOR_HEADERS = {
    "crt/host_config.h": "nvidia-cuda-crt==13.0.88",
    "nv/target": "nvidia-cuda-cccl==13.0.85",
}


def find_header(name: str, torch: Torch, cuda_include: str) -> str:
    """The folder that has it, or "". Triton comes with the CUDA wheel and has some."""
    candidates = [cuda_include, *_packages_and_toolkits(torch)]
    for packages in [os.path.dirname(torch.folder), *sys.path]:
        candidates.append(os.path.join(packages, "triton", "backends", "nvidia", "include"))
    candidates += glob.glob("/usr/local/cuda*/include/cccl")
    for folder in candidates:
        if os.path.isfile(os.path.join(folder, name)):
            return folder
    return ""


def vendor_flags(torch: Torch, cuda_include: str) -> list[str]:
    """What torch's own CUDA headers need besides cuda.h. Raises BuildError."""
    folders = sorted(
        glob.glob(os.path.join(os.path.dirname(torch.folder), "nvidia", "*", "include"))
    )
    for name, package in VENDOR_HEADERS.items():
        found = find_header(name, torch, cuda_include)
        if not found:
            raise BuildError(f"{name} is missing; install it: python -m pip install {package}")
        if found not in folders:
            folders.append(found)
    return [word for folder in folders for word in ("-isystem", folder)]


def include_flags(torch: Torch, cuda_include: str) -> list[str]:
    headers = os.path.join(torch.folder, "include")
    system = [headers, os.path.join(headers, "torch", "csrc", "api", "include"), torch.include]
    return [
        "-I",
        ROOT,
        "-I",
        cuda_include,
        *[word for folder in system for word in ("-isystem", folder)],
    ]


def sources_hash(torch: Torch) -> str:
    """Of every header of ours that an object may include, and of the torch it is for."""
    own = sorted(glob.glob(os.path.join(HERE, "**", "*.h"), recursive=True))
    own += [
        os.path.join(ROOT, "devproxy/csrc/wire/segment.h"),
        *sorted(glob.glob(os.path.join(ROOT, "devproxy/hal/host_module/include/*.h"))),
    ]
    digest = hashlib.sha256(f"{torch.version} {torch.folder} {torch.abi}".encode())
    for path in own:
        with open(path, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


def is_current(product: str, stamp: str) -> bool:
    try:
        with open(product + ".stamp", encoding="ascii") as file:
            return file.read() == stamp and os.path.exists(product)
    except OSError:
        return False


def make(product: str, stamp: str, command: list[str], text: str = "") -> None:
    """Runs the command with text as its standard input; what it makes is moved to `product` when whole."""
    partial = f"{product}.{os.getpid()}"
    done = subprocess.run(
        [*command, "-o", partial], input=text, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        if os.path.exists(partial):
            os.unlink(partial)
        sys.stderr.write(done.stderr)
        raise BuildError(
            f"{os.path.basename(product)} could not be built (compiler output above)", 1
        )
    os.replace(partial, product)
    with open(product + ".stamp", "w", encoding="ascii") as file:
        file.write(stamp)


def link_command(name: str, part: str, torch: Torch, folder: str) -> list[str]:
    command = [
        "g++",
        "-shared",
        part,
        f"-L{torch.lib}",
        f"-Wl,-rpath,{torch.lib}",
        "-Wl,--enable-new-dtags",
    ]
    if name == BINDINGS:
        own = ["-L" + folder, "-Wl,-rpath,$ORIGIN", "-ldevproxy_torch"]
        return [*command, *own, "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
    # nodelete: the executor's allocator stays in libtorch_cpu when the process that loaded it has gone.
    flags = [f"-Wl,-soname,{name}", "-Wl,-z,defs", "-Wl,-z,nodelete"]
    if name == CUDA_EXECUTOR:
        # cudart by the name that torch's wheel links, out of the package beside it: it is the server that loads this.
        cudart = glob.glob(
            os.path.join(os.path.dirname(torch.folder), "nvidia", "*", "lib", "libcudart.so.*")
        )
        flags += ["-ltorch_cuda", "-lc10_cuda", *cudart[:1]]
    if name == CORE and torch.cuda is not None:
        flags.append("-lc10_cuda")
    return [*command, *flags, "-ltorch_cpu", "-lc10", "-ldl"]


def build(torch: Torch, out: str, cuda_include: str) -> list[str]:
    """Returns the names of what was made anew. Raises BuildError."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        raise BuildError("g++ is missing; install it: apt-get install g++")
    folder = os.path.join(out, torch.build_name)
    objects_dir = os.path.join(folder, "obj")
    os.makedirs(objects_dir, exist_ok=True)
    flags = [
        *CXXFLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.abi)}",
        "-DTORCH_EXTENSION_NAME=_devproxy_torch",
    ]
    if torch.cuda is not None:
        flags.append(
            "-DDEVPROXY_TORCH_OVERRIDE"
        )  # the CUDA wheel has kernels of its own: see client/kernels.cc
    includes = include_flags(torch, cuda_include)
    common = sources_hash(torch)
    # Client and executor must be of one build: the headers that both include, and the torch they are for.
    flags.append(f'-DDEVPROXY_TORCH_BUILD="{common[:32]}"')
    wanted = [name for name in SOURCES if torch.cuda is not None or name != CUDA_EXECUTOR]
    vendor = vendor_flags(torch, cuda_include) if CUDA_EXECUTOR in wanted else []
    made: list[str] = []

    def compile_one(name: str) -> str:
        """All of a library's sources as one: most of a compilation is torch's own headers."""
        paths = [os.path.join(HERE, source) for source in SOURCES[name]]
        product = os.path.join(objects_dir, name.replace(".so", ".o"))
        more = vendor if name in (CUDA_EXECUTOR, CORE) else []
        digest = hashlib.sha256(common.encode() + " ".join([*flags, *more]).encode())
        for path in paths:
            with open(path, "rb") as file:
                digest.update(file.read())
        if not is_current(product, digest.hexdigest()):
            text = "".join(f'#include "{path}"\n' for path in paths)
            command = [compiler, *flags, *includes, *more, "-c", "-x", "c++", "-"]
            make(product, digest.hexdigest(), command, text)
            made.append(os.path.basename(product))
        return product

    with open(os.path.join(folder, ".lock"), "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
            objects = dict(zip(wanted, pool.map(compile_one, wanted), strict=True))
        for name, part in objects.items():
            command = link_command(name, part, torch, folder)
            digest = hashlib.sha256(" ".join(command).encode())
            with open(part + ".stamp", "rb") as file:
                digest.update(file.read())
            product = os.path.join(folder, name)
            if not is_current(product, digest.hexdigest()):
                make(product, digest.hexdigest(), command)
                made.append(name)
    return made


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="devproxy build-torch", description=__doc__)
    parser.add_argument(
        "--python", default=sys.executable, help="the Python whose torch it is for (this one)"
    )
    parser.add_argument(
        "--out",
        required=True,
        help="folder; `devproxy build-torch` knows it",
    )
    parser.add_argument("--cuda-include", default="", help="folder of cuda.h (searched for)")
    options = parser.parse_args(argv)
    try:
        torch = ask_torch(options.python)
        made = build(
            torch, os.path.abspath(options.out), find_cuda_include(options.cuda_include, torch)
        )
    except BuildError as error:
        print(f"devproxy build-torch: {error}", file=sys.stderr)
        return error.code
    where = os.path.join(options.out, torch.build_name)
    print(
        f"devproxy build-torch: torch {torch.version}: {', '.join(made) or 'up to date'} in {where}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
