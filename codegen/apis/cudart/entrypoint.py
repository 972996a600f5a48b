"""cuda_runtime_api.h "Driver Entry Point Access"."""

from codegen.spec import Api

CHECKED = "2026-11 toolkit 13.0 and 12.9"

# driverStatus may be null.
cudaGetDriverEntryPoint = Api(
    client_sa="cudart.library", enters="driver", nonnull=("symbol", "funcPtr"), checked=CHECKED
)
cudaGetDriverEntryPointByVersion = Api(
    client_sa="cudart.library", enters="driver", nonnull=("symbol", "funcPtr"), checked=CHECKED
)
