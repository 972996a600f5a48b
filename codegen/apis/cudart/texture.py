# SPDX-License-Identifier: Apache-2.0
"""cuda_runtime_api.h, the arrays of "Memory Management", "Texture Object Management", "Surface Object Management".

A cudaArray_t is the driver's CUarray, and the objects are the driver's numbers.
"""

from codegen.spec import Api

# It only fills a struct.
cudaCreateChannelDesc = Api(client_sa="cudart.memory")

cudaMallocArray = Api(client_sa="cudart.texture", enters="context", nonnull=("array", "desc"))
cudaMalloc3DArray = Api(client_sa="cudart.texture", enters="context", nonnull=("array", "desc"))
# A null array is none to free.
cudaFreeArray = Api(client_sa="cudart.texture", enters="context", waits=True)
# Each of the three may be null.
cudaArrayGetInfo = Api(client_sa="cudart.texture", enters="context")
cudaGetChannelDesc = Api(client_sa="cudart.texture", enters="context", nonnull=("desc",))

cudaMemcpy2DToArray = Api(client_sa="cudart.texture", enters="context", waits=True)
cudaMemcpy2DFromArray = Api(client_sa="cudart.texture", enters="context", waits=True)
cudaMemcpy2DArrayToArray = Api(client_sa="cudart.texture", enters="context", waits=True)
cudaMemcpy2DToArrayAsync = Api(client_sa="cudart.texture", enters="context")
cudaMemcpy2DFromArrayAsync = Api(client_sa="cudart.texture", enters="context")
cudaMemcpyToArray = Api(client_sa="cudart.texture", enters="context", waits=True)
cudaMemcpyFromArray = Api(client_sa="cudart.texture", enters="context", waits=True)
cudaMemcpyToArrayAsync = Api(client_sa="cudart.texture", enters="context")
cudaMemcpyFromArrayAsync = Api(client_sa="cudart.texture", enters="context")

cudaCreateTextureObject = Api(
    client_sa="cudart.texture", enters="context", nonnull=("pTexObject", "pResDesc", "pTexDesc")
)
cudaDestroyTextureObject = Api(client_sa="cudart.texture", enters="context", waits=True)
cudaGetTextureObjectResourceDesc = Api(
    client_sa="cudart.texture", enters="context", nonnull=("pResDesc",)
)
cudaGetTextureObjectTextureDesc = Api(
    client_sa="cudart.texture", enters="context", nonnull=("pTexDesc",)
)
cudaGetTextureObjectResourceViewDesc = Api(
    client_sa="cudart.texture", enters="context", nonnull=("pResViewDesc",)
)
cudaCreateSurfaceObject = Api(
    client_sa="cudart.texture", enters="context", nonnull=("pSurfObject", "pResDesc")
)
cudaDestroySurfaceObject = Api(client_sa="cudart.texture", enters="context", waits=True)
cudaGetSurfaceObjectResourceDesc = Api(
    client_sa="cudart.texture", enters="context", nonnull=("pResDesc",)
)
