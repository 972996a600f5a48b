# SPDX-License-Identifier: Apache-2.0
"""cuda.h "Memory Management" and "Unified Addressing", managed memory: it lies in the window of pinned memory.

One address for the job, the server and, where the device maps host memory, kernels. Nothing migrates, so advice and
prefetches are remembered by the client and move nothing.
"""

from codegen.spec import Api, Capture

# Every server that the process is attached to is told of it: kernels of all its GPUs may use it.
cuMemAllocManaged = Api(
    client_sa="managed",
    nonnull=("dptr",),
    ops=("HOST_ALLOC", "HOST_DEVICE_ADDRESS", "HOST_WINDOW"),
    capture=Capture.UNSAFE,
)
cuMemAdvise = Api(client_sa="managed")
cuMemAdvise_v2 = Api(client_sa="managed")
cuMemPrefetchAsync = Api(client_sa="managed", capture=Capture.REFUSED)
cuMemPrefetchAsync_v2 = Api(client_sa="managed", capture=Capture.REFUSED)
cuMemPrefetchBatchAsync = Api(
    client_sa="managed",
    nonnull=("dptrs", "sizes", "prefetchLocs", "prefetchLocIdxs"),
    capture=Capture.REFUSED,
)
# Contents that may be lost may also be kept.
cuMemDiscardBatchAsync = Api(
    client_sa="managed", nonnull=("dptrs", "sizes"), capture=Capture.REFUSED
)
cuMemDiscardAndPrefetchBatchAsync = Api(
    client_sa="managed",
    nonnull=("dptrs", "sizes", "prefetchLocs", "prefetchLocIdxs"),
    capture=Capture.REFUSED,
)
cuMemRangeGetAttribute = Api(client_sa="managed", nonnull=("data",))
cuMemRangeGetAttributes = Api(client_sa="managed", nonnull=("data", "dataSizes", "attributes"))
cuStreamAttachMemAsync = Api(client_sa="managed", capture=Capture.REFUSED)
