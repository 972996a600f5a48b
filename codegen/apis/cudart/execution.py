# SPDX-License-Identifier: Apache-2.0
"""cuda_runtime_api.h "Execution Control" and "Interactions with the CUDA Driver API".

A launch enters the context by itself: it needs to know the context in any case.
"""

from codegen.spec import Api

cudaLaunchKernel = Api(client_sa="cudart.execution")
cudaLaunchKernelExC = Api(client_sa="cudart.execution", nonnull=("config",))
cudaLaunchCooperativeKernel = Api(client_sa="cudart.execution")
cudaFuncSetCacheConfig = Api(client_sa="cudart.execution", enters="context")
cudaFuncGetAttributes = Api(client_sa="cudart.execution", enters="context", nonnull=("attr",))
cudaFuncSetAttribute = Api(client_sa="cudart.execution", enters="context")
cudaFuncGetName = Api(client_sa="cudart.execution", enters="context", nonnull=("name",))
# paramSize may be null.
cudaFuncGetParamInfo = Api(client_sa="cudart.execution", enters="context", nonnull=("paramOffset",))
cudaLaunchHostFunc = Api(client_sa="cudart.stream", enters="context", nonnull=("fn",))
# Without effect since Volta, as cudaDeviceSetSharedMemConfig.
cudaFuncSetSharedMemConfig = Api(client_sa="cudart.execution", enters="context")
# Without effect: the header says so since CUDA 12.
cudaSetDoubleForDevice = Api(client_sa="cudart.execution", nonnull=("d",))
cudaSetDoubleForHost = Api(client_sa="cudart.execution", nonnull=("d",))
cudaGetFuncBySymbol = Api(client_sa="cudart.execution", enters="context", nonnull=("functionPtr",))
cudaGetKernel = Api(client_sa="cudart.execution", enters="context", nonnull=("kernelPtr",))
