# SPDX-License-Identifier: Apache-2.0
"""What is refused by family, with the reason that the job and docs/support.md show; the first match counts.

A symbol that has no Api entry and is in no family is refused as "unchecked".
"""

from codegen.spec import Refused

# title: (regular expression over the whole symbol without its version and thread suffix, Refused)
FAMILIES: dict[str, tuple[str, Refused]] = {
    "managed variables": (
        r"cuLibraryGetManaged",
        Refused(
            "a driver places a managed variable in the device-proxy server's process, where the job cannot reach it;"
            " use cuMemAllocManaged"
        ),
    ),
    "inter-process handles": (
        r"cuIpc\w+|cuMemPool(Export|Import)\w+|cuMem(Export|Import)\w+",
        Refused(
            "memory and events are not shared between jobs or processes through CUDA IPC handles"
        ),
    ),
    "graphics interop": (
        r"cuGL\w+|cuWGL\w+|cuEGL\w+|cuVDPAU\w+|cuGraphics\w+|cuEventCreateFromEGLSync|cuEventCreateFromNVNSync"
        r"|cuD3D\w+|cuNv\w+|cuDeviceGetNvSciSyncAttributes|cuDeviceGetLuid",
        Refused("graphics interoperation needs the display driver in the job process"),
    ),
    "green contexts": (
        r"cuGreenCtx\w+|cuDevResource\w+|cuDevSm\w+|cuCtxFromGreenCtx|cuCtxGetDevResource|cuDeviceGetDevResource"
        r"|cuStreamGetGreenCtx|cuStreamGetDevResource|cuCtxRecordEvent|cuCtxWaitEvent",
        Refused("green contexts split a GPU, which the device-proxy server does by itself"),
    ),
    "MPS and MIG": (
        r"cu\w*ExecAffinity\w*|cu\w*Mps\w*|cu\w*Mig\w*",
        Refused(
            "MPS and MIG partition a GPU under the server; devproxy shares a GPU by its own means"
        ),
    ),
    "checkpoint": (
        r"cuCheckpoint\w+",
        Refused(
            "devproxy checkpoints whole jobs; the state of one process in the driver is not enough"
        ),
    ),
    "graph memory operations": (
        r"cuGraph(Add|Exec)?BatchMemOpNode\w*",
        Refused("waiting on device memory from a graph is not supported yet; use events"),
    ),
    "graph external semaphores": (
        r"cuGraph(Add|Exec)?ExternalSemaphores\w*",
        Refused("semaphores of other APIs are not known to the device-proxy server"),
    ),
    "conditional graph nodes": (
        r"cuGraphConditional\w*",
        Refused(
            "a conditional node's value lives on the device; decide on the host which graph to launch"
        ),
    ),
    "textures and arrays": (
        r"cuArray\w+|cuMipmappedArray\w+|cuTex\w+|cuSurf\w+|cuModuleGet(Tex|Surf)Ref|cuParamSetTexRef|cuMemMapArray\w*"
        r"|cuMemcpy(AtoA|AtoD|AtoH|DtoA|HtoA)\w*|cuDeviceGetTexture1DLinearMaxWidth",
        Refused(
            "mipmapped, sparse and planar arrays and texture references are not supported yet; use arrays and objects"
        ),
    ),
    "virtual memory management": (
        r"cuMemAddress\w+|cuMemCreate|cuMemMap|cuMemUnmap|cuMemRelease|cuMemSetAccess|cuMemGetAccess"
        r"|cuMemGetAllocation\w+|cuMemRetainAllocationHandle|cuMemGetHandleForAddressRange",
        Refused("device address ranges are this job's own and are not handed to other libraries"),
    ),
    "multicast": (r"cuMulticast\w+", Refused("multicast objects need peer GPUs under one driver")),
    "tensor maps": (r"cuTensorMap\w+", Refused("only tiled and im2col tensor maps are encoded")),
    "external memory and semaphores": (
        r"cuImportExternal\w+|cuExternal\w+|cuDestroyExternal\w+|cuSignalExternal\w+|cuWaitExternal\w+",
        Refused("memory and semaphores of other APIs are not known to the device-proxy server"),
    ),
    "stream memory operations": (
        r"cuStreamWaitValue\d+|cuStreamWriteValue\d+|cuStreamBatchMemOp",
        Refused("waiting on device memory from a stream is not supported yet; use events"),
    ),
    "decompression": (
        r"cuMemBatchDecompressAsync",
        Refused(
            "work for the device's decompression engine is not passed on yet; decompress in a kernel or on the host"
        ),
    ),
    "linker": (
        r"cuLink\w+",
        Refused("run-time linking needs NVIDIA's compiler; link before loading, or use nvJitLink"),
    ),
    "core dumps and logs": (
        r"cuCoredump\w+|cuLogs\w+",
        Refused(
            "the driver's core dumps and logs belong to the device-proxy server, not to the job"
        ),
    ),
    "async notifications": (
        r"cuDevice(Register|Unregister)AsyncNotification",
        Refused(
            "a driver tells of its memory budget the process that owns the memory, which is the device-proxy server;"
            " ask cuMemGetInfo"
        ),
    ),
    "GPUDirect RDMA": (
        r"cuFlushGPUDirectRDMAWrites",
        Refused(
            "no other device can write to the job's device memory, whose addresses its own kernel drivers do not know"
            " (attribute GPU_DIRECT_RDMA_SUPPORTED is 0); receive into host memory and copy"
        ),
    ),
    "profiler": (
        r"cuProfiler\w+",
        Refused("NVIDIA's profiler attaches to the device-proxy server, not to the job"),
    ),
    "cooperative launches": (
        r"cuLaunchCooperative\w+",
        Refused("a launch on several devices at once needs them under one driver"),
    ),
    "launches of CUDA 3": (
        r"cuParamSet\w+|cuLaunch|cuLaunchGrid(Async)?|cuFuncSet(BlockShape|SharedSize|SharedMemConfig)",
        Refused("replaced in CUDA 4: use cuLaunchKernel"),
    ),
}
