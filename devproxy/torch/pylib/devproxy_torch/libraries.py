# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's libraries as torch sees them: cuBLAS, cuDNN, cuSOLVER, MAGMA, NCCL, and what tunes or compiles for them.

None is in this process. Where operators run on a real GPU, the server has them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from devproxy_torch.plugin import ops_run_on_cuda
from devproxy_torch.say import say_once
from devproxy_torch.stand_ins import constant, only_off, refuse

TUNABLE = "torch.cuda.tunable"
_TUNABLE_ON = (
    "PYTORCH_TUNABLEOP_ENABLED"  # torch reads the other PYTORCH_TUNABLEOP_* only where this is 1
)
_TUNABLE_SWITCHES = ("tunableop_enable", "tunableop_tuning_enable", "record_untuned_enable")
_TUNABLE_REFUSED = (
    "get_filename",
    "get_max_tuning_duration",
    "get_max_tuning_iterations",
    "get_results",
    "get_rotating_buffer_size",
    "get_validators",
    "read_file",
    "set_filename",
    "set_max_tuning_duration",
    "set_max_tuning_iterations",
    "set_numerical_check_tolerances",
    "set_rotating_buffer_size",
    "write_file",
    "write_file_on_exit",
)

_NCCL_REFUSED = (
    "all_gather",
    "all_reduce",
    "broadcast",
    "init_rank",
    "reduce_scatter",
    "unique_id",
)

# What the wheel says of these without asking a device is the truth where operators run on a real GPU.
OF_THE_WHEEL = frozenset(
    {
        "_has_cudnn",
        "_has_magma",
        "_cuda_getCompiledVersion",
        "_cuda_getArchFlags",
        "_nccl_version",
        "_nccl_version_suffix",
    }
)


def names(sc: Any) -> dict[str, object]:
    def nccl_version() -> int:
        """As torch.cuda.nccl.version() takes it apart, from NCCL's own number: 22907 is 2.29.7."""
        number = int(sc.nccl_version())
        return number // 10000 << 32 | number % 10000 // 100 << 16 | number % 100

    found: dict[str, object] = {
        "_has_cudnn": False,
        "_has_magma": False,
        "_cuda_clearCublasWorkspaces": constant(None),
        "_cuda_getCurrentBlasHandle": refuse("a cuBLAS handle"),
        "_cuda_getCurrentSolverHandle": refuse("a cuSOLVER handle"),
        "_cuda_get_cudnn_benchmark_limit": lambda: sc.cudnn_benchmark_limit(),
        "_cuda_set_cudnn_benchmark_limit": lambda limit: sc.set_cudnn_benchmark_limit(limit),
        "_cuda_get_conv_benchmark_empty_cache": lambda: sc.conv_benchmark_empties_cache(),
        "_cudnn_set_conv_benchmark_empty_cache": lambda on: sc.set_conv_benchmark_empties_cache(on),
        "_cuda_jiterator_compile_and_launch_kernel": refuse("torch.cuda.jiterator"),
        "_nccl_version": nccl_version,
        "_nccl_version_suffix": constant(b""),
    }
    for verb in ("get", "set", "reset"):
        for lt in ("", "Lt"):
            found[f"_cuda_{verb}Cublas{lt}WorkspaceSize"] = refuse(
                "the size of a cuBLAS workspace",
                "set CUBLAS_WORKSPACE_CONFIG before torch is imported",
            )
    # Operators run in the server, whose torch it would be to tune.
    for name in _TUNABLE_REFUSED:
        found[f"_cuda_tunableop_{name}"] = refuse(TUNABLE)
    for name in _TUNABLE_SWITCHES:
        found[f"_cuda_{name}"] = only_off(TUNABLE)
        found[f"_cuda_{name.replace('enable', 'is_enabled')}"] = constant(False)
    for name in _NCCL_REFUSED:
        found[f"_nccl_{name}"] = refuse(
            "torch.cuda.nccl", "use torch.distributed with the backend 'nccl'"
        )
    return found


def saying_what_is_not_read(cuda_init: Any) -> Callable[[], None]:
    """torch's own variable may be set for all jobs of a machine: unlike torch.cuda.tunable.enable() it is no error."""

    def init() -> None:
        if os.environ.get(_TUNABLE_ON) == "1":
            say_once(
                f"{_TUNABLE_ON}=1 changes nothing: operators run in the server, which does not tune them"
            )
        cuda_init()

    return init


def cudnn_version(number: int) -> tuple[int, int, int]:
    """(major, minor, patch) of CUDNN_VERSION: 9.13.2 is 91302, 8.9.2 was 8902 (cudnn_version.h)."""
    thousands = 10000 if number >= 90000 else 1000
    return number // thousands, number % thousands // 100, number % 100


def complete_preferences(C: ModuleType) -> None:
    """torch.backends.cuda.preferred_linalg_library() and its kin, in a wheel that has none of CUDA's libraries."""

    def completed(name: str, plain: Callable[[Any], None]) -> Callable[[Any], None]:
        def prefer(backend: Any) -> None:
            try:
                plain(backend)
            except RuntimeError as error:
                if "not been compiled with" not in str(error):
                    raise
                say_once(
                    f"{name}({backend.name}) changes nothing: the software GPU has one library"
                )

        return prefer

    for kind in ("linalg", "blas"):
        setter = f"_set_{kind}_preferred_backend"
        if hasattr(C, setter):
            name = f"torch.backends.cuda.preferred_{kind}_library"
            setattr(C, setter, completed(name, getattr(C, setter)))


def complete_cudnn(module: ModuleType) -> None:
    """On the host there is no cuDNN and nothing misses it: nn.LSTM asks, and must not warn."""
    if ops_run_on_cuda():
        return
    setattr(module, "is_acceptable", lambda tensor: False)
