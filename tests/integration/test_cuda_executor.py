# SPDX-License-Identifier: Apache-2.0
"""The executor on CUDA compiles against the headers that every torch wheel carries; no GPU and no CUDA wheel is needed.

Of NVIDIA's math libraries torch's headers want handle types and status codes: stand-ins here. That it links and what it
does is for the CUDA wheels (`make test-cuda-wheel`) and for a GPU (docs/gpu-results.md).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from devproxy.torch import build
from tests.native.test_hal_cuda import cuda_include

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = {
    "cublas_v2.h": "typedef struct A* cublasHandle_t; typedef int cublasStatus_t;"
    " enum { CUBLAS_STATUS_SUCCESS, CUBLAS_STATUS_NOT_INITIALIZED }; typedef int cublasMath_t;",
    "cublasLt.h": "typedef struct B* cublasLtHandle_t;",
    "cusparse.h": "typedef struct C* cusparseHandle_t; typedef int cusparseStatus_t;"
    " inline const char* cusparseGetErrorString(int) { return 0; } enum { CUSPARSE_STATUS_SUCCESS };",
    "cusolverDn.h": "typedef struct D* cusolverDnHandle_t;",
    "cusolver_common.h": "typedef int cusolverStatus_t; enum { CUSOLVER_STATUS_SUCCESS, CUSOLVER_STATUS_EXECUTION_FAILED };",
    "cudss.h": "typedef struct E* cudssHandle_t; typedef int cudssStatus_t; enum { CUDSS_STATUS_SUCCESS };",
}


def test_the_executor_on_cuda_compiles(tmp_path: Path) -> None:
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text("#pragma once\n" + text + "\n")
    torch = build.ask_torch(sys.executable)
    headers = (
        ROOT / "build" / "headers"
    )  # of the CUDA runtime, with crt beside: scripts/cuda_headers.sh
    command = [
        "g++", "-fsyntax-only", *build.CXXFLAGS, "-Werror", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.abi)}",
        '-DDEVPROXY_TORCH_BUILD="test"', "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE",
        *build.include_flags(torch, str(cuda_include())),
        "-isystem", str(headers / "cuda-13"), "-isystem", str(headers / "crt"), "-isystem", str(tmp_path),
        str(ROOT / "devproxy" / "torch" / "executor" / "cuda.cc"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
