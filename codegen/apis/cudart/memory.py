"""cuda_runtime_api.h "Memory Management": linear memory, pinned memory, variables of device code.

An address of the runtime is the driver's. A copy names its direction; cudaMemcpyDefault leaves it to the addresses.
"""

from codegen.spec import Api

CHECKED = "2026-11 toolkit 13.0 and 12.9"

cudaMalloc = Api(client_sa="cudart.memory", enters="context", nonnull=("devPtr",), checked=CHECKED)
cudaMallocHost = Api(client_sa="cudart.memory", enters="context", nonnull=("ptr",), checked=CHECKED)
cudaMallocPitch = Api(
    client_sa="cudart.memory", enters="context", nonnull=("devPtr", "pitch"), checked=CHECKED
)
# cudaFree(0) is the usual way to say: initialise the device.
cudaFree = Api(client_sa="cudart.memory", enters="context", checked=CHECKED)
cudaFreeHost = Api(client_sa="cudart.memory", enters="context", checked=CHECKED)
cudaHostAlloc = Api(
    client_sa="cudart.memory", enters="context", nonnull=("pHost",), checked=CHECKED
)
cudaHostRegister = Api(
    client_sa="cudart.memory", enters="context", nonnull=("ptr",), checked=CHECKED
)
cudaHostUnregister = Api(client_sa="cudart.memory", enters="context", checked=CHECKED)
cudaHostGetDevicePointer = Api(
    client_sa="cudart.memory", enters="context", nonnull=("pDevice",), checked=CHECKED
)
cudaMallocManaged = Api(
    client_sa="cudart.memory", enters="context", nonnull=("devPtr",), checked=CHECKED
)
# The plain names have a device's number in 12, a location in 13.
cudaMemAdvise = Api(client_sa="cudart.memory", enters="context", checked=CHECKED)
cudaMemAdvise_v2 = Api(client_sa="cudart.memory", enters="context", checked=CHECKED)
cudaMemPrefetchAsync = Api(client_sa="cudart.memory", enters="context", checked=CHECKED)
cudaMemPrefetchAsync_v2 = Api(client_sa="cudart.memory", enters="context", checked=CHECKED)
cudaMemPrefetchBatchAsync = Api(
    client_sa="cudart.memory",
    enters="context",
    nonnull=("dptrs", "sizes", "prefetchLocs", "prefetchLocIdxs"),
    checked=CHECKED,
)
cudaMemDiscardBatchAsync = Api(
    client_sa="cudart.memory", enters="context", nonnull=("dptrs", "sizes"), checked=CHECKED
)
cudaMemDiscardAndPrefetchBatchAsync = Api(
    client_sa="cudart.memory",
    enters="context",
    nonnull=("dptrs", "sizes", "prefetchLocs", "prefetchLocIdxs"),
    checked=CHECKED,
)
cudaMemRangeGetAttribute = Api(
    client_sa="cudart.memory", enters="context", nonnull=("data",), checked=CHECKED
)
cudaMemRangeGetAttributes = Api(
    client_sa="cudart.memory",
    enters="context",
    nonnull=("data", "dataSizes", "attributes"),
    checked=CHECKED,
)
cudaHostGetFlags = Api(
    client_sa="cudart.memory", enters="context", nonnull=("pFlags",), checked=CHECKED
)
cudaMalloc3D = Api(
    client_sa="cudart.memory", enters="context", nonnull=("pitchedDevPtr",), checked=CHECKED
)
cudaMemcpy3D = Api(
    client_sa="cudart.memory", enters="context", nonnull=("p",), waits=True, checked=CHECKED
)
cudaMemcpy3DAsync = Api(
    client_sa="cudart.memory", enters="context", nonnull=("p",), checked=CHECKED
)
cudaMemcpy3DPeer = Api(
    client_sa="cudart.memory", enters="context", nonnull=("p",), waits=True, checked=CHECKED
)
cudaMemcpy3DPeerAsync = Api(
    client_sa="cudart.memory", enters="context", nonnull=("p",), checked=CHECKED
)
# CUDA 12 has failIdx, which may be null.
cudaMemcpyBatchAsync = Api(
    client_sa="cudart.memory",
    enters="context",
    nonnull=("dsts", "srcs", "sizes", "attrs", "attrsIdxs"),
    checked=CHECKED,
)
cudaMemcpy3DBatchAsync = Api(
    client_sa="cudart.memory", enters="context", nonnull=("opList",), checked=CHECKED
)
# Either pointer may be null.
cudaMemGetInfo = Api(client_sa="cudart.memory", enters="context", checked=CHECKED)
cudaMemcpy = Api(client_sa="cudart.memory", enters="context", waits=True, checked=CHECKED)
cudaMemcpyPeer = Api(client_sa="cudart.memory", enters="context", waits=True, checked=CHECKED)
cudaMemcpy2D = Api(client_sa="cudart.memory", enters="context", waits=True, checked=CHECKED)
cudaMemcpyToSymbol = Api(client_sa="cudart.memory", enters="context", waits=True, checked=CHECKED)
cudaMemcpyFromSymbol = Api(client_sa="cudart.memory", enters="context", waits=True, checked=CHECKED)
cudaMemcpyAsync = Api(client_sa="cudart.memory", enters="context", checked=CHECKED)
cudaMemcpyPeerAsync = Api(client_sa="cudart.memory", enters="context", checked=CHECKED)
cudaMemcpy2DAsync = Api(client_sa="cudart.memory", enters="context", checked=CHECKED)
cudaMemcpyToSymbolAsync = Api(client_sa="cudart.memory", enters="context", checked=CHECKED)
cudaMemcpyFromSymbolAsync = Api(client_sa="cudart.memory", enters="context", checked=CHECKED)
cudaMemset = Api(client_sa="cudart.memory", enters="context", checked=CHECKED)
cudaMemset2D = Api(client_sa="cudart.memory", enters="context", checked=CHECKED)
cudaMemset3D = Api(client_sa="cudart.memory", enters="context", checked=CHECKED)
cudaMemsetAsync = Api(client_sa="cudart.memory", enters="context", checked=CHECKED)
cudaMemset2DAsync = Api(client_sa="cudart.memory", enters="context", checked=CHECKED)
cudaMemset3DAsync = Api(client_sa="cudart.memory", enters="context", checked=CHECKED)
cudaGetSymbolAddress = Api(
    client_sa="cudart.memory", enters="context", nonnull=("devPtr",), checked=CHECKED
)
cudaGetSymbolSize = Api(
    client_sa="cudart.memory", enters="context", nonnull=("size",), checked=CHECKED
)
