"""cuda_runtime_api.h "Library Management": libraries and kernels are the driver's."""

from codegen.spec import Api

CHECKED = "2026-11 toolkit 13.0 and 12.9"

cudaLibraryLoadData = Api(
    client_sa="cudart.library", enters="context", nonnull=("library", "code"), checked=CHECKED
)
cudaLibraryLoadFromFile = Api(
    client_sa="cudart.library", enters="context", nonnull=("library", "fileName"), checked=CHECKED
)
cudaLibraryUnload = Api(client_sa="cudart.library", enters="context", checked=CHECKED)
cudaLibraryGetKernel = Api(
    client_sa="cudart.library", enters="context", nonnull=("pKernel", "name"), checked=CHECKED
)
cudaLibraryGetKernelCount = Api(
    client_sa="cudart.library", enters="context", nonnull=("count",), checked=CHECKED
)
cudaLibraryEnumerateKernels = Api(
    client_sa="cudart.library", enters="context", nonnull=("kernels",), checked=CHECKED
)
cudaLibraryGetUnifiedFunction = Api(
    client_sa="cudart.library", enters="context", nonnull=("fptr", "symbol"), checked=CHECKED
)
# Either pointer may be null.
cudaLibraryGetGlobal = Api(
    client_sa="cudart.library", enters="context", nonnull=("name",), checked=CHECKED
)
cudaKernelSetAttributeForDevice = Api(client_sa="cudart.library", enters="context", checked=CHECKED)
