"""cuda_runtime_api.h "Peer Device Memory Access"."""

from codegen.spec import Api

CHECKED = "2026-11 toolkit 13.0 and 12.9"

cudaDeviceCanAccessPeer = Api(
    client_sa="cudart.device", enters="driver", nonnull=("canAccessPeer",), checked=CHECKED
)
cudaDeviceEnablePeerAccess = Api(client_sa="cudart.device", enters="context", checked=CHECKED)
cudaDeviceDisablePeerAccess = Api(client_sa="cudart.device", enters="context", checked=CHECKED)
