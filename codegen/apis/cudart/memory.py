# SPDX-License-Identifier: Apache-2.0
"""cuda_runtime_api.h "Memory Management": linear memory, pinned memory, variables of device code.

An address of the runtime is the driver's. A copy names its direction; cudaMemcpyDefault leaves it to the addresses.
"""

from codegen.spec import Api

cudaMalloc = Api(client_sa="cudart.memory", enters="context", nonnull=("devPtr",))
cudaMallocHost = Api(client_sa="cudart.memory", enters="context", nonnull=("ptr",))
cudaMallocPitch = Api(client_sa="cudart.memory", enters="context", nonnull=("devPtr", "pitch"))
# cudaFree(0) is the usual way to say: initialise the device.
cudaFree = Api(client_sa="cudart.memory", enters="context")
cudaFreeHost = Api(client_sa="cudart.memory", enters="context")
cudaHostAlloc = Api(client_sa="cudart.memory", enters="context", nonnull=("pHost",))
cudaHostRegister = Api(client_sa="cudart.memory", enters="context", nonnull=("ptr",))
cudaHostUnregister = Api(client_sa="cudart.memory", enters="context")
cudaHostGetDevicePointer = Api(client_sa="cudart.memory", enters="context", nonnull=("pDevice",))
cudaMallocManaged = Api(client_sa="cudart.memory", enters="context", nonnull=("devPtr",))
# The plain names have a device's number in 12, a location in 13.
cudaMemAdvise = Api(client_sa="cudart.memory", enters="context")
cudaMemAdvise_v2 = Api(client_sa="cudart.memory", enters="context")
cudaMemPrefetchAsync = Api(client_sa="cudart.memory", enters="context")
cudaMemPrefetchAsync_v2 = Api(client_sa="cudart.memory", enters="context")
cudaMemPrefetchBatchAsync = Api(
    client_sa="cudart.memory",
    enters="context",
    nonnull=("dptrs", "sizes", "prefetchLocs", "prefetchLocIdxs"),
)
cudaMemDiscardBatchAsync = Api(
    client_sa="cudart.memory", enters="context", nonnull=("dptrs", "sizes")
)
cudaMemDiscardAndPrefetchBatchAsync = Api(
    client_sa="cudart.memory",
    enters="context",
    nonnull=("dptrs", "sizes", "prefetchLocs", "prefetchLocIdxs"),
)
cudaMemRangeGetAttribute = Api(client_sa="cudart.memory", enters="context", nonnull=("data",))
cudaMemRangeGetAttributes = Api(
    client_sa="cudart.memory", enters="context", nonnull=("data", "dataSizes", "attributes")
)
cudaHostGetFlags = Api(client_sa="cudart.memory", enters="context", nonnull=("pFlags",))
cudaMalloc3D = Api(client_sa="cudart.memory", enters="context", nonnull=("pitchedDevPtr",))
cudaMemcpy3D = Api(client_sa="cudart.memory", enters="context", nonnull=("p",), waits=True)
cudaMemcpy3DAsync = Api(client_sa="cudart.memory", enters="context", nonnull=("p",))
cudaMemcpy3DPeer = Api(client_sa="cudart.memory", enters="context", nonnull=("p",), waits=True)
cudaMemcpy3DPeerAsync = Api(client_sa="cudart.memory", enters="context", nonnull=("p",))
# CUDA 12 has failIdx, which may be null.
cudaMemcpyBatchAsync = Api(
    client_sa="cudart.memory",
    enters="context",
    nonnull=("dsts", "srcs", "sizes", "attrs", "attrsIdxs"),
)
cudaMemcpy3DBatchAsync = Api(client_sa="cudart.memory", enters="context", nonnull=("opList",))
# Either pointer may be null.
cudaMemGetInfo = Api(client_sa="cudart.memory", enters="context")
cudaMemcpy = Api(client_sa="cudart.memory", enters="context", waits=True)
cudaMemcpyPeer = Api(client_sa="cudart.memory", enters="context", waits=True)
cudaMemcpy2D = Api(client_sa="cudart.memory", enters="context", waits=True)
cudaMemcpyToSymbol = Api(client_sa="cudart.memory", enters="context", waits=True)
cudaMemcpyFromSymbol = Api(client_sa="cudart.memory", enters="context", waits=True)
cudaMemcpyAsync = Api(client_sa="cudart.memory", enters="context")
cudaMemcpyPeerAsync = Api(client_sa="cudart.memory", enters="context")
cudaMemcpy2DAsync = Api(client_sa="cudart.memory", enters="context")
cudaMemcpyToSymbolAsync = Api(client_sa="cudart.memory", enters="context")
cudaMemcpyFromSymbolAsync = Api(client_sa="cudart.memory", enters="context")
cudaMemset = Api(client_sa="cudart.memory", enters="context")
cudaMemset2D = Api(client_sa="cudart.memory", enters="context")
cudaMemset3D = Api(client_sa="cudart.memory", enters="context")
cudaMemsetAsync = Api(client_sa="cudart.memory", enters="context")
cudaMemset2DAsync = Api(client_sa="cudart.memory", enters="context")
cudaMemset3DAsync = Api(client_sa="cudart.memory", enters="context")
cudaGetSymbolAddress = Api(client_sa="cudart.memory", enters="context", nonnull=("devPtr",))
cudaGetSymbolSize = Api(client_sa="cudart.memory", enters="context", nonnull=("size",))
