# SPDX-License-Identifier: Apache-2.0
"""cuda_runtime_api.h "Stream Management". A stream of the runtime is the driver's.

What begins or ends a capture is refused with the graphs; asking about a capture is answered by the driver.
"""

from codegen.spec import Api

cudaStreamCreate = Api(client_sa="cudart.stream", enters="context", nonnull=("pStream",))
cudaStreamCreateWithFlags = Api(client_sa="cudart.stream", enters="context", nonnull=("pStream",))
cudaStreamCreateWithPriority = Api(
    client_sa="cudart.stream", enters="context", nonnull=("pStream",)
)
cudaStreamGetPriority = Api(client_sa="cudart.stream", enters="context", nonnull=("priority",))
cudaStreamGetFlags = Api(client_sa="cudart.stream", enters="context", nonnull=("flags",))
cudaStreamGetId = Api(client_sa="cudart.stream", enters="context", nonnull=("streamId",))
cudaStreamGetDevice = Api(client_sa="cudart.stream", enters="context", nonnull=("device",))
# The attributes and their values have the driver's numbers and bytes.
cudaStreamCopyAttributes = Api(client_sa="cudart.stream", enters="context")
cudaStreamGetAttribute = Api(client_sa="cudart.stream", enters="context", nonnull=("value_out",))
cudaStreamSetAttribute = Api(client_sa="cudart.stream", enters="context", nonnull=("value",))
cudaCtxResetPersistingL2Cache = Api(client_sa="cudart.stream", enters="context", waits=True)
cudaStreamDestroy = Api(client_sa="cudart.stream", enters="context")
cudaStreamAttachMemAsync = Api(client_sa="cudart.stream", enters="context")
cudaStreamWaitEvent = Api(client_sa="cudart.stream", enters="context")
cudaStreamAddCallback = Api(client_sa="cudart.stream", enters="context", nonnull=("callback",))
cudaStreamSynchronize = Api(client_sa="cudart.stream", enters="context", waits=True)
cudaStreamQuery = Api(client_sa="cudart.stream", enters="context")
cudaThreadExchangeStreamCaptureMode = Api(
    client_sa="cudart.stream", enters="context", nonnull=("mode",)
)
cudaStreamIsCapturing = Api(
    client_sa="cudart.stream", enters="context", nonnull=("pCaptureStatus",)
)
cudaStreamGetCaptureInfo = Api(
    client_sa="cudart.stream", enters="context", nonnull=("captureStatus_out",)
)
cudaStreamGetCaptureInfo_v2 = Api(
    client_sa="cudart.stream", enters="context", nonnull=("captureStatus_out",)
)
cudaStreamGetCaptureInfo_v3 = Api(
    client_sa="cudart.stream", enters="context", nonnull=("captureStatus_out",)
)
