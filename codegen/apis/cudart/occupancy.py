# SPDX-License-Identifier: Apache-2.0
"""cuda_runtime_api.h "Occupancy"."""

from codegen.spec import Api

cudaOccupancyMaxActiveBlocksPerMultiprocessor = Api(
    client_sa="cudart.execution", enters="context", nonnull=("numBlocks",)
)
cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags = Api(
    client_sa="cudart.execution", enters="context", nonnull=("numBlocks",)
)
cudaOccupancyAvailableDynamicSMemPerBlock = Api(
    client_sa="cudart.execution", enters="context", nonnull=("dynamicSmemSize",)
)
cudaOccupancyMaxPotentialClusterSize = Api(
    client_sa="cudart.execution", enters="context", nonnull=("clusterSize", "launchConfig")
)
cudaOccupancyMaxActiveClusters = Api(
    client_sa="cudart.execution", enters="context", nonnull=("numClusters", "launchConfig")
)
