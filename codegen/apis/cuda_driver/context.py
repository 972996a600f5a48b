"""cuda.h "Primary Context Management", "Context Management", "Peer Context Memory Access".

A context is client state: the current-context stack of each thread and the flags of each context. The server has one
address space per connection and knows no contexts.
"""

from codegen.spec import Api, Capture

CHECKED = "2026-11 toolkit 13.0"

# What dies with a context is announced object by object, so that the server's mirror and replay log stay exact.
DESTROYS = ("MEM_FREE", "STREAM_DESTROY", "EVENT_DESTROY", "MODULE_UNLOAD", "HOST_FREE")

cuDevicePrimaryCtxRetain = Api(client_sa="context", nonnull=("pctx",), checked=CHECKED)
cuDevicePrimaryCtxRelease_v2 = Api(
    client_sa="context", ops=DESTROYS, capture=Capture.FREE, checked=CHECKED
)
cuDevicePrimaryCtxSetFlags_v2 = Api(client_sa="context", checked=CHECKED)
cuDevicePrimaryCtxGetState = Api(client_sa="context", nonnull=("flags", "active"), checked=CHECKED)
cuDevicePrimaryCtxReset_v2 = Api(
    client_sa="context", ops=DESTROYS, waits=True, capture=Capture.FREE, checked=CHECKED
)
cuCtxCreate_v2 = Api(client_sa="context", nonnull=("pctx",), checked=CHECKED)
# ctxCreateParams may be null: then it is cuCtxCreate_v2.
cuCtxCreate_v4 = Api(client_sa="context", nonnull=("pctx",), checked=CHECKED)
cuCtxDestroy_v2 = Api(
    client_sa="context", ops=DESTROYS, waits=True, capture=Capture.FREE, checked=CHECKED
)
cuCtxPushCurrent_v2 = Api(client_sa="context", checked=CHECKED)
# Programs pop with a null pctx when they do not want the context back; the driver takes that.
cuCtxPopCurrent_v2 = Api(client_sa="context", checked=CHECKED)
cuCtxSetCurrent = Api(client_sa="context", checked=CHECKED)
cuCtxGetCurrent = Api(client_sa="context", nonnull=("pctx",), checked=CHECKED)
cuCtxGetDevice = Api(client_sa="context", nonnull=("device",), checked=CHECKED)
cuCtxGetDevice_v2 = Api(client_sa="context", nonnull=("device",), checked=CHECKED)
cuCtxGetFlags = Api(client_sa="context", nonnull=("flags",), checked=CHECKED)
cuCtxSetFlags = Api(client_sa="context", checked=CHECKED)
cuCtxAttach = Api(client_sa="context", nonnull=("pctx",), checked=CHECKED)
cuCtxDetach = Api(
    client_sa="context", ops=DESTROYS, waits=True, capture=Capture.FREE, checked=CHECKED
)
cuCtxGetSharedMemConfig = Api(client_sa="context", nonnull=("pConfig",), checked=CHECKED)
cuCtxSetSharedMemConfig = Api(client_sa="context", checked=CHECKED)
cuCtxResetPersistingL2Cache = Api(
    client_sa="context", ops=("RESET_PERSISTING_L2",), capture=Capture.FREE, checked=CHECKED
)
cuCtxGetId = Api(client_sa="context", nonnull=("ctxId",), checked=CHECKED)
cuCtxSynchronize = Api(client_sa="context", waits=True, capture=Capture.DEVICE, checked=CHECKED)
cuCtxSynchronize_v2 = Api(client_sa="context", waits=True, capture=Capture.DEVICE, checked=CHECKED)
cuCtxSetLimit = Api(client_sa="context", ops=("SET_LIMIT",), capture=Capture.FREE, checked=CHECKED)
cuCtxGetLimit = Api(
    client_sa="context",
    nonnull=("pvalue",),
    ops=("GET_LIMIT",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuCtxGetCacheConfig = Api(client_sa="context", nonnull=("pconfig",), checked=CHECKED)
cuCtxSetCacheConfig = Api(client_sa="context", checked=CHECKED)
cuCtxGetApiVersion = Api(client_sa="context", nonnull=("version",), checked=CHECKED)
# The header lets either pointer be null.
cuCtxGetStreamPriorityRange = Api(client_sa="context", checked=CHECKED)
cuCtxEnablePeerAccess = Api(client_sa="context", checked=CHECKED)
cuCtxDisablePeerAccess = Api(client_sa="context", checked=CHECKED)
