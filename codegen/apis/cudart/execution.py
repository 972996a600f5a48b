"""cuda_runtime_api.h "Execution Control" and "Interactions with the CUDA Driver API".

A launch enters the context by itself: it needs to know the context in any case.
"""

from codegen.spec import Api

CHECKED = "2026-11 toolkit 13.0 and 12.9"

cudaLaunchKernel = Api(client_sa="cudart.execution", checked=CHECKED)
cudaLaunchKernelExC = Api(client_sa="cudart.execution", nonnull=("config",), checked=CHECKED)
cudaLaunchCooperativeKernel = Api(client_sa="cudart.execution", checked=CHECKED)
cudaFuncSetCacheConfig = Api(client_sa="cudart.execution", enters="context", checked=CHECKED)
cudaFuncGetAttributes = Api(
    client_sa="cudart.execution", enters="context", nonnull=("attr",), checked=CHECKED
)
cudaFuncSetAttribute = Api(client_sa="cudart.execution", enters="context", checked=CHECKED)
cudaFuncGetName = Api(
    client_sa="cudart.execution", enters="context", nonnull=("name",), checked=CHECKED
)
# paramSize may be null.
cudaFuncGetParamInfo = Api(
    client_sa="cudart.execution", enters="context", nonnull=("paramOffset",), checked=CHECKED
)
cudaLaunchHostFunc = Api(
    client_sa="cudart.stream", enters="context", nonnull=("fn",), checked=CHECKED
)
# Without effect since Volta, as cudaDeviceSetSharedMemConfig.
cudaFuncSetSharedMemConfig = Api(client_sa="cudart.execution", enters="context", checked=CHECKED)
# Without effect: the header says so since CUDA 12.
cudaSetDoubleForDevice = Api(client_sa="cudart.execution", nonnull=("d",), checked=CHECKED)
cudaSetDoubleForHost = Api(client_sa="cudart.execution", nonnull=("d",), checked=CHECKED)
cudaGetFuncBySymbol = Api(
    client_sa="cudart.execution", enters="context", nonnull=("functionPtr",), checked=CHECKED
)
cudaGetKernel = Api(
    client_sa="cudart.execution", enters="context", nonnull=("kernelPtr",), checked=CHECKED
)
