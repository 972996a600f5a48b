# SPDX-License-Identifier: Apache-2.0
"""cuda.h, the linker of "Module Management", and "Tensor Map Object Management": what only the driver can compute.

Both are functions of their arguments. Nothing of them lives in the server: the inputs of a link are kept in the client
and travel together, so a checkpoint in the middle of one loses nothing.
"""

from codegen.spec import Api, Capture

# With no inputs LINK only says whether the device has a linker.
cuLinkCreate_v2 = Api(client_sa="link", nonnull=("stateOut",), ops=("LINK",), capture=Capture.FREE)
cuLinkAddData_v2 = Api(client_sa="link", nonnull=("data",))
cuLinkAddFile_v2 = Api(client_sa="link", nonnull=("path",))
cuLinkComplete = Api(
    client_sa="link",
    nonnull=("cubinOut", "sizeOut"),
    ops=("LINK", "LINK_FETCH"),
    capture=Capture.FREE,
)
cuLinkDestroy = Api(client_sa="link")

cuTensorMapEncodeTiled = Api(
    client_sa="link",
    nonnull=("tensorMap", "globalDim", "boxDim", "elementStrides"),
    ops=("TENSOR_MAP",),
    capture=Capture.FREE,
)
cuTensorMapEncodeIm2col = Api(
    client_sa="link",
    nonnull=(
        "tensorMap",
        "globalDim",
        "pixelBoxLowerCorner",
        "pixelBoxUpperCorner",
        "elementStrides",
    ),
    ops=("TENSOR_MAP",),
    capture=Capture.FREE,
)
cuTensorMapReplaceAddress = Api(
    client_sa="link", nonnull=("tensorMap",), ops=("TENSOR_MAP",), capture=Capture.FREE
)
