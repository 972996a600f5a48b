"""cuda_runtime_api.h "Event Management". An event of the runtime is the driver's."""

from codegen.spec import Api

CHECKED = "2026-11 toolkit 13.0 and 12.9"

cudaEventCreate = Api(
    client_sa="cudart.event", enters="context", nonnull=("event",), checked=CHECKED
)
cudaEventCreateWithFlags = Api(
    client_sa="cudart.event", enters="context", nonnull=("event",), checked=CHECKED
)
cudaEventRecord = Api(client_sa="cudart.event", enters="context", checked=CHECKED)
cudaEventRecordWithFlags = Api(client_sa="cudart.event", enters="context", checked=CHECKED)
cudaEventQuery = Api(client_sa="cudart.event", enters="context", checked=CHECKED)
cudaEventSynchronize = Api(client_sa="cudart.event", enters="context", waits=True, checked=CHECKED)
cudaEventDestroy = Api(client_sa="cudart.event", enters="context", checked=CHECKED)
cudaEventElapsedTime = Api(
    client_sa="cudart.event", enters="context", nonnull=("ms",), checked=CHECKED
)
cudaEventElapsedTime_v2 = Api(
    client_sa="cudart.event", enters="context", nonnull=("ms",), checked=CHECKED
)
