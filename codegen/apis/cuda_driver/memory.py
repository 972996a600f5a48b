"""cuda.h "Memory Management", "Stream Ordered Memory Allocator", "Unified Addressing".

The client's bidirectional allocator chooses the address and announces it; a driver's allocator never sees the call. The
address survives migration, so a device address is carried as it is.
"""

from codegen.spec import Api, Capture

CHECKED = "2026-11 toolkit 13.0"

# Within the credit an allocation is an announcement; beyond it MEM_CREDIT asks, so out-of-memory is exact.
ALLOC = ("MEM_ALLOC", "MEM_CREDIT")
FREE = ("MEM_FREE", "MEM_CREDIT_RETURN")

cuMemGetInfo_v2 = Api(
    client_sa="memory",
    nonnull=("free", "total"),
    ops=("MEM_INFO",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuMemAlloc_v2 = Api(
    client_sa="memory", nonnull=("dptr",), ops=ALLOC, capture=Capture.UNSAFE, checked=CHECKED
)
cuMemAllocPitch_v2 = Api(
    client_sa="memory",
    nonnull=("dptr", "pPitch"),
    ops=ALLOC,
    capture=Capture.UNSAFE,
    checked=CHECKED,
)
cuMemFree_v2 = Api(client_sa="memory", ops=FREE, capture=Capture.HOOK, checked=CHECKED)
# The header lets pbase and psize be null.
cuMemGetAddressRange_v2 = Api(client_sa="memory", checked=CHECKED)

cuMemcpy = Api(
    client_sa="memory", ops=("COPY",), waits=True, capture=Capture.STREAM, checked=CHECKED
)
cuMemcpyPeer = Api(
    client_sa="memory", ops=("COPY",), waits=True, capture=Capture.STREAM, checked=CHECKED
)
# Pageable memory is copied into chunks before the call returns, so the host-to-device copies need not wait.
cuMemcpyHtoD_v2 = Api(client_sa="memory", ops=("COPY",), capture=Capture.STREAM, checked=CHECKED)
cuMemcpyDtoH_v2 = Api(
    client_sa="memory", ops=("COPY",), waits=True, capture=Capture.STREAM, checked=CHECKED
)
cuMemcpyDtoD_v2 = Api(client_sa="memory", ops=("COPY",), capture=Capture.STREAM, checked=CHECKED)
cuMemcpy2D_v2 = Api(
    client_sa="memory",
    nonnull=("pCopy",),
    ops=("COPY_2D", "COPY", "ARRAY_COPY"),
    waits=True,
    capture=Capture.STREAM,
    checked=CHECKED,
)
cuMemcpy2DUnaligned_v2 = Api(
    client_sa="memory",
    nonnull=("pCopy",),
    ops=("COPY_2D", "COPY", "ARRAY_COPY"),
    waits=True,
    capture=Capture.STREAM,
    checked=CHECKED,
)
cuMemcpy3D_v2 = Api(
    client_sa="memory",
    nonnull=("pCopy",),
    ops=("COPY_2D", "COPY", "ARRAY_COPY"),
    waits=True,
    capture=Capture.STREAM,
    checked=CHECKED,
)
cuMemcpyAsync = Api(client_sa="memory", ops=("COPY",), capture=Capture.NODE, checked=CHECKED)
cuMemcpyPeerAsync = Api(client_sa="memory", ops=("COPY",), capture=Capture.NODE, checked=CHECKED)
cuMemcpyHtoDAsync_v2 = Api(client_sa="memory", ops=("COPY",), capture=Capture.NODE, checked=CHECKED)
cuMemcpyDtoHAsync_v2 = Api(client_sa="memory", ops=("COPY",), capture=Capture.NODE, checked=CHECKED)
cuMemcpyDtoDAsync_v2 = Api(client_sa="memory", ops=("COPY",), capture=Capture.NODE, checked=CHECKED)
cuMemcpy2DAsync_v2 = Api(
    client_sa="memory",
    nonnull=("pCopy",),
    ops=("COPY_2D", "COPY", "ARRAY_COPY"),
    capture=Capture.NODE,
    checked=CHECKED,
)
cuMemcpy3DAsync_v2 = Api(
    client_sa="memory",
    nonnull=("pCopy",),
    ops=("COPY_2D", "COPY", "ARRAY_COPY"),
    capture=Capture.NODE,
    checked=CHECKED,
)
cuMemcpy3DPeer = Api(
    client_sa="memory",
    nonnull=("pCopy",),
    ops=("COPY_2D", "COPY", "ARRAY_COPY"),
    waits=True,
    capture=Capture.STREAM,
    checked=CHECKED,
)
cuMemcpy3DPeerAsync = Api(
    client_sa="memory",
    nonnull=("pCopy",),
    ops=("COPY_2D", "COPY", "ARRAY_COPY"),
    capture=Capture.NODE,
    checked=CHECKED,
)
# A batch is its copies, one after the other, sent when all of them have been checked.
cuMemcpyBatchAsync = Api(
    client_sa="memory",
    nonnull=("dsts", "srcs", "sizes", "attrs", "attrsIdxs"),
    ops=("COPY",),
    capture=Capture.NODE,
    checked=CHECKED,
)
cuMemcpyBatchAsync_v2 = Api(
    client_sa="memory",
    nonnull=("dsts", "srcs", "sizes", "attrs", "attrsIdxs"),
    ops=("COPY",),
    capture=Capture.NODE,
    checked=CHECKED,
)
cuMemcpy3DBatchAsync = Api(
    client_sa="memory",
    nonnull=("opList",),
    ops=("COPY_2D", "COPY", "ARRAY_COPY"),
    capture=Capture.NODE,
    checked=CHECKED,
)
cuMemcpy3DBatchAsync_v2 = Api(
    client_sa="memory",
    nonnull=("opList",),
    ops=("COPY_2D", "COPY", "ARRAY_COPY"),
    capture=Capture.NODE,
    checked=CHECKED,
)
# A memset of device memory is asynchronous to the host also in its plain form (cuda.h, "API synchronization").
cuMemsetD8_v2 = Api(client_sa="memory", ops=("MEMSET",), capture=Capture.NODE, checked=CHECKED)
cuMemsetD16_v2 = Api(client_sa="memory", ops=("MEMSET",), capture=Capture.NODE, checked=CHECKED)
cuMemsetD32_v2 = Api(client_sa="memory", ops=("MEMSET",), capture=Capture.NODE, checked=CHECKED)
cuMemsetD2D8_v2 = Api(client_sa="memory", ops=("MEMSET",), capture=Capture.NODE, checked=CHECKED)
cuMemsetD2D16_v2 = Api(client_sa="memory", ops=("MEMSET",), capture=Capture.NODE, checked=CHECKED)
cuMemsetD2D32_v2 = Api(client_sa="memory", ops=("MEMSET",), capture=Capture.NODE, checked=CHECKED)
cuMemsetD8Async = Api(client_sa="memory", ops=("MEMSET",), capture=Capture.NODE, checked=CHECKED)
cuMemsetD16Async = Api(client_sa="memory", ops=("MEMSET",), capture=Capture.NODE, checked=CHECKED)
cuMemsetD32Async = Api(client_sa="memory", ops=("MEMSET",), capture=Capture.NODE, checked=CHECKED)
cuMemsetD2D8Async = Api(client_sa="memory", ops=("MEMSET",), capture=Capture.NODE, checked=CHECKED)
cuMemsetD2D16Async = Api(client_sa="memory", ops=("MEMSET",), capture=Capture.NODE, checked=CHECKED)
cuMemsetD2D32Async = Api(client_sa="memory", ops=("MEMSET",), capture=Capture.NODE, checked=CHECKED)

cuMemFreeAsync = Api(client_sa="memory", ops=FREE, capture=Capture.NODE, checked=CHECKED)
cuMemAllocAsync = Api(
    client_sa="memory", nonnull=("dptr",), ops=ALLOC, capture=Capture.NODE, checked=CHECKED
)
cuMemPoolTrimTo = Api(
    client_sa="memory", ops=("MEM_CREDIT_RETURN",), capture=Capture.FREE, checked=CHECKED
)
cuMemPoolSetAttribute = Api(client_sa="memory", nonnull=("value",), checked=CHECKED)
cuMemPoolGetAttribute = Api(client_sa="memory", nonnull=("value",), checked=CHECKED)
# A pool is a name for the device's one allocator, with attributes and an account of its own.
cuMemPoolCreate = Api(client_sa="memory", nonnull=("pool", "poolProps"), checked=CHECKED)
cuMemPoolDestroy = Api(client_sa="memory", checked=CHECKED)
cuMemPoolSetAccess = Api(client_sa="memory", nonnull=("map",), checked=CHECKED)
cuMemPoolGetAccess = Api(client_sa="memory", nonnull=("flags", "location"), checked=CHECKED)
cuMemGetDefaultMemPool = Api(client_sa="memory", nonnull=("pool_out", "location"), checked=CHECKED)
cuMemGetMemPool = Api(client_sa="memory", nonnull=("pool", "location"), checked=CHECKED)
cuMemSetMemPool = Api(client_sa="memory", nonnull=("location",), checked=CHECKED)
cuMemAllocFromPoolAsync = Api(
    client_sa="memory", nonnull=("dptr",), ops=ALLOC, capture=Capture.NODE, checked=CHECKED
)

cuPointerGetAttribute = Api(client_sa="memory", nonnull=("data",), checked=CHECKED)
cuPointerGetAttributes = Api(client_sa="memory", nonnull=("attributes", "data"), checked=CHECKED)
# SYNC_MEMOPS, which is all that the header lets be set: of copies none is left to do, of memory sets the waiting.
cuPointerSetAttribute = Api(
    client_sa="memory", nonnull=("value",), waits=True, capture=Capture.HOOK, checked=CHECKED
)
