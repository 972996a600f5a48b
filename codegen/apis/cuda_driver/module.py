"""cuda.h "Module Management", "Library Management" and the part of "Execution Control" that loads functions.

A CUlibrary is a module that is loaded at first use in each context, a CUkernel its function; the job may pass either
handle where the other is declared.
"""

from codegen.spec import Api, Capture

CHECKED = "2026-11 toolkit 13.0"

# A path is opened in the client: the server may run with another root or working directory.
cuModuleLoad = Api(
    client_sa="module",
    nonnull=("module", "fname"),
    ops=("MODULE_LOAD",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuModuleLoadData = Api(
    client_sa="module",
    nonnull=("module", "image"),
    ops=("MODULE_LOAD",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuModuleLoadDataEx = Api(
    client_sa="module",
    nonnull=("module", "image"),
    ops=("MODULE_LOAD",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuModuleLoadFatBinary = Api(
    client_sa="module",
    nonnull=("module", "fatCubin"),
    ops=("MODULE_LOAD",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuModuleUnload = Api(
    client_sa="module", ops=("MODULE_UNLOAD",), capture=Capture.FREE, checked=CHECKED
)
cuModuleGetLoadingMode = Api(client_sa="module", nonnull=("mode",), checked=CHECKED)
cuModuleGetFunction = Api(
    client_sa="module",
    nonnull=("hfunc", "name"),
    ops=("FUNCTION_GET",),
    capture=Capture.FREE,
    checked=CHECKED,
)
# The device lists the names, once per module.
cuModuleGetFunctionCount = Api(
    client_sa="module",
    nonnull=("count",),
    ops=("FUNCTION_NAMES",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuModuleEnumerateFunctions = Api(
    client_sa="module",
    nonnull=("functions",),
    ops=("FUNCTION_NAMES", "FUNCTION_GET"),
    capture=Capture.FREE,
    checked=CHECKED,
)
# The header lets dptr or bytes be null.
cuModuleGetGlobal_v2 = Api(
    client_sa="module",
    nonnull=("name",),
    ops=("MODULE_GLOBAL",),
    capture=Capture.FREE,
    checked=CHECKED,
)

# BINARY_IS_PRESERVED or not, the image has been sent when the call returns.
cuLibraryLoadData = Api(
    client_sa="module",
    nonnull=("library", "code"),
    ops=("MODULE_LOAD",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuLibraryLoadFromFile = Api(
    client_sa="module",
    nonnull=("library", "fileName"),
    ops=("MODULE_LOAD",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuLibraryUnload = Api(
    client_sa="module", ops=("MODULE_UNLOAD",), capture=Capture.FREE, checked=CHECKED
)
cuLibraryGetKernel = Api(
    client_sa="module",
    nonnull=("pKernel", "name"),
    ops=("FUNCTION_GET",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuLibraryGetModule = Api(client_sa="module", nonnull=("pMod",), checked=CHECKED)
cuLibraryGetGlobal = Api(
    client_sa="module",
    nonnull=("name",),
    ops=("MODULE_GLOBAL",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuLibraryGetKernelCount = Api(
    client_sa="module",
    nonnull=("count",),
    ops=("FUNCTION_NAMES",),
    capture=Capture.FREE,
    checked=CHECKED,
)
# A kernel becomes a function of a device when it is first used there.
cuLibraryEnumerateKernels = Api(
    client_sa="module",
    nonnull=("kernels",),
    ops=("FUNCTION_NAMES",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuLibraryGetUnifiedFunction = Api(client_sa="module", nonnull=("fptr", "symbol"), checked=CHECKED)
cuKernelGetLibrary = Api(client_sa="module", nonnull=("pLib",), checked=CHECKED)
cuKernelGetFunction = Api(client_sa="module", nonnull=("pFunc",), checked=CHECKED)
cuKernelGetAttribute = Api(client_sa="module", nonnull=("pi",), checked=CHECKED)
cuKernelSetAttribute = Api(
    client_sa="module", ops=("FUNCTION_SET_ATTR",), capture=Capture.FREE, checked=CHECKED
)
cuKernelSetCacheConfig = Api(client_sa="module", checked=CHECKED)
cuKernelGetName = Api(client_sa="module", nonnull=("name",), checked=CHECKED)
# paramSize may be null; answered from the layout that came with FUNCTION_GET.
cuKernelGetParamInfo = Api(client_sa="module", nonnull=("paramOffset",), checked=CHECKED)
cuFuncIsLoaded = Api(client_sa="module", nonnull=("state",), checked=CHECKED)
cuFuncLoad = Api(client_sa="module", checked=CHECKED)
