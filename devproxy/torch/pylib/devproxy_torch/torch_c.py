# SPDX-License-Identifier: Apache-2.0
"""After `torch._C`, and before any other module of torch looks for them: the names of a CUDA build."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from devproxy_torch import (
    c10d,
    copies,
    device,
    graphs,
    libraries,
    memory,
    nvtx,
    plugin,
    pools,
    streams,
)


def complete(module: ModuleType) -> None:
    sc = plugin.load_bindings(os.path.dirname(str(module.__file__)))
    names = {
        **device.names(sc),
        **streams.names(module, sc),
        **graphs.names(sc),
        **pools.names(sc),
        **memory.names(sc),
        **libraries.names(sc),
        **copies.names(),
    }
    names["_cuda_init"] = libraries.saying_what_is_not_read(names["_cuda_init"])
    if plugin.ops_run_on_cuda():
        theirs = libraries.OF_THE_WHEEL
        names = {k: v for k, v in names.items() if k not in theirs or not hasattr(module, k)}
        cudnn = getattr(module, "_cudnn", None)
        if cudnn is not None:  # the library that it would ask is the server's
            cudnn.getRuntimeVersion = lambda: libraries.cudnn_version(sc.facts()["cudnn_runtime"])
    for name, value in names.items():
        setattr(module, name, value)
    setattr(module._dynamo.guards, "_empty_strided_cuda", sc.empty_strided)
    _keep_torchscript_unfused(module)
    if not plugin.ops_run_on_cuda():
        libraries.complete_preferences(module)
    nvtx.complete(module)
    c10d.complete(module, sc)
    # torch.cuda.memory takes the presence of this one as a promise of pluggable allocators.
    if hasattr(module, "_cuda_CUDAAllocator"):
        delattr(module, "_cuda_CUDAAllocator")


def _keep_torchscript_unfused(C: Any) -> None:
    """TorchScript's fuser writes CUDA kernels at a function's third call, and asks NVIDIA's runtime in this process about
    the GPU. Without it each op runs by itself. torch.jit.fuser() puts the switch on, and then back to what it was."""
    C._jit_override_can_fuse_on_gpu(False)
    C._jit_override_can_fuse_on_gpu = lambda on: None
