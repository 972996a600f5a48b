# SPDX-License-Identifier: Apache-2.0
"""cuda.h "Execution Control" and "Occupancy".

kernelParams is a void** without a length: the client packs it by the layout that came with FUNCTION_GET. extra goes
verbatim. Grid, block and shared memory are checked before the post, so their errors are returned by the call itself.
"""

from codegen.apis.cuda_driver.module import USES
from codegen.spec import Api, Capture

cuFuncGetAttribute = Api(client_sa="launch", nonnull=("pi",), first=USES, capture=Capture.FREE)
cuFuncSetAttribute = Api(
    client_sa="launch", ops=("FUNCTION_SET_ATTR",), first=USES, capture=Capture.FREE
)
cuFuncSetCacheConfig = Api(client_sa="launch", first=USES, capture=Capture.FREE)
cuFuncGetModule = Api(client_sa="launch", nonnull=("hmod",), first=USES, capture=Capture.FREE)
cuFuncGetName = Api(client_sa="launch", nonnull=("name",), first=USES, capture=Capture.FREE)
# paramSize may be null.
cuFuncGetParamInfo = Api(
    client_sa="launch", nonnull=("paramOffset",), first=USES, capture=Capture.FREE
)
cuLaunchKernel = Api(client_sa="launch", ops=("LAUNCH",), first=USES, capture=Capture.NODE)
cuLaunchKernelEx = Api(
    client_sa="launch",
    nonnull=("config",),
    ops=("LAUNCH", "LAUNCH_EX", "OCCUPANCY"),
    first=(*USES, "STREAM_CREATE"),
    capture=Capture.NODE,
)
# A grid that does not fit the device at once is found here, with OCCUPANCY, so that the call itself returns it.
cuLaunchCooperativeKernel = Api(
    client_sa="launch", ops=("LAUNCH_EX", "OCCUPANCY"), first=USES, capture=Capture.NODE
)
# The device's own answers, asked once for each question.
cuOccupancyMaxActiveBlocksPerMultiprocessor = Api(
    client_sa="launch", nonnull=("numBlocks",), ops=("OCCUPANCY",), first=USES, capture=Capture.FREE
)
cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags = Api(
    client_sa="launch", nonnull=("numBlocks",), ops=("OCCUPANCY",), first=USES, capture=Capture.FREE
)
cuOccupancyMaxPotentialBlockSize = Api(
    client_sa="launch",
    nonnull=("minGridSize", "blockSize"),
    ops=("OCCUPANCY",),
    first=USES,
    capture=Capture.FREE,
)
cuOccupancyMaxPotentialBlockSizeWithFlags = Api(
    client_sa="launch",
    nonnull=("minGridSize", "blockSize"),
    ops=("OCCUPANCY",),
    first=USES,
    capture=Capture.FREE,
)
cuOccupancyAvailableDynamicSMemPerBlock = Api(
    client_sa="launch",
    nonnull=("dynamicSmemSize",),
    ops=("OCCUPANCY",),
    first=USES,
    capture=Capture.FREE,
)
cuOccupancyMaxActiveClusters = Api(
    client_sa="launch",
    nonnull=("numClusters", "config"),
    ops=("OCCUPANCY",),
    first=USES,
    capture=Capture.FREE,
)
cuOccupancyMaxPotentialClusterSize = Api(
    client_sa="launch",
    nonnull=("clusterSize", "config"),
    ops=("OCCUPANCY",),
    first=USES,
    capture=Capture.FREE,
)
