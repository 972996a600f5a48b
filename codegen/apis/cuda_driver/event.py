"""cuda.h "Event Management". The client knows where an event was recorded and sees its completion by itself."""

from codegen.spec import Api, Capture

CHECKED = "2026-11 toolkit 13.0"

cuEventCreate = Api(
    client_sa="sync",
    nonnull=("phEvent",),
    ops=("EVENT_CREATE",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuEventRecord = Api(client_sa="sync", ops=("EVENT_RECORD",), capture=Capture.NODE, checked=CHECKED)
cuEventRecordWithFlags = Api(
    client_sa="sync", ops=("EVENT_RECORD",), capture=Capture.NODE, checked=CHECKED
)
cuEventQuery = Api(client_sa="sync", capture=Capture.UNSAFE, checked=CHECKED)
cuEventSynchronize = Api(client_sa="sync", waits=True, capture=Capture.UNSAFE, checked=CHECKED)
cuEventDestroy_v2 = Api(
    client_sa="sync", ops=("EVENT_DESTROY",), capture=Capture.FREE, checked=CHECKED
)
# The server holds the time stamps.
cuEventElapsedTime = Api(
    client_sa="sync",
    nonnull=("pMilliseconds",),
    ops=("EVENT_ELAPSED",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuEventElapsedTime_v2 = Api(
    client_sa="sync",
    nonnull=("pMilliseconds",),
    ops=("EVENT_ELAPSED",),
    capture=Capture.FREE,
    checked=CHECKED,
)
