"""cuda.h "Execution Control" and "Occupancy".

kernelParams is a void** without a length: the client packs it by the layout that came with FUNCTION_GET. extra goes
verbatim. Grid, block and shared memory are checked before the post, so their errors are returned by the call itself.
"""

from codegen.spec import Api

CHECKED = "2026-11 toolkit 13.0"

cuFuncGetAttribute = Api(client_sa="launch", nonnull=("pi",), checked=CHECKED)
cuFuncSetAttribute = Api(client_sa="launch", ops=("FUNCTION_SET_ATTR",), checked=CHECKED)
cuFuncSetCacheConfig = Api(client_sa="launch", checked=CHECKED)
cuFuncGetModule = Api(client_sa="launch", nonnull=("hmod",), checked=CHECKED)
cuFuncGetName = Api(client_sa="launch", nonnull=("name",), checked=CHECKED)
# paramSize may be null.
cuFuncGetParamInfo = Api(client_sa="launch", nonnull=("paramOffset",), checked=CHECKED)
cuLaunchKernel = Api(client_sa="launch", ops=("LAUNCH",), checked=CHECKED)
cuLaunchKernelEx = Api(client_sa="launch", nonnull=("config",), ops=("LAUNCH",), checked=CHECKED)
cuOccupancyMaxActiveBlocksPerMultiprocessor = Api(
    client_sa="launch", nonnull=("numBlocks",), checked=CHECKED
)
cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags = Api(
    client_sa="launch", nonnull=("numBlocks",), checked=CHECKED
)
