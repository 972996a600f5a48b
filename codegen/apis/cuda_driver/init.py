# SPDX-License-Identifier: Apache-2.0
"""cuda.h "Error Handling", "Initialization", "Version Management": what works before cuInit."""

from codegen.spec import Api

cuGetErrorString = Api(client_sa="context", nonnull=("pStr",), needs_init=False)
cuGetErrorName = Api(client_sa="context", nonnull=("pStr",), needs_init=False)
# Attaches to the servers of the job; the hello goes over the unix socket (wire/attach.h), not the ring.
cuInit = Api(client_sa="context", needs_init=False)
cuDriverGetVersion = Api(client_sa="context", nonnull=("driverVersion",), needs_init=False)
