# SPDX-License-Identifier: Apache-2.0
"""cuda.h, the arrays of "Memory Management", "Texture Object Management" and "Surface Object Management".

An array is a virtual handle with a shape; its memory is the device's. A texture or surface object is the number that the
device gave, since kernels find it in parameters that nobody looks into: a restore makes the same one again or is refused.
"""

from codegen.spec import Api, Capture

cuArrayCreate_v2 = Api(
    client_sa="texture",
    nonnull=("pHandle", "pAllocateArray"),
    ops=("ARRAY_CREATE",),
    capture=Capture.UNSAFE,
)
cuArray3DCreate_v2 = Api(
    client_sa="texture",
    nonnull=("pHandle", "pAllocateArray"),
    ops=("ARRAY_CREATE",),
    capture=Capture.UNSAFE,
)
cuArrayGetDescriptor_v2 = Api(client_sa="texture", nonnull=("pArrayDescriptor",))
cuArray3DGetDescriptor_v2 = Api(client_sa="texture", nonnull=("pArrayDescriptor",))
# Waits for every stream, as cuMemFree does.
cuArrayDestroy = Api(
    client_sa="texture", ops=("ARRAY_DESTROY",), waits=True, capture=Capture.UNSAFE
)

cuMemcpyHtoA_v2 = Api(client_sa="copies", ops=("ARRAY_COPY",), waits=True, capture=Capture.STREAM)
cuMemcpyAtoH_v2 = Api(client_sa="copies", ops=("ARRAY_COPY",), waits=True, capture=Capture.STREAM)
cuMemcpyDtoA_v2 = Api(client_sa="copies", ops=("ARRAY_COPY",), waits=True, capture=Capture.STREAM)
cuMemcpyAtoD_v2 = Api(client_sa="copies", ops=("ARRAY_COPY",), waits=True, capture=Capture.STREAM)
cuMemcpyAtoA_v2 = Api(client_sa="copies", ops=("ARRAY_COPY",), waits=True, capture=Capture.STREAM)
cuMemcpyHtoAAsync_v2 = Api(client_sa="copies", ops=("ARRAY_COPY",), capture=Capture.NODE)
cuMemcpyAtoHAsync_v2 = Api(client_sa="copies", ops=("ARRAY_COPY",), capture=Capture.NODE)

cuTexObjectCreate = Api(
    client_sa="texture",
    nonnull=("pTexObject", "pResDesc", "pTexDesc"),
    ops=("TEXTURE_CREATE",),
    capture=Capture.FREE,
)
cuTexObjectDestroy = Api(
    client_sa="texture", ops=("TEXTURE_DESTROY",), waits=True, capture=Capture.FREE
)
cuTexObjectGetResourceDesc = Api(client_sa="texture", nonnull=("pResDesc",))
cuTexObjectGetTextureDesc = Api(client_sa="texture", nonnull=("pTexDesc",))
cuTexObjectGetResourceViewDesc = Api(client_sa="texture", nonnull=("pResViewDesc",))
cuSurfObjectCreate = Api(
    client_sa="texture",
    nonnull=("pSurfObject", "pResDesc"),
    ops=("TEXTURE_CREATE",),
    capture=Capture.FREE,
)
cuSurfObjectDestroy = Api(
    client_sa="texture", ops=("TEXTURE_DESTROY",), waits=True, capture=Capture.FREE
)
cuSurfObjectGetResourceDesc = Api(client_sa="texture", nonnull=("pResDesc",))
