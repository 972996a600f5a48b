# SPDX-License-Identifier: Apache-2.0
"""cuda.h "Primary Context Management", "Context Management", "Peer Context Memory Access".

A context is client state: the current-context stack of each thread and the flags of each context. The server has one
address space per connection and knows no contexts.
"""

from codegen.spec import Api, Capture

# What dies with a context is announced object by object, so that the server's mirror and replay log stay exact.
DESTROYS = (
    "MEM_FREE",
    "STREAM_DESTROY",
    "EVENT_DESTROY",
    "MODULE_UNLOAD",
    "HOST_FREE",
    "ARRAY_DESTROY",
    "TEXTURE_DESTROY",
)
# A server learns of the managed memory that the process has already when the process attaches to it.
ATTACHES = ("HOST_WINDOW", "HOST_ALLOC", "HOST_DEVICE_ADDRESS")

cuDevicePrimaryCtxRetain = Api(
    client_sa="context", nonnull=("pctx",), first=ATTACHES, capture=Capture.FREE
)
cuDevicePrimaryCtxRelease_v2 = Api(client_sa="context", ops=DESTROYS, capture=Capture.FREE)
cuDevicePrimaryCtxSetFlags_v2 = Api(client_sa="context")
cuDevicePrimaryCtxGetState = Api(client_sa="context", nonnull=("flags", "active"))
cuDevicePrimaryCtxReset_v2 = Api(
    client_sa="context", ops=(*DESTROYS, "STREAM_SET_ATTRIBUTE"), waits=True, capture=Capture.FREE
)
cuCtxCreate_v2 = Api(client_sa="context", nonnull=("pctx",), first=ATTACHES, capture=Capture.FREE)
# ctxCreateParams may be null: then it is cuCtxCreate_v2.
cuCtxCreate_v4 = Api(client_sa="context", nonnull=("pctx",), first=ATTACHES, capture=Capture.FREE)
cuCtxDestroy_v2 = Api(client_sa="context", ops=DESTROYS, waits=True, capture=Capture.FREE)
cuCtxPushCurrent_v2 = Api(client_sa="context")
# Programs pop with a null pctx when they do not want the context back; the driver takes that.
cuCtxPopCurrent_v2 = Api(client_sa="context")
cuCtxSetCurrent = Api(client_sa="context")
cuCtxGetCurrent = Api(client_sa="context", nonnull=("pctx",))
cuCtxGetDevice = Api(client_sa="context", nonnull=("device",))
cuCtxGetDevice_v2 = Api(client_sa="context", nonnull=("device",))
cuCtxGetFlags = Api(client_sa="context", nonnull=("flags",))
cuCtxSetFlags = Api(client_sa="context")
cuCtxAttach = Api(client_sa="context", nonnull=("pctx",))
cuCtxDetach = Api(client_sa="context", ops=DESTROYS, waits=True, capture=Capture.FREE)
cuCtxGetSharedMemConfig = Api(client_sa="context", nonnull=("pConfig",))
cuCtxSetSharedMemConfig = Api(client_sa="context")
cuCtxResetPersistingL2Cache = Api(
    client_sa="context", ops=("RESET_PERSISTING_L2",), capture=Capture.FREE
)
cuCtxGetId = Api(client_sa="context", nonnull=("ctxId",))
cuCtxSynchronize = Api(client_sa="context", waits=True, capture=Capture.DEVICE)
cuCtxSynchronize_v2 = Api(client_sa="context", waits=True, capture=Capture.DEVICE)
cuCtxSetLimit = Api(client_sa="context", ops=("SET_LIMIT",), capture=Capture.FREE)
cuCtxGetLimit = Api(
    client_sa="context", nonnull=("pvalue",), ops=("GET_LIMIT",), capture=Capture.FREE
)
cuCtxGetCacheConfig = Api(client_sa="context", nonnull=("pconfig",))
cuCtxSetCacheConfig = Api(client_sa="context")
cuCtxGetApiVersion = Api(client_sa="context", nonnull=("version",))
# The header lets either pointer be null.
cuCtxGetStreamPriorityRange = Api(client_sa="context")
cuCtxEnablePeerAccess = Api(client_sa="context")
cuCtxDisablePeerAccess = Api(client_sa="context")
