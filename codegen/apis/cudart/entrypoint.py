# SPDX-License-Identifier: Apache-2.0
"""cuda_runtime_api.h "Driver Entry Point Access"."""

from codegen.spec import Api

# driverStatus may be null.
cudaGetDriverEntryPoint = Api(
    client_sa="cudart.library", enters="driver", nonnull=("symbol", "funcPtr")
)
cudaGetDriverEntryPointByVersion = Api(
    client_sa="cudart.library", enters="driver", nonnull=("symbol", "funcPtr")
)
