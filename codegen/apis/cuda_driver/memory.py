# SPDX-License-Identifier: Apache-2.0
"""cuda.h "Memory Management", "Stream Ordered Memory Allocator", "Unified Addressing".

The client's bidirectional allocator chooses the address and announces it; a driver's allocator never sees the call. The
address survives migration, so a device address is carried as it is.
"""

from codegen.spec import Api, Capture

# Within the credit an allocation is an announcement; beyond it MEM_CREDIT asks, so out-of-memory is exact. Where a pool
# has a release threshold, MEM_INFO says from time to time whether the GPU has room for what it holds on to. What it holds on
# to is freed, and its credit given back, where memory runs short.
ALLOC = ("MEM_ALLOC", "MEM_CREDIT", "MEM_INFO", "MEM_FREE", "MEM_CREDIT_RETURN")
FREE = ("MEM_FREE", "MEM_CREDIT_RETURN")

cuMemGetInfo_v2 = Api(
    client_sa="memory", nonnull=("free", "total"), ops=("MEM_INFO",), capture=Capture.FREE
)
cuMemAlloc_v2 = Api(client_sa="memory", nonnull=("dptr",), ops=ALLOC, capture=Capture.UNSAFE)
cuMemAllocPitch_v2 = Api(
    client_sa="memory", nonnull=("dptr", "pPitch"), ops=ALLOC, capture=Capture.UNSAFE
)
cuMemFree_v2 = Api(client_sa="memory", ops=(*FREE, "HOST_FREE"), capture=Capture.HOOK)
# The header lets pbase and psize be null.
cuMemGetAddressRange_v2 = Api(client_sa="memory")

cuMemcpy = Api(client_sa="memory", ops=("COPY",), waits=True, capture=Capture.STREAM)
cuMemcpyPeer = Api(client_sa="memory", ops=("COPY",), waits=True, capture=Capture.STREAM)
# Pageable memory is copied into chunks before the call returns, so the host-to-device copies need not wait.
cuMemcpyHtoD_v2 = Api(client_sa="memory", ops=("COPY",), capture=Capture.STREAM)
cuMemcpyDtoH_v2 = Api(client_sa="memory", ops=("COPY",), waits=True, capture=Capture.STREAM)
cuMemcpyDtoD_v2 = Api(client_sa="memory", ops=("COPY",), capture=Capture.STREAM)
cuMemcpy2D_v2 = Api(
    client_sa="copies",
    nonnull=("pCopy",),
    ops=("COPY_2D", "COPY", "ARRAY_COPY"),
    waits=True,
    capture=Capture.STREAM,
)
cuMemcpy2DUnaligned_v2 = Api(
    client_sa="copies",
    nonnull=("pCopy",),
    ops=("COPY_2D", "COPY", "ARRAY_COPY"),
    waits=True,
    capture=Capture.STREAM,
)
cuMemcpy3D_v2 = Api(
    client_sa="copies",
    nonnull=("pCopy",),
    ops=("COPY_2D", "COPY", "ARRAY_COPY"),
    waits=True,
    capture=Capture.STREAM,
)
cuMemcpyAsync = Api(client_sa="memory", ops=("COPY",), capture=Capture.NODE)
cuMemcpyPeerAsync = Api(client_sa="memory", ops=("COPY",), capture=Capture.NODE)
cuMemcpyHtoDAsync_v2 = Api(client_sa="memory", ops=("COPY",), capture=Capture.NODE)
cuMemcpyDtoHAsync_v2 = Api(client_sa="memory", ops=("COPY",), capture=Capture.NODE)
cuMemcpyDtoDAsync_v2 = Api(client_sa="memory", ops=("COPY",), capture=Capture.NODE)
cuMemcpy2DAsync_v2 = Api(
    client_sa="copies",
    nonnull=("pCopy",),
    ops=("COPY_2D", "COPY", "ARRAY_COPY"),
    capture=Capture.NODE,
)
cuMemcpy3DAsync_v2 = Api(
    client_sa="copies",
    nonnull=("pCopy",),
    ops=("COPY_2D", "COPY", "ARRAY_COPY"),
    capture=Capture.NODE,
)
cuMemcpy3DPeer = Api(
    client_sa="copies",
    nonnull=("pCopy",),
    ops=("COPY_2D", "COPY", "ARRAY_COPY"),
    waits=True,
    capture=Capture.STREAM,
)
cuMemcpy3DPeerAsync = Api(
    client_sa="copies",
    nonnull=("pCopy",),
    ops=("COPY_2D", "COPY", "ARRAY_COPY"),
    capture=Capture.NODE,
)
# A batch is its copies, one after the other, sent when all of them have been checked.
cuMemcpyBatchAsync = Api(
    client_sa="copies",
    nonnull=("dsts", "srcs", "sizes", "attrs", "attrsIdxs"),
    ops=("COPY",),
    capture=Capture.NODE,
)
cuMemcpyBatchAsync_v2 = Api(
    client_sa="copies",
    nonnull=("dsts", "srcs", "sizes", "attrs", "attrsIdxs"),
    ops=("COPY",),
    capture=Capture.NODE,
)
cuMemcpy3DBatchAsync = Api(
    client_sa="copies",
    nonnull=("opList",),
    ops=("COPY_2D", "COPY", "ARRAY_COPY"),
    capture=Capture.NODE,
)
cuMemcpy3DBatchAsync_v2 = Api(
    client_sa="copies",
    nonnull=("opList",),
    ops=("COPY_2D", "COPY", "ARRAY_COPY"),
    capture=Capture.NODE,
)
# A memset of device memory is asynchronous to the host also in its plain form (cuda.h, "API synchronization").
cuMemsetD8_v2 = Api(client_sa="memory", ops=("MEMSET",), capture=Capture.NODE)
cuMemsetD16_v2 = Api(client_sa="memory", ops=("MEMSET",), capture=Capture.NODE)
cuMemsetD32_v2 = Api(client_sa="memory", ops=("MEMSET",), capture=Capture.NODE)
cuMemsetD2D8_v2 = Api(client_sa="memory", ops=("MEMSET",), capture=Capture.NODE)
cuMemsetD2D16_v2 = Api(client_sa="memory", ops=("MEMSET",), capture=Capture.NODE)
cuMemsetD2D32_v2 = Api(client_sa="memory", ops=("MEMSET",), capture=Capture.NODE)
cuMemsetD8Async = Api(client_sa="memory", ops=("MEMSET",), capture=Capture.NODE)
cuMemsetD16Async = Api(client_sa="memory", ops=("MEMSET",), capture=Capture.NODE)
cuMemsetD32Async = Api(client_sa="memory", ops=("MEMSET",), capture=Capture.NODE)
cuMemsetD2D8Async = Api(client_sa="memory", ops=("MEMSET",), capture=Capture.NODE)
cuMemsetD2D16Async = Api(client_sa="memory", ops=("MEMSET",), capture=Capture.NODE)
cuMemsetD2D32Async = Api(client_sa="memory", ops=("MEMSET",), capture=Capture.NODE)

cuMemFreeAsync = Api(client_sa="memory", ops=FREE, capture=Capture.NODE)
cuMemAllocAsync = Api(client_sa="memory", nonnull=("dptr",), ops=ALLOC, capture=Capture.NODE)
cuMemPoolTrimTo = Api(client_sa="memory", ops=FREE, capture=Capture.FREE)
cuMemPoolSetAttribute = Api(client_sa="memory", nonnull=("value",))
cuMemPoolGetAttribute = Api(client_sa="memory", nonnull=("value",))
# A pool is a name for the device's one allocator, with attributes and an account of its own.
cuMemPoolCreate = Api(client_sa="memory", nonnull=("pool", "poolProps"))
cuMemPoolDestroy = Api(client_sa="memory")
cuMemPoolSetAccess = Api(client_sa="memory", nonnull=("map",))
cuMemPoolGetAccess = Api(client_sa="memory", nonnull=("flags", "location"))
cuMemGetDefaultMemPool = Api(client_sa="memory", nonnull=("pool_out", "location"))
cuMemGetMemPool = Api(client_sa="memory", nonnull=("pool", "location"))
cuMemSetMemPool = Api(client_sa="memory", nonnull=("location",))
cuMemAllocFromPoolAsync = Api(
    client_sa="memory", nonnull=("dptr",), ops=ALLOC, capture=Capture.NODE
)

cuPointerGetAttribute = Api(client_sa="memory", nonnull=("data",))
cuPointerGetAttributes = Api(client_sa="memory", nonnull=("attributes", "data"))
# SYNC_MEMOPS, which is all that the header lets be set: of copies none is left to do, of memory sets the waiting.
cuPointerSetAttribute = Api(
    client_sa="memory", nonnull=("value",), waits=True, capture=Capture.HOOK
)
