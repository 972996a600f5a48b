# SPDX-License-Identifier: Apache-2.0
"""cuda.h "Event Management". The client knows where an event was recorded and sees its completion by itself."""

from codegen.spec import Api, Capture

cuEventCreate = Api(
    client_sa="sync", nonnull=("phEvent",), ops=("EVENT_CREATE",), capture=Capture.FREE
)
cuEventRecord = Api(client_sa="sync", ops=("EVENT_RECORD",), capture=Capture.NODE)
cuEventRecordWithFlags = Api(client_sa="sync", ops=("EVENT_RECORD",), capture=Capture.NODE)
cuEventQuery = Api(client_sa="sync", capture=Capture.UNSAFE)
cuEventSynchronize = Api(client_sa="sync", waits=True, capture=Capture.UNSAFE)
cuEventDestroy_v2 = Api(client_sa="sync", ops=("EVENT_DESTROY",), capture=Capture.FREE)
# The server holds the time stamps.
cuEventElapsedTime = Api(
    client_sa="sync", nonnull=("pMilliseconds",), ops=("EVENT_ELAPSED",), capture=Capture.FREE
)
cuEventElapsedTime_v2 = Api(
    client_sa="sync", nonnull=("pMilliseconds",), ops=("EVENT_ELAPSED",), capture=Capture.FREE
)
