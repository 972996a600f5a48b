"""cuda_profiler_api.h, which the package does not carry: a profiler attaches to the server, so there is nothing to switch."""

from codegen.spec import Api

CHECKED = "2026-11 toolkit 13.0 and 12.9"

cudaProfilerStart = Api(client_sa="cudart.device", checked=CHECKED)
cudaProfilerStop = Api(client_sa="cudart.device", checked=CHECKED)
