# SPDX-License-Identifier: Apache-2.0
"""cuda_runtime_api.h "Error Handling": they work before everything else and change no error but their own."""

from codegen.spec import Api

cudaGetLastError = Api(client_sa="cudart.error", records=False)
cudaPeekAtLastError = Api(client_sa="cudart.error", records=False)
cudaGetErrorName = Api(client_sa="cudart.error", records=False)
cudaGetErrorString = Api(client_sa="cudart.error", records=False)
