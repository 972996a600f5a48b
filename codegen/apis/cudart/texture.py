"""cuda_runtime_api.h "Texture Object Management"."""

from codegen.spec import Api

CHECKED = "2026-11 toolkit 13.0 and 12.9"

# It only fills a struct.
cudaCreateChannelDesc = Api(client_sa="cudart.memory", checked=CHECKED)
