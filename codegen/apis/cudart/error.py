"""cuda_runtime_api.h "Error Handling": they work before everything else and change no error but their own."""

from codegen.spec import Api

CHECKED = "2026-11 toolkit 13.0 and 12.9"

cudaGetLastError = Api(client_sa="cudart.error", records=False, checked=CHECKED)
cudaPeekAtLastError = Api(client_sa="cudart.error", records=False, checked=CHECKED)
cudaGetErrorName = Api(client_sa="cudart.error", records=False, checked=CHECKED)
cudaGetErrorString = Api(client_sa="cudart.error", records=False, checked=CHECKED)
