"""cuda.h "Error Handling", "Initialization", "Version Management": what works before cuInit."""

from codegen.spec import Api

CHECKED = "2026-11 toolkit 13.0"

cuGetErrorString = Api(client_sa="context", nonnull=("pStr",), needs_init=False, checked=CHECKED)
cuGetErrorName = Api(client_sa="context", nonnull=("pStr",), needs_init=False, checked=CHECKED)
# Attaches to the servers of the job; the hello goes over the unix socket (wire/attach.h), not the ring.
cuInit = Api(client_sa="context", needs_init=False, checked=CHECKED)
cuDriverGetVersion = Api(
    client_sa="context", nonnull=("driverVersion",), needs_init=False, checked=CHECKED
)
