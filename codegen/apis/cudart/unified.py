"""cuda_runtime_api.h "Unified Addressing"."""

from codegen.spec import Api

CHECKED = "2026-11 toolkit 13.0 and 12.9"

cudaPointerGetAttributes = Api(
    client_sa="cudart.memory", enters="driver", nonnull=("attributes",), checked=CHECKED
)
