# SPDX-License-Identifier: Apache-2.0
"""Functions of the runtime API that are refused by name, by family. What no pattern names is "unchecked"."""

from codegen.apis.cuda_driver.refused import FAMILIES as DRIVER
from codegen.spec import Refused

# title: (regular expression over the whole symbol without its version and thread suffix, Refused)
FAMILIES: dict[str, tuple[str, Refused]] = {
    "managed variables": (
        r"cudaLibraryGetManaged",
        Refused(
            "a driver places a managed variable in the device-proxy server's process, where the job cannot reach it;"
            " use cudaMallocManaged"
        ),
    ),
    "inter-process handles": (
        r"cudaIpc\w+|cudaMemPool(Export|Import)\w+",
        DRIVER["inter-process handles"][1],
    ),
    "graphics interop": (
        r"cudaGL\w+|cudaGraphics\w+|cudaEGL\w+|cudaVDPAU\w+|cudaEventCreateFromEGLSync"
        r"|cudaDeviceGetNvSciSyncAttributes",
        DRIVER["graphics interop"][1],
    ),
    "external memory and semaphores": (
        r"cudaImportExternal\w+|cudaExternalMemory\w+|cudaDestroyExternal\w+|cuda(Signal|Wait)ExternalSemaphores\w*",
        DRIVER["external memory and semaphores"][1],
    ),
    "graph external semaphores": (
        r"cudaGraph(Add|Exec)?ExternalSemaphores\w*",
        DRIVER["graph external semaphores"][1],
    ),
    "conditional graph nodes": (
        r"cudaGraphConditional\w*",
        DRIVER["conditional graph nodes"][1],
    ),
    "runs between arrays": (
        r"cudaMemcpyArrayToArray",
        Refused("a run of bytes over the ends of two arrays' rows; use cudaMemcpy2DArrayToArray"),
    ),
    "textures and arrays": (
        r"cuda\w*Mipmapped\w*|cuda\w*Array\w*|cuda\w*TextureObject\w*|cuda\w*SurfaceObject\w*|cudaGetChannelDesc"
        r"|cudaDeviceGetTexture1DLinearMaxWidth",
        DRIVER["textures and arrays"][1],
    ),
    "cooperative launches": (
        r"cudaLaunchCooperativeKernelMultiDevice",
        Refused("removed in CUDA 13: launch one cooperative kernel per device"),
    ),
    "async notifications": (
        r"cudaDevice(Register|Unregister)AsyncNotification",
        Refused(
            "a driver tells of its memory budget the process that owns the memory, which is the device-proxy server;"
            " ask cudaMemGetInfo"
        ),
    ),
    "GPUDirect RDMA": (
        r"cudaDeviceFlushGPUDirectRDMAWrites",
        DRIVER["GPUDirect RDMA"][1],
    ),
    "logs": (r"cudaLogs\w+", DRIVER["core dumps and logs"][1]),
    "private tables": (
        r"cudaGetExportTable|__cuda\w+",
        Refused("an undocumented entry point of NVIDIA's own libraries"),
    ),
    "valid devices": (
        r"cudaSetValidDevices",
        Refused("choose a device by cudaSetDevice or CUDA_VISIBLE_DEVICES"),
    ),
}
