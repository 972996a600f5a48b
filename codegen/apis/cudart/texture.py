"""cuda_runtime_api.h, the arrays of "Memory Management", "Texture Object Management", "Surface Object Management".

A cudaArray_t is the driver's CUarray, and the objects are the driver's numbers.
"""

from codegen.spec import Api

CHECKED = "2026-11 toolkit 13.0 and 12.9"

# It only fills a struct.
cudaCreateChannelDesc = Api(client_sa="cudart.memory", checked=CHECKED)

cudaMallocArray = Api(
    client_sa="cudart.texture", enters="context", nonnull=("array", "desc"), checked=CHECKED
)
cudaMalloc3DArray = Api(
    client_sa="cudart.texture", enters="context", nonnull=("array", "desc"), checked=CHECKED
)
# A null array is none to free.
cudaFreeArray = Api(client_sa="cudart.texture", enters="context", waits=True, checked=CHECKED)
# Each of the three may be null.
cudaArrayGetInfo = Api(client_sa="cudart.texture", enters="context", checked=CHECKED)
cudaGetChannelDesc = Api(
    client_sa="cudart.texture", enters="context", nonnull=("desc",), checked=CHECKED
)

cudaMemcpy2DToArray = Api(client_sa="cudart.texture", enters="context", waits=True, checked=CHECKED)
cudaMemcpy2DFromArray = Api(
    client_sa="cudart.texture", enters="context", waits=True, checked=CHECKED
)
cudaMemcpy2DArrayToArray = Api(
    client_sa="cudart.texture", enters="context", waits=True, checked=CHECKED
)
cudaMemcpy2DToArrayAsync = Api(client_sa="cudart.texture", enters="context", checked=CHECKED)
cudaMemcpy2DFromArrayAsync = Api(client_sa="cudart.texture", enters="context", checked=CHECKED)
cudaMemcpyToArray = Api(client_sa="cudart.texture", enters="context", waits=True, checked=CHECKED)
cudaMemcpyFromArray = Api(client_sa="cudart.texture", enters="context", waits=True, checked=CHECKED)
cudaMemcpyToArrayAsync = Api(client_sa="cudart.texture", enters="context", checked=CHECKED)
cudaMemcpyFromArrayAsync = Api(client_sa="cudart.texture", enters="context", checked=CHECKED)

cudaCreateTextureObject = Api(
    client_sa="cudart.texture",
    enters="context",
    nonnull=("pTexObject", "pResDesc", "pTexDesc"),
    checked=CHECKED,
)
cudaDestroyTextureObject = Api(
    client_sa="cudart.texture", enters="context", waits=True, checked=CHECKED
)
cudaGetTextureObjectResourceDesc = Api(
    client_sa="cudart.texture", enters="context", nonnull=("pResDesc",), checked=CHECKED
)
cudaGetTextureObjectTextureDesc = Api(
    client_sa="cudart.texture", enters="context", nonnull=("pTexDesc",), checked=CHECKED
)
cudaGetTextureObjectResourceViewDesc = Api(
    client_sa="cudart.texture", enters="context", nonnull=("pResViewDesc",), checked=CHECKED
)
cudaCreateSurfaceObject = Api(
    client_sa="cudart.texture",
    enters="context",
    nonnull=("pSurfObject", "pResDesc"),
    checked=CHECKED,
)
cudaDestroySurfaceObject = Api(
    client_sa="cudart.texture", enters="context", waits=True, checked=CHECKED
)
cudaGetSurfaceObjectResourceDesc = Api(
    client_sa="cudart.texture", enters="context", nonnull=("pResDesc",), checked=CHECKED
)
