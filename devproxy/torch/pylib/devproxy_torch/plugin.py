# SPDX-License-Identifier: Apache-2.0
"""Which build of the plugin this process takes, where it lies, and how it is loaded."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any

CORE = "libdevproxy_torch.so"
BINDINGS = "_devproxy_torch"
CLIENT_SHIM_MARK = "cuInit"  # a process with the shim preloaded has this symbol globally


def is_real_gpu() -> bool:
    """Is there a real GPU behind the server?"""
    env = os.environ
    return env.get("DEVPROXY_DEVICE") == "cuda" and env.get("DEVPROXY_CUDA_EXECUTOR") != "host"


def ops_run_on_cuda() -> bool:
    """As client/executor.cc decides: so it is, or tests try the client as it is there."""
    return is_real_gpu() or os.environ.get("DEVPROXY_TORCH_OPS") == "cuda"


def is_cuda_wheel(torch_dir: str) -> bool:
    return os.path.exists(os.path.join(torch_dir, "lib", "libtorch_cuda.so"))


def shim_is_loaded() -> bool:
    return hasattr(ctypes.CDLL(None), CLIENT_SHIM_MARK)


def is_for(torch: ModuleSpec | None) -> bool:
    """Not for torch's CPU build where there is a real GPU: natively it would not see that either. Nor where the job was
    told to use devproxy's CUDA runtime alone (DEVPROXY_TORCH=cudart), below which the wheel's own kernels run."""
    if torch is None or torch.origin is None:
        return False
    if not is_real_gpu():
        return True
    return os.environ.get("DEVPROXY_TORCH") != "cudart" and is_cuda_wheel(
        os.path.dirname(torch.origin)
    )


def plugin_dir(torch_dir: str) -> str:
    """Folder of the plugin built for that torch. ImportError, with the remedy, where there is none."""
    with open(os.path.join(torch_dir, "version.py"), encoding="utf-8") as file:
        text = file.read()
    version = text.split("__version__ = '", 1)[-1].split("'", 1)[0]
    minor = ".".join(version.split(".")[:2])
    here = os.path.dirname(os.path.abspath(__file__))
    root = os.path.abspath(os.path.join(here, "..", "..", "..", ".."))
    lib = os.environ.get("DEVPROXY_LIB") or os.path.join(root, "build", "lib")
    # The CUDA wheel needs the build that overrides its kernels; both kinds may be installed on one machine.
    kind = "-cuda" if is_cuda_wheel(torch_dir) else ""
    folder = os.path.join(lib, f"torch-{minor}{kind}")
    if not os.path.isfile(os.path.join(folder, CORE)):
        raise ImportError(
            f"devproxy's plugin for torch {version} is not in {folder}; build it: "
            f"devproxy build-torch --python {sys.executable}"
        )
    return folder


def load_core(spec: ModuleSpec) -> None:
    """Before torch's C++ side is made, which asks for its CUDA hooks then."""
    torch_dir = os.path.dirname(str(spec.origin))
    lib = os.path.join(torch_dir, "lib")
    # torch's own order: its helper with the OpenMP runtime first, globally, then what the core is linked to.
    for name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(os.path.join(lib, name), ctypes.RTLD_GLOBAL)
    # The ordinary CUDA wheel has CUDA kernels, hooks and a device guard of its own. They register themselves when this
    # library is loaded; the plugin's, loaded after it, take their places, so that nothing reaches NVIDIA's runtime.
    theirs = os.path.join(lib, "libtorch_cuda.so")
    if os.path.exists(theirs):
        ctypes.CDLL(theirs, ctypes.RTLD_GLOBAL)
        if not ops_run_on_cuda():
            # torch's own Triton versions of a few ops (bmm) are machine code of a real chip; the ATen ones take their place.
            os.environ.setdefault("TORCH_DISABLE_NATIVE_JIT", "1")
    ctypes.CDLL(os.path.join(plugin_dir(torch_dir), CORE), ctypes.RTLD_GLOBAL)


def load_bindings(torch_dir: str) -> Any:
    folder = plugin_dir(torch_dir)
    names = [n for n in sorted(os.listdir(folder)) if n.startswith(BINDINGS) and n.endswith(".so")]
    if not names:
        raise ImportError(f"{BINDINGS}*.so is missing in {folder}; build it: devproxy build-torch")
    spec = importlib.util.spec_from_file_location(BINDINGS, os.path.join(folder, names[0]))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[BINDINGS] = module
    return module


def bindings() -> Any:
    """What load_bindings() returned: it has run before any other module of torch."""
    return sys.modules[BINDINGS]
