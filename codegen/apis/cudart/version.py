"""cuda_runtime_api.h "Version Management"."""

from codegen.spec import Api

CHECKED = "2026-11 toolkit 13.0 and 12.9"

cudaDriverGetVersion = Api(client_sa="cudart.device", nonnull=("driverVersion",), checked=CHECKED)
cudaRuntimeGetVersion = Api(client_sa="cudart.device", nonnull=("runtimeVersion",), checked=CHECKED)
