"""cuda.h, the linker of "Module Management", and "Tensor Map Object Management": what only the driver can compute.

Both are functions of their arguments. Nothing of them lives in the server: the inputs of a link are kept in the client
and travel together, so a checkpoint in the middle of one loses nothing.
"""

from codegen.spec import Api, Capture

CHECKED = "2026-11 toolkit 13.0"

# With no inputs LINK only says whether the device has a linker.
cuLinkCreate_v2 = Api(
    client_sa="link", nonnull=("stateOut",), ops=("LINK",), capture=Capture.FREE, checked=CHECKED
)
cuLinkAddData_v2 = Api(client_sa="link", nonnull=("data",), checked=CHECKED)
cuLinkAddFile_v2 = Api(client_sa="link", nonnull=("path",), checked=CHECKED)
cuLinkComplete = Api(
    client_sa="link",
    nonnull=("cubinOut", "sizeOut"),
    ops=("LINK", "LINK_FETCH"),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuLinkDestroy = Api(client_sa="link", checked=CHECKED)

cuTensorMapEncodeTiled = Api(
    client_sa="link",
    nonnull=("tensorMap", "globalDim", "boxDim", "elementStrides"),
    ops=("TENSOR_MAP",),
    capture=Capture.FREE,
    checked=CHECKED,
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
    checked=CHECKED,
)
cuTensorMapReplaceAddress = Api(
    client_sa="link",
    nonnull=("tensorMap",),
    ops=("TENSOR_MAP",),
    capture=Capture.FREE,
    checked=CHECKED,
)
