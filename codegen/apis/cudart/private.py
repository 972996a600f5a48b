# SPDX-License-Identifier: Apache-2.0
"""What nvcc's output calls: names and types as `nm -D` and the compiler's own host code show them.

None of them records an error: a program that is being loaded has nobody who would ask.
"""

from codegen.spec import Api, Declared

__cudaRegisterFatBinary = Api(client_sa="cudart.registration", records=False)
__cudaRegisterFatBinaryEnd = Api(client_sa="cudart.registration", records=False)
__cudaUnregisterFatBinary = Api(client_sa="cudart.registration", records=False)
__cudaRegisterFunction = Api(client_sa="cudart.registration", records=False)
__cudaRegisterVar = Api(client_sa="cudart.registration", records=False)
__cudaRegisterManagedVar = Api(client_sa="cudart.registration", records=False)
__cudaInitModule = Api(client_sa="cudart.registration", records=False)
__cudaPushCallConfiguration = Api(client_sa="cudart.execution", records=False)
__cudaPopCallConfiguration = Api(client_sa="cudart.execution")
__cudaGetKernel = Api(client_sa="cudart.execution", nonnull=("kernelPtr",))
__cudaLaunchKernel = Api(client_sa="cudart.execution")

FATBIN = ("void **", "fatCubinHandle")
LAUNCH = (
    ("dim3", "gridDim"),
    ("dim3", "blockDim"),
    ("void **", "args"),
    ("size_t", "sharedMem"),
    ("cudaStream_t", "stream"),
)
VARIABLE = (
    ("char *", "deviceAddress"),
    ("const char *", "deviceName"),
    ("int", "ext"),
    ("size_t", "size"),
    ("int", "constant"),
    ("int", "global"),
)

DECLARED: dict[str, Declared] = {
    "__cudaRegisterFatBinary": ("void **", (("void *", "fatCubin"),)),
    "__cudaRegisterFatBinaryEnd": ("void", (FATBIN,)),
    "__cudaUnregisterFatBinary": ("void", (FATBIN,)),
    "__cudaRegisterFunction": (
        "void",
        (
            FATBIN,
            ("const char *", "hostFun"),
            ("char *", "deviceFun"),
            ("const char *", "deviceName"),
            ("int", "thread_limit"),
            ("uint3 *", "tid"),
            ("uint3 *", "bid"),
            ("dim3 *", "bDim"),
            ("dim3 *", "gDim"),
            ("int *", "wSize"),
        ),
    ),
    "__cudaRegisterVar": ("void", (FATBIN, ("char *", "hostVar"), *VARIABLE)),
    "__cudaRegisterManagedVar": (
        "void",
        (FATBIN, ("void **", "hostVarPtrAddress"), *VARIABLE),
    ),
    "__cudaInitModule": ("char", (FATBIN,)),
    "__cudaPushCallConfiguration": (
        "unsigned int",
        (
            ("dim3", "gridDim"),
            ("dim3", "blockDim"),
            ("size_t", "sharedMem"),
            ("struct CUstream_st *", "stream"),
        ),
    ),
    "__cudaPopCallConfiguration": (
        "cudaError_t",
        (
            ("dim3 *", "gridDim"),
            ("dim3 *", "blockDim"),
            ("size_t *", "sharedMem"),
            ("void *", "stream"),
        ),
    ),
    "__cudaGetKernel": (
        "cudaError_t",
        (("cudaKernel_t *", "kernelPtr"), ("const void *", "entryFuncAddr")),
    ),
    "__cudaLaunchKernel": ("cudaError_t", (("cudaKernel_t", "kernel"), *LAUNCH)),
    "__cudaLaunchKernel_ptsz": ("cudaError_t", (("cudaKernel_t", "kernel"), *LAUNCH)),
    "cudaProfilerStart": ("cudaError_t", ()),
    "cudaProfilerStop": ("cudaError_t", ()),
}

CAPTURE_INFO: Declared = (
    "cudaError_t",
    (
        ("cudaStream_t", "stream"),
        ("enum cudaStreamCaptureStatus *", "captureStatus_out"),
        ("unsigned long long *", "id_out"),
    ),
)
# Old forms, which a macro of CUDA 12's header hides behind their successors.
DECLARED_12: dict[str, Declared] = {
    "cudaGetDeviceProperties": (
        "cudaError_t",
        (("struct cudaDeviceProp *", "prop"), ("int", "device")),
    ),
    "cudaStreamGetCaptureInfo": CAPTURE_INFO,
    "cudaStreamGetCaptureInfo_ptsz": CAPTURE_INFO,
}

# Exported by the vendor's library as well.
ALSO = (
    "__cudaRegisterHostVar",
    "__cudaRegisterUnifiedTable",
    "cudaEGLStreamConsumerAcquireFrame",
    "cudaEGLStreamConsumerConnect",
    "cudaEGLStreamConsumerConnectWithFlags",
    "cudaEGLStreamConsumerDisconnect",
    "cudaEGLStreamConsumerReleaseFrame",
    "cudaEGLStreamProducerConnect",
    "cudaEGLStreamProducerDisconnect",
    "cudaEGLStreamProducerPresentFrame",
    "cudaEGLStreamProducerReturnFrame",
    "cudaEventCreateFromEGLSync",
    "cudaGraphicsEGLRegisterImage",
    "cudaGraphicsResourceGetMappedEglFrame",
    "cudaSignalExternalSemaphoresAsync",
    "cudaSignalExternalSemaphoresAsync_ptsz",
    "cudaWaitExternalSemaphoresAsync",
    "cudaWaitExternalSemaphoresAsync_ptsz",
)
ALSO_13 = ("__cudaGetProcAddress",)
