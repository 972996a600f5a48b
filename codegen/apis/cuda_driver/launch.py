"""cuda.h "Execution Control" and "Occupancy".

kernelParams is a void** without a length: the client packs it by the layout that came with FUNCTION_GET. extra goes
verbatim. Grid, block and shared memory are checked before the post, so their errors are returned by the call itself.
"""

from codegen.spec import Api, Capture

CHECKED = "2026-11 toolkit 13.0"

cuFuncGetAttribute = Api(client_sa="launch", nonnull=("pi",), checked=CHECKED)
cuFuncSetAttribute = Api(
    client_sa="launch", ops=("FUNCTION_SET_ATTR",), capture=Capture.FREE, checked=CHECKED
)
cuFuncSetCacheConfig = Api(client_sa="launch", checked=CHECKED)
cuFuncGetModule = Api(client_sa="launch", nonnull=("hmod",), checked=CHECKED)
cuFuncGetName = Api(client_sa="launch", nonnull=("name",), checked=CHECKED)
# paramSize may be null.
cuFuncGetParamInfo = Api(client_sa="launch", nonnull=("paramOffset",), checked=CHECKED)
cuLaunchKernel = Api(client_sa="launch", ops=("LAUNCH",), capture=Capture.NODE, checked=CHECKED)
cuLaunchKernelEx = Api(
    client_sa="launch",
    nonnull=("config",),
    ops=("LAUNCH", "LAUNCH_EX"),
    capture=Capture.NODE,
    checked=CHECKED,
)
# A grid that does not fit the device at once is found here, with OCCUPANCY, so that the call itself returns it.
cuLaunchCooperativeKernel = Api(
    client_sa="launch", ops=("LAUNCH_EX", "OCCUPANCY"), capture=Capture.NODE, checked=CHECKED
)
# The device's own answers, asked once for each question.
cuOccupancyMaxActiveBlocksPerMultiprocessor = Api(
    client_sa="launch",
    nonnull=("numBlocks",),
    ops=("OCCUPANCY",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags = Api(
    client_sa="launch",
    nonnull=("numBlocks",),
    ops=("OCCUPANCY",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuOccupancyMaxPotentialBlockSize = Api(
    client_sa="launch",
    nonnull=("minGridSize", "blockSize"),
    ops=("OCCUPANCY",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuOccupancyMaxPotentialBlockSizeWithFlags = Api(
    client_sa="launch",
    nonnull=("minGridSize", "blockSize"),
    ops=("OCCUPANCY",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuOccupancyAvailableDynamicSMemPerBlock = Api(
    client_sa="launch",
    nonnull=("dynamicSmemSize",),
    ops=("OCCUPANCY",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuOccupancyMaxActiveClusters = Api(
    client_sa="launch",
    nonnull=("numClusters", "config"),
    ops=("OCCUPANCY",),
    capture=Capture.FREE,
    checked=CHECKED,
)
cuOccupancyMaxPotentialClusterSize = Api(
    client_sa="launch",
    nonnull=("clusterSize", "config"),
    ops=("OCCUPANCY",),
    capture=Capture.FREE,
    checked=CHECKED,
)
