"""cuda.h, the arrays of "Memory Management", "Texture Object Management" and "Surface Object Management".

An array is a virtual handle with a shape; its memory is the device's. A texture or surface object is the number that the
device gave, since kernels find it in parameters that nobody looks into: a restore makes the same one again or is refused.
"""

from codegen.spec import Api, Capture

CHECKED = "2026-11 toolkit 13.0"

cuArrayCreate_v2 = Api(
    client_sa="texture",
    nonnull=("pHandle", "pAllocateArray"),
    ops=("ARRAY_CREATE",),
    capture=Capture.UNSAFE,
    checked=CHECKED,
)
cuArray3DCreate_v2 = Api(
    client_sa="texture",
    nonnull=("pHandle", "pAllocateArray"),
    ops=("ARRAY_CREATE",),
    capture=Capture.UNSAFE,
    checked=CHECKED,
)
cuArrayGetDescriptor_v2 = Api(client_sa="texture", nonnull=("pArrayDescriptor",), checked=CHECKED)
cuArray3DGetDescriptor_v2 = Api(client_sa="texture", nonnull=("pArrayDescriptor",), checked=CHECKED)
# Waits for every stream, as cuMemFree does.
cuArrayDestroy = Api(
    client_sa="texture", ops=("ARRAY_DESTROY",), waits=True, capture=Capture.UNSAFE, checked=CHECKED
)

cuMemcpyHtoA_v2 = Api(
    client_sa="texture", ops=("ARRAY_COPY",), waits=True, capture=Capture.STREAM, checked=CHECKED
)
cuMemcpyAtoH_v2 = Api(
    client_sa="texture", ops=("ARRAY_COPY",), waits=True, capture=Capture.STREAM, checked=CHECKED
)
cuMemcpyDtoA_v2 = Api(
    client_sa="texture", ops=("ARRAY_COPY",), waits=True, capture=Capture.STREAM, checked=CHECKED
)
cuMemcpyAtoD_v2 = Api(
    client_sa="texture", ops=("ARRAY_COPY",), waits=True, capture=Capture.STREAM, checked=CHECKED
)
cuMemcpyAtoA_v2 = Api(
    client_sa="texture", ops=("ARRAY_COPY",), waits=True, capture=Capture.STREAM, checked=CHECKED
)
cuMemcpyHtoAAsync_v2 = Api(
    client_sa="texture", ops=("ARRAY_COPY",), capture=Capture.NODE, checked=CHECKED
)
cuMemcpyAtoHAsync_v2 = Api(
    client_sa="texture", ops=("ARRAY_COPY",), capture=Capture.NODE, checked=CHECKED
)

cuTexObjectCreate = Api(
    client_sa="texture",
    nonnull=("pTexObject", "pResDesc", "pTexDesc"),
    ops=("TEXTURE_CREATE",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuTexObjectDestroy = Api(
    client_sa="texture", ops=("TEXTURE_DESTROY",), waits=True, capture=Capture.FREE, checked=CHECKED
)
cuTexObjectGetResourceDesc = Api(client_sa="texture", nonnull=("pResDesc",), checked=CHECKED)
cuTexObjectGetTextureDesc = Api(client_sa="texture", nonnull=("pTexDesc",), checked=CHECKED)
cuTexObjectGetResourceViewDesc = Api(
    client_sa="texture", nonnull=("pResViewDesc",), checked=CHECKED
)
cuSurfObjectCreate = Api(
    client_sa="texture",
    nonnull=("pSurfObject", "pResDesc"),
    ops=("TEXTURE_CREATE",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuSurfObjectDestroy = Api(
    client_sa="texture", ops=("TEXTURE_DESTROY",), waits=True, capture=Capture.FREE, checked=CHECKED
)
cuSurfObjectGetResourceDesc = Api(client_sa="texture", nonnull=("pResDesc",), checked=CHECKED)
