"""cuda_runtime_api.h "Stream Management". A stream of the runtime is the driver's.

What begins or ends a capture is refused with the graphs; asking about a capture is answered by the driver.
"""

from codegen.spec import Api

CHECKED = "2026-11 toolkit 13.0 and 12.9"

cudaStreamCreate = Api(
    client_sa="cudart.stream", enters="context", nonnull=("pStream",), checked=CHECKED
)
cudaStreamCreateWithFlags = Api(
    client_sa="cudart.stream", enters="context", nonnull=("pStream",), checked=CHECKED
)
cudaStreamCreateWithPriority = Api(
    client_sa="cudart.stream", enters="context", nonnull=("pStream",), checked=CHECKED
)
cudaStreamGetPriority = Api(
    client_sa="cudart.stream", enters="context", nonnull=("priority",), checked=CHECKED
)
cudaStreamGetFlags = Api(
    client_sa="cudart.stream", enters="context", nonnull=("flags",), checked=CHECKED
)
cudaStreamGetId = Api(
    client_sa="cudart.stream", enters="context", nonnull=("streamId",), checked=CHECKED
)
cudaStreamGetDevice = Api(
    client_sa="cudart.stream", enters="context", nonnull=("device",), checked=CHECKED
)
# The attributes and their values have the driver's numbers and bytes.
cudaStreamCopyAttributes = Api(client_sa="cudart.stream", enters="context", checked=CHECKED)
cudaStreamGetAttribute = Api(
    client_sa="cudart.stream", enters="context", nonnull=("value_out",), checked=CHECKED
)
cudaStreamSetAttribute = Api(
    client_sa="cudart.stream", enters="context", nonnull=("value",), checked=CHECKED
)
cudaCtxResetPersistingL2Cache = Api(
    client_sa="cudart.stream", enters="context", waits=True, checked=CHECKED
)
cudaStreamDestroy = Api(client_sa="cudart.stream", enters="context", checked=CHECKED)
cudaStreamAttachMemAsync = Api(client_sa="cudart.stream", enters="context", checked=CHECKED)
cudaStreamWaitEvent = Api(client_sa="cudart.stream", enters="context", checked=CHECKED)
cudaStreamAddCallback = Api(
    client_sa="cudart.stream", enters="context", nonnull=("callback",), checked=CHECKED
)
cudaStreamSynchronize = Api(
    client_sa="cudart.stream", enters="context", waits=True, checked=CHECKED
)
cudaStreamQuery = Api(client_sa="cudart.stream", enters="context", checked=CHECKED)
cudaThreadExchangeStreamCaptureMode = Api(
    client_sa="cudart.stream", enters="context", nonnull=("mode",), checked=CHECKED
)
cudaStreamIsCapturing = Api(
    client_sa="cudart.stream", enters="context", nonnull=("pCaptureStatus",), checked=CHECKED
)
cudaStreamGetCaptureInfo = Api(
    client_sa="cudart.stream", enters="context", nonnull=("captureStatus_out",), checked=CHECKED
)
cudaStreamGetCaptureInfo_v2 = Api(
    client_sa="cudart.stream", enters="context", nonnull=("captureStatus_out",), checked=CHECKED
)
cudaStreamGetCaptureInfo_v3 = Api(
    client_sa="cudart.stream", enters="context", nonnull=("captureStatus_out",), checked=CHECKED
)
