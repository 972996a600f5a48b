"""cuda.h "Stream Management". A null stream is the legacy default stream, in a _ptsz variant the thread's own.

Queries and waits read the completion counters of the segment; they send nothing.
"""

from codegen.apis.cuda_driver.memory import FREE
from codegen.spec import Api

CHECKED = "2026-11 toolkit 13.0"

cuStreamCreate = Api(
    client_sa="sync", nonnull=("phStream",), ops=("STREAM_CREATE",), checked=CHECKED
)
cuStreamCreateWithPriority = Api(
    client_sa="sync", nonnull=("phStream",), ops=("STREAM_CREATE",), checked=CHECKED
)
cuStreamGetPriority = Api(client_sa="sync", nonnull=("priority",), checked=CHECKED)
cuStreamGetDevice = Api(client_sa="sync", nonnull=("device",), checked=CHECKED)
cuStreamGetFlags = Api(client_sa="sync", nonnull=("flags",), checked=CHECKED)
cuStreamGetId = Api(client_sa="sync", nonnull=("streamId",), checked=CHECKED)
cuStreamGetCtx = Api(client_sa="sync", nonnull=("pctx",), checked=CHECKED)
# Both streams are of one context; every attribute of the header's CUstreamAttrID.
cuStreamCopyAttributes = Api(client_sa="sync", ops=("STREAM_SET_ATTRIBUTE",), checked=CHECKED)
cuStreamGetAttribute = Api(client_sa="sync", nonnull=("value_out",), checked=CHECKED)
# The policy of waiting is the client's own; the others go to the device.
cuStreamSetAttribute = Api(
    client_sa="sync", nonnull=("value",), ops=("STREAM_SET_ATTRIBUTE",), checked=CHECKED
)
cuStreamWaitEvent = Api(client_sa="sync", ops=("STREAM_WAIT_EVENT",), checked=CHECKED)
# The function runs on a thread of the client when the stream reaches it.
cuStreamAddCallback = Api(
    client_sa="sync", nonnull=("callback",), ops=("HOST_FUNC", "HOST_FUNC_DONE"), checked=CHECKED
)
cuStreamQuery = Api(client_sa="sync", checked=CHECKED)
cuStreamSynchronize = Api(client_sa="sync", waits=True, checked=CHECKED)
# With a capture that began in it, its graph goes, and what that allocates.
cuStreamDestroy_v2 = Api(client_sa="sync", ops=("STREAM_DESTROY", *FREE), checked=CHECKED)
# cuda.h lists it under "Execution Control"; it is a command of a stream like cuStreamAddCallback.
cuLaunchHostFunc = Api(
    client_sa="sync", nonnull=("fn",), ops=("HOST_FUNC", "HOST_FUNC_DONE"), checked=CHECKED
)
