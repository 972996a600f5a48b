# SPDX-License-Identifier: Apache-2.0
"""cuda_runtime_api.h "Event Management". An event of the runtime is the driver's."""

from codegen.spec import Api

cudaEventCreate = Api(client_sa="cudart.event", enters="context", nonnull=("event",))
cudaEventCreateWithFlags = Api(client_sa="cudart.event", enters="context", nonnull=("event",))
cudaEventRecord = Api(client_sa="cudart.event", enters="context")
cudaEventRecordWithFlags = Api(client_sa="cudart.event", enters="context")
cudaEventQuery = Api(client_sa="cudart.event", enters="context")
cudaEventSynchronize = Api(client_sa="cudart.event", enters="context", waits=True)
cudaEventDestroy = Api(client_sa="cudart.event", enters="context")
cudaEventElapsedTime = Api(client_sa="cudart.event", enters="context", nonnull=("ms",))
cudaEventElapsedTime_v2 = Api(client_sa="cudart.event", enters="context", nonnull=("ms",))
