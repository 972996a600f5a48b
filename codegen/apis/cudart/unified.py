# SPDX-License-Identifier: Apache-2.0
"""cuda_runtime_api.h "Unified Addressing"."""

from codegen.spec import Api

cudaPointerGetAttributes = Api(client_sa="cudart.memory", enters="driver", nonnull=("attributes",))
