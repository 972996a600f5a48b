# SPDX-License-Identifier: Apache-2.0
"""cuda_runtime_api.h "Peer Device Memory Access"."""

from codegen.spec import Api

cudaDeviceCanAccessPeer = Api(
    client_sa="cudart.device", enters="driver", nonnull=("canAccessPeer",)
)
cudaDeviceEnablePeerAccess = Api(client_sa="cudart.device", enters="context")
cudaDeviceDisablePeerAccess = Api(client_sa="cudart.device", enters="context")
