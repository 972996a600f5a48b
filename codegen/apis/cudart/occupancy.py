"""cuda_runtime_api.h "Occupancy"."""

from codegen.spec import Api

CHECKED = "2026-11 toolkit 13.0 and 12.9"

cudaOccupancyMaxActiveBlocksPerMultiprocessor = Api(
    client_sa="cudart.execution", enters="context", nonnull=("numBlocks",), checked=CHECKED
)
cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags = Api(
    client_sa="cudart.execution", enters="context", nonnull=("numBlocks",), checked=CHECKED
)
cudaOccupancyAvailableDynamicSMemPerBlock = Api(
    client_sa="cudart.execution", enters="context", nonnull=("dynamicSmemSize",), checked=CHECKED
)
cudaOccupancyMaxPotentialClusterSize = Api(
    client_sa="cudart.execution",
    enters="context",
    nonnull=("clusterSize", "launchConfig"),
    checked=CHECKED,
)
cudaOccupancyMaxActiveClusters = Api(
    client_sa="cudart.execution",
    enters="context",
    nonnull=("numClusters", "launchConfig"),
    checked=CHECKED,
)
