# SPDX-License-Identifier: Apache-2.0
"""cuda_runtime_api.h "Version Management"."""

from codegen.spec import Api

cudaDriverGetVersion = Api(client_sa="cudart.device", nonnull=("driverVersion",))
cudaRuntimeGetVersion = Api(client_sa="cudart.device", nonnull=("runtimeVersion",))
