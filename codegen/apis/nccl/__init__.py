# SPDX-License-Identifier: Apache-2.0
"""nccl.h: communicators and their operations; the device-side API and one-sided operations are refused."""

from codegen.spec import Api, Library

LIBRARY = Library(
    prefix="nccl",
    soname="libnccl.so.2",
    status="ncclInvalidUsage",
    refused=5,
    invalid=4,  # ncclInvalidArgument
    null_hook="nccl.null_argument",
    reason="devproxy does not carry this function of NCCL: the device-side API, one-sided operations, settings of one operation, parameters",
    # Imported by torch 2.11, declared in a header of NCCL's device API.
    also=(
        "ncclDevCommCreate",
        "ncclDevCommDestroy",
        "ncclGetLsaMultimemDevicePointer",
        "ncclGetPeerDevicePointer",
    ),
)

_START = ("COMM_INIT", "STREAM_CREATE", "STREAM_DESTROY", "COMM_STATE", "MEM_FREE")
_EXCHANGE = (
    *_START,
    *("MEM_CREDIT", "MEM_INFO", "MEM_ALLOC", "MEM_CREDIT_RETURN", "COPY", "COMM_GROUP"),
    "COMM_DESTROY",  # of the one that stands in for a revoked communicator
)

ncclGetVersion = Api(client_sa="nccl", nonnull=("version",), needs_init=False)
ncclGetErrorString = Api(client_sa="nccl", needs_init=False)
ncclGetLastError = Api(client_sa="nccl", needs_init=False)
ncclGetUniqueId = Api(client_sa="nccl", nonnull=("uniqueId",), needs_init=False)

ncclCommInitRank = Api(client_sa="nccl", nonnull=("comm",), ops=_START, waits=True)
ncclCommInitRankConfig = Api(client_sa="nccl", nonnull=("comm",), ops=_START, waits=True)
ncclCommInitRankScalable = Api(
    client_sa="nccl", nonnull=("newcomm", "commIds"), ops=_START, waits=True
)
ncclCommInitAll = Api(client_sa="nccl", nonnull=("comm",), ops=_START, waits=True)
ncclCommSplit = Api(client_sa="nccl", nonnull=("newcomm",), ops=_EXCHANGE, waits=True)
ncclCommShrink = Api(
    client_sa="nccl",
    nonnull=("newcomm", "excludeRanksList"),
    ops=(*_START, "COMM_ABORT"),
    waits=True,
)
ncclCommGetUniqueId = Api(client_sa="nccl", nonnull=("uniqueId",), needs_init=False)
ncclCommGrow = Api(client_sa="nccl", nonnull=("newcomm",), ops=_START, waits=True)
ncclCommRevoke = Api(client_sa="nccl", ops=("COMM_ABORT",))
ncclCommSuspend = Api(client_sa="nccl", needs_init=False)
ncclCommResume = Api(client_sa="nccl", needs_init=False)
ncclCommMemStats = Api(client_sa="nccl", nonnull=("value",), needs_init=False)
ncclCommCount = Api(client_sa="nccl", nonnull=("count",), needs_init=False)
ncclCommCuDevice = Api(client_sa="nccl", nonnull=("device",), needs_init=False)
ncclCommUserRank = Api(client_sa="nccl", nonnull=("rank",), needs_init=False)
ncclCommGetAsyncError = Api(
    client_sa="nccl", nonnull=("asyncError",), ops=("COMM_STATE", "STREAM_DESTROY")
)
ncclCommFinalize = Api(client_sa="nccl", waits=True)
ncclCommDestroy = Api(client_sa="nccl", ops=("COMM_DESTROY",), waits=True)
ncclCommAbort = Api(client_sa="nccl", ops=("COMM_ABORT", "COMM_DESTROY", "STREAM_DESTROY"))
ncclCommRegister = Api(client_sa="nccl", nonnull=("handle",), needs_init=False)
ncclCommDeregister = Api(client_sa="nccl", needs_init=False)
ncclCommWindowRegister = Api(client_sa="nccl", nonnull=("win",), needs_init=False)
ncclCommWindowDeregister = Api(client_sa="nccl", needs_init=False)
ncclWinGetUserPtr = Api(client_sa="nccl", nonnull=("outUserPtr",), needs_init=False)
ncclMemAlloc = Api(
    client_sa="nccl",
    nonnull=("ptr",),
    ops=("MEM_ALLOC", "MEM_CREDIT", "MEM_INFO", "MEM_FREE", "MEM_CREDIT_RETURN"),
)
ncclMemFree = Api(client_sa="nccl", ops=("MEM_FREE",), waits=True)

ncclGroupStart = Api(client_sa="nccl", needs_init=False)
# The operations of one device run on the stream of the first; events order it with the streams of the others.
_ORDER = ("EVENT_CREATE", "EVENT_RECORD", "STREAM_WAIT_EVENT", "EVENT_DESTROY")
ncclGroupEnd = Api(client_sa="nccl", ops=(*_EXCHANGE, *_ORDER), waits=True)
ncclAllReduce = Api(client_sa="nccl", ops=("COMM_GROUP",))
ncclBroadcast = Api(client_sa="nccl", ops=("COMM_GROUP",))
ncclBcast = Api(client_sa="nccl", ops=("COMM_GROUP",))
ncclReduce = Api(client_sa="nccl", ops=("COMM_GROUP",))
ncclAllGather = Api(client_sa="nccl", ops=("COMM_GROUP",))
ncclReduceScatter = Api(client_sa="nccl", ops=("COMM_GROUP",))
ncclAlltoAll = Api(client_sa="nccl", ops=("COMM_GROUP",))
ncclGather = Api(client_sa="nccl", ops=("COMM_GROUP",))
ncclScatter = Api(client_sa="nccl", ops=("COMM_GROUP",))
ncclSend = Api(client_sa="nccl", ops=("COMM_GROUP",))
ncclRecv = Api(client_sa="nccl", ops=("COMM_GROUP",))
ncclRedOpCreatePreMulSum = Api(client_sa="nccl", nonnull=("op", "scalar"), needs_init=False)
ncclRedOpDestroy = Api(client_sa="nccl", needs_init=False)
