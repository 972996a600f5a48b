# SPDX-License-Identifier: Apache-2.0
"""cuda_runtime_api.h "Library Management": libraries and kernels are the driver's."""

from codegen.spec import Api

cudaLibraryLoadData = Api(client_sa="cudart.library", enters="context", nonnull=("library", "code"))
cudaLibraryLoadFromFile = Api(
    client_sa="cudart.library", enters="context", nonnull=("library", "fileName")
)
cudaLibraryUnload = Api(client_sa="cudart.library", enters="context")
cudaLibraryGetKernel = Api(
    client_sa="cudart.library", enters="context", nonnull=("pKernel", "name")
)
cudaLibraryGetKernelCount = Api(client_sa="cudart.library", enters="context", nonnull=("count",))
cudaLibraryEnumerateKernels = Api(
    client_sa="cudart.library", enters="context", nonnull=("kernels",)
)
cudaLibraryGetUnifiedFunction = Api(
    client_sa="cudart.library", enters="context", nonnull=("fptr", "symbol")
)
# Either pointer may be null.
cudaLibraryGetGlobal = Api(client_sa="cudart.library", enters="context", nonnull=("name",))
cudaKernelSetAttributeForDevice = Api(client_sa="cudart.library", enters="context")
