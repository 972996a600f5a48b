# SPDX-License-Identifier: Apache-2.0
"""cuda.h "Module Management", "Library Management" and the part of "Execution Control" that loads functions.

A CUlibrary is a module that is loaded at first use in each context, a CUkernel its function; the job may pass either
handle where the other is declared.
"""

from codegen.spec import Api, Capture

# An image that the server does not know travels before it is loaded again.
LOADS = ("MODULE_LOAD", "IMAGE_PUT")
# A kernel of a library becomes a function of a device when it is first used there, and its library a module.
USES = ("FUNCTION_GET", *LOADS)

# A path is opened in the client: the server may run with another root or working directory.
cuModuleLoad = Api(client_sa="module", nonnull=("module", "fname"), ops=LOADS, capture=Capture.FREE)
cuModuleLoadData = Api(
    client_sa="module", nonnull=("module", "image"), ops=LOADS, capture=Capture.FREE
)
cuModuleLoadDataEx = Api(
    client_sa="module", nonnull=("module", "image"), ops=LOADS, capture=Capture.FREE
)
cuModuleLoadFatBinary = Api(
    client_sa="module", nonnull=("module", "fatCubin"), ops=LOADS, capture=Capture.FREE
)
cuModuleUnload = Api(client_sa="module", ops=("MODULE_UNLOAD",), capture=Capture.FREE)
cuModuleGetLoadingMode = Api(client_sa="module", nonnull=("mode",))
cuModuleGetFunction = Api(
    client_sa="module", nonnull=("hfunc", "name"), ops=("FUNCTION_GET",), capture=Capture.FREE
)
# The device lists the names, once per module.
cuModuleGetFunctionCount = Api(
    client_sa="module", nonnull=("count",), ops=("FUNCTION_NAMES",), capture=Capture.FREE
)
cuModuleEnumerateFunctions = Api(
    client_sa="module",
    nonnull=("functions",),
    ops=("FUNCTION_NAMES", "FUNCTION_GET"),
    capture=Capture.FREE,
)
# The header lets dptr or bytes be null.
cuModuleGetGlobal_v2 = Api(
    client_sa="module", nonnull=("name",), ops=("MODULE_GLOBAL",), capture=Capture.FREE
)

# BINARY_IS_PRESERVED or not, the image has been sent when the call returns.
cuLibraryLoadData = Api(
    client_sa="module", nonnull=("library", "code"), ops=LOADS, capture=Capture.FREE
)
cuLibraryLoadFromFile = Api(
    client_sa="module", nonnull=("library", "fileName"), ops=LOADS, capture=Capture.FREE
)
cuLibraryUnload = Api(client_sa="module", ops=("MODULE_UNLOAD",), capture=Capture.FREE)
cuLibraryGetKernel = Api(
    client_sa="module",
    nonnull=("pKernel", "name"),
    ops=("FUNCTION_GET",),
    first=LOADS,
    capture=Capture.FREE,
)
cuLibraryGetModule = Api(client_sa="module", nonnull=("pMod",), first=LOADS, capture=Capture.FREE)
cuLibraryGetGlobal = Api(
    client_sa="module", nonnull=("name",), ops=("MODULE_GLOBAL",), first=LOADS, capture=Capture.FREE
)
cuLibraryGetKernelCount = Api(
    client_sa="module", nonnull=("count",), ops=("FUNCTION_NAMES",), capture=Capture.FREE
)
# A kernel becomes a function of a device when it is first used there.
cuLibraryEnumerateKernels = Api(
    client_sa="module", nonnull=("kernels",), ops=("FUNCTION_NAMES",), capture=Capture.FREE
)
cuLibraryGetUnifiedFunction = Api(client_sa="module", nonnull=("fptr", "symbol"))
cuKernelGetLibrary = Api(client_sa="module", nonnull=("pLib",))
cuKernelGetFunction = Api(client_sa="module", nonnull=("pFunc",), first=USES, capture=Capture.FREE)
cuKernelGetAttribute = Api(client_sa="launch", nonnull=("pi",), first=USES, capture=Capture.FREE)
cuKernelSetAttribute = Api(
    client_sa="launch", ops=("FUNCTION_SET_ATTR",), first=USES, capture=Capture.FREE
)
cuKernelSetCacheConfig = Api(client_sa="launch", first=USES, capture=Capture.FREE)
cuKernelGetName = Api(client_sa="module", nonnull=("name",))
# paramSize may be null; answered from the layout that came with FUNCTION_GET.
cuKernelGetParamInfo = Api(
    client_sa="module", nonnull=("paramOffset",), first=USES, capture=Capture.FREE
)
cuFuncIsLoaded = Api(client_sa="module", nonnull=("state",), first=USES, capture=Capture.FREE)
cuFuncLoad = Api(client_sa="module", first=USES, capture=Capture.FREE)
