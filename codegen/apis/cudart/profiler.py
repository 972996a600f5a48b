# SPDX-License-Identifier: Apache-2.0
"""cuda_profiler_api.h, which the package does not carry: a profiler attaches to the server, so there is nothing to switch."""

from codegen.spec import Api

cudaProfilerStart = Api(client_sa="cudart.device")
cudaProfilerStop = Api(client_sa="cudart.device")
