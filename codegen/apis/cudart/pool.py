"""cuda_runtime_api.h "Stream Ordered Memory Allocator"."""

from codegen.spec import Api

CHECKED = "2026-11 toolkit 13.0 and 12.9"

cudaMallocAsync = Api(
    client_sa="cudart.pool", enters="context", nonnull=("devPtr",), checked=CHECKED
)
cudaFreeAsync = Api(client_sa="cudart.pool", enters="context", checked=CHECKED)
cudaMemPoolTrimTo = Api(client_sa="cudart.pool", enters="context", checked=CHECKED)
cudaMemPoolSetAttribute = Api(
    client_sa="cudart.pool", enters="context", nonnull=("value",), checked=CHECKED
)
cudaMemPoolGetAttribute = Api(
    client_sa="cudart.pool", enters="context", nonnull=("value",), checked=CHECKED
)
cudaMallocFromPoolAsync = Api(
    client_sa="cudart.pool", enters="context", nonnull=("ptr",), checked=CHECKED
)
cudaMemPoolSetAccess = Api(
    client_sa="cudart.pool", enters="context", nonnull=("descList",), checked=CHECKED
)
cudaMemPoolGetAccess = Api(
    client_sa="cudart.pool", enters="context", nonnull=("flags", "location"), checked=CHECKED
)
cudaMemPoolCreate = Api(
    client_sa="cudart.pool", enters="context", nonnull=("memPool", "poolProps"), checked=CHECKED
)
cudaMemPoolDestroy = Api(client_sa="cudart.pool", enters="context", checked=CHECKED)
cudaMemGetDefaultMemPool = Api(
    client_sa="cudart.pool", enters="context", nonnull=("memPool", "location"), checked=CHECKED
)
cudaMemGetMemPool = Api(
    client_sa="cudart.pool", enters="context", nonnull=("memPool", "location"), checked=CHECKED
)
cudaMemSetMemPool = Api(
    client_sa="cudart.pool", enters="context", nonnull=("location",), checked=CHECKED
)
