# SPDX-License-Identifier: Apache-2.0
"""cuda_runtime_api.h "Stream Ordered Memory Allocator"."""

from codegen.spec import Api

cudaMallocAsync = Api(client_sa="cudart.pool", enters="context", nonnull=("devPtr",))
cudaFreeAsync = Api(client_sa="cudart.pool", enters="context")
cudaMemPoolTrimTo = Api(client_sa="cudart.pool", enters="context")
cudaMemPoolSetAttribute = Api(client_sa="cudart.pool", enters="context", nonnull=("value",))
cudaMemPoolGetAttribute = Api(client_sa="cudart.pool", enters="context", nonnull=("value",))
cudaMallocFromPoolAsync = Api(client_sa="cudart.pool", enters="context", nonnull=("ptr",))
cudaMemPoolSetAccess = Api(client_sa="cudart.pool", enters="context", nonnull=("descList",))
cudaMemPoolGetAccess = Api(client_sa="cudart.pool", enters="context", nonnull=("flags", "location"))
cudaMemPoolCreate = Api(client_sa="cudart.pool", enters="context", nonnull=("memPool", "poolProps"))
cudaMemPoolDestroy = Api(client_sa="cudart.pool", enters="context")
cudaMemGetDefaultMemPool = Api(
    client_sa="cudart.pool", enters="context", nonnull=("memPool", "location")
)
cudaMemGetMemPool = Api(client_sa="cudart.pool", enters="context", nonnull=("memPool", "location"))
cudaMemSetMemPool = Api(client_sa="cudart.pool", enters="context", nonnull=("location",))
