# SPDX-License-Identifier: Apache-2.0
"""cuda.h "Stream Management". A null stream is the legacy default stream, in a _ptsz variant the thread's own.

Queries and waits read the completion counters of the segment; they send nothing.
"""

from codegen.apis.cuda_driver.memory import FREE
from codegen.spec import Api, Capture

cuStreamCreate = Api(
    client_sa="sync", nonnull=("phStream",), ops=("STREAM_CREATE",), capture=Capture.FREE
)
cuStreamCreateWithPriority = Api(
    client_sa="sync", nonnull=("phStream",), ops=("STREAM_CREATE",), capture=Capture.FREE
)
cuStreamGetPriority = Api(client_sa="sync", nonnull=("priority",), capture=Capture.FREE)
cuStreamGetDevice = Api(client_sa="sync", nonnull=("device",), capture=Capture.FREE)
cuStreamGetFlags = Api(client_sa="sync", nonnull=("flags",), capture=Capture.FREE)
cuStreamGetId = Api(client_sa="sync", nonnull=("streamId",), capture=Capture.FREE)
cuStreamGetCtx = Api(client_sa="sync", nonnull=("pctx",), capture=Capture.FREE)
# Both streams are of one context; every attribute of the header's CUstreamAttrID.
cuStreamCopyAttributes = Api(client_sa="sync", ops=("STREAM_SET_ATTRIBUTE",), capture=Capture.FREE)
cuStreamGetAttribute = Api(client_sa="sync", nonnull=("value_out",), capture=Capture.FREE)
# The policy of waiting is the client's own; the others go to the device.
cuStreamSetAttribute = Api(
    client_sa="sync", nonnull=("value",), ops=("STREAM_SET_ATTRIBUTE",), capture=Capture.FREE
)
cuStreamWaitEvent = Api(client_sa="sync", ops=("STREAM_WAIT_EVENT",), capture=Capture.NODE)
# The function runs on a thread of the client when the stream reaches it. cuda.h: "not supported with
# cuStreamBeginCapture".
cuStreamAddCallback = Api(
    client_sa="sync",
    nonnull=("callback",),
    ops=("HOST_FUNC", "HOST_FUNC_DONE"),
    capture=Capture.REFUSED,
)
cuStreamQuery = Api(client_sa="sync", capture=Capture.STREAM)
cuStreamSynchronize = Api(client_sa="sync", waits=True, capture=Capture.STREAM)
# With a capture that began in it, its graph goes, and what that allocates.
cuStreamDestroy_v2 = Api(client_sa="sync", ops=("STREAM_DESTROY", *FREE), capture=Capture.HOOK)
# cuda.h lists it under "Execution Control"; it is a command of a stream like cuStreamAddCallback.
cuLaunchHostFunc = Api(
    client_sa="sync", nonnull=("fn",), ops=("HOST_FUNC", "HOST_FUNC_DONE"), capture=Capture.NODE
)
