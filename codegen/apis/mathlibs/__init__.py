# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's libraries above the driver that PyTorch's CUDA wheel links: refused by name until they are carried.

Each brings a statically linked CUDA runtime of NVIDIA's, which does not run over our driver (design.md); the job gets
these in their place, so that a call says what it is, and not that some driver initialisation failed. Host-only ones stay
genuine: libnvrtc, libnvrtc-builtins, libnvJitLink. Numbers are of the headers of the toolkit's packages for 13.0.
"""

from codegen.spec import Answer, Shim

REASON = "devproxy does not carry {what} to a GPU yet; run the job with --device soft, or without such calls"

SHIMS: dict[str, Shim] = {
    "libcublas.so.13": Shim("cuBLAS", "CUBLAS_STATUS_NOT_SUPPORTED", 15, "cublas_api.h", (13, 1, 1)),
    "libcublasLt.so.13": Shim(
        "cuBLASLt", "CUBLAS_STATUS_NOT_SUPPORTED", 15, "cublas_api.h", (13, 1, 1),
        answers={"cublasLtGetVersion": (Answer.NUMBER, 130101)},
    ),
    # The version is the newest that a wheel was compiled with: torch refuses an older cuDNN than that.
    "libcudnn.so.9": Shim(
        "cuDNN", "CUDNN_STATUS_NOT_SUPPORTED", 3000, "cudnn_graph.h", (9, 26, 0),
        answers={
            "cudnnGetVersion": (Answer.NUMBER, 92600),
            "cudnnGetCudartVersion": (Answer.NUMBER, 13000),
            "cudnnGetProperty": (Answer.PROPERTY, 0),
            "cudnnGetErrorString": (Answer.TEXT, 0),
            "cudnnGetLastErrorString": (Answer.TEXT_INTO, 0),
        },
    ),
    "libcufft.so.12": Shim("cuFFT", "CUFFT_NOT_SUPPORTED", 16, "cufft.h", (12, 0, 0)),
    "libcurand.so.10": Shim(
        "cuRAND", "CURAND_STATUS_INITIALIZATION_FAILED", 203, "curand.h", (10, 4, 0),
        answers={
            "curandGetVersion": (Answer.NUMBER_TO, 10400),
            "curandGetProperty": (Answer.PROPERTY, 0),
        },
        also=(
            "curandCreateGenerator", "curandCreateGeneratorHost", "curandCreatePoissonDistribution",
            "curandDestroyDistribution", "curandDestroyGenerator", "curandGenerate",
            "curandGenerateLogNormal", "curandGenerateLogNormalDouble",
            "curandGenerateLongLong", "curandGenerateNormal", "curandGenerateNormalDouble", "curandGeneratePoisson",
            "curandGeneratePoissonMethod", "curandGenerateSeeds", "curandGenerateUniform",
            "curandGenerateUniformDouble", "curandGetDirectionVectors32", "curandGetDirectionVectors64",
            "curandGetScrambleConstants32", "curandGetScrambleConstants64", "curandSetGeneratorOffset",
            "curandSetGeneratorOrdering", "curandSetPseudoRandomGeneratorSeed", "curandSetQuasiRandomGeneratorDimensions",
            "curandSetStream",
        ),
        node="libcurand.so.10",
    ),
    "libcusolver.so.12": Shim(
        "cuSOLVER", "CUSOLVER_STATUS_NOT_SUPPORTED", 9, "cusolver_common.h", (12, 0, 4)
    ),
    "libcusparse.so.12": Shim(
        "cuSPARSE", "CUSPARSE_STATUS_NOT_SUPPORTED", 10, "cusparse.h", (12, 6, 3),
        answers={"cusparseGetErrorString": (Answer.TEXT, 0)},
    ),
    "libcusparseLt.so.0": Shim(
        "cuSPARSELt", "CUSPARSE_STATUS_NOT_SUPPORTED", 10, "cusparse.h", (0, 8, 1)
    ),
    # A result is two numbers in one register, CUfileError_t{err, cu_err}; a transfer gives bytes, or -err.
    "libcufile.so.0": Shim(
        "cuFile", "CU_FILE_PLATFORM_NOT_SUPPORTED", 5007, "cufile.h", (1, 15, 1),
        returns={"cuFileRead": -5007, "cuFileWrite": -5007},
    ),
    "libcupti.so.13": Shim(
        "CUPTI", "CUPTI_ERROR_NOT_SUPPORTED", 27, "cupti_result.h", (13, 0, 1),
        answers={
            "cuptiGetVersion": (Answer.NUMBER_TO, 130001),
            "cuptiGetResultString": (Answer.TEXT_TO, 0),
        },
    ),
    "libnvshmem_host.so.3": Shim(
        "NVSHMEM", "NVSHMEMX_ERROR_NOT_SUPPORTED", 3, "nvshmemx_error.h", (3, 4, 5),
        returns={
            "nvshmem_malloc": 0, "nvshmem_ptr": 0, "nvshmemx_mc_ptr": 0, "nvshmem_team_n_pes": -1,
            "nvshmemid_init_status": 0,
        },
        node="NVSHMEM",
    ),
}  # fmt: skip
