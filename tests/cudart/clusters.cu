// SPDX-License-Identifier: Apache-2.0
// Thread block clusters (compute capability 9 and later): blocks read each other's shared memory; the size is chosen by
// the kernel or at the launch.
#include <cooperative_groups.h>

#include "check.cuh"

namespace cg = cooperative_groups;
constexpr int kThreads = 64;

__device__ void exchange(uint32_t* out) {
#if __CUDA_ARCH__ >= 900
  __shared__ uint32_t mine[kThreads];
  cg::cluster_group cluster = cg::this_cluster();
  mine[threadIdx.x] = blockIdx.x * 1000 + threadIdx.x;
  cluster.sync();
  const unsigned next = (cluster.block_rank() + 1) % cluster.num_blocks();
  out[here()] = *cluster.map_shared_rank(&mine[threadIdx.x], next);
  cluster.sync();
#endif
}

__global__ void __cluster_dims__(2, 1, 1) pairs(uint32_t* out) { exchange(out); }
__global__ void any_size(uint32_t* out) { exchange(out); }

static void expect_clusters(uint32_t* out, uint32_t blocks, uint32_t size) {
  const std::vector<uint32_t> got = back(out, blocks * kThreads);
  for (uint32_t i = 0; i < got.size(); ++i) {
    const uint32_t block = i / kThreads, neighbour = block / size * size + (block + 1) % size;
    EXPECT_EQ(got[i], made(neighbour * 1000 + i % kThreads, 0u));
  }
}

int main() {
  if (compute_capability() < 90) not_here("clusters");
  EXPECT(attribute(cudaDevAttrClusterLaunch));
  uint32_t* out = zeroes<uint32_t>(16 * kThreads);
  pairs<<<8, kThreads>>>(out);
  LAUNCHED();
  expect_clusters(out, 8, 2);
  for (uint32_t size : {1u, 4u, 8u}) {
    CHECK(cudaMemset(out, 0, 16 * kThreads * 4));
    cudaLaunchAttribute attributes[1] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = size;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(16);
    config.blockDim = dim3(kThreads);
    config.attrs = attributes;
    config.numAttrs = 1;
    int clusters = 0, largest = 0;
    CHECK(cudaOccupancyMaxActiveClusters(&clusters, any_size, &config));
    EXPECT(clusters >= 1);
    CHECK(cudaOccupancyMaxPotentialClusterSize(&largest, any_size, &config));
    EXPECT(largest >= 8);
    CHECK(cudaLaunchKernelEx(&config, any_size, out));
    expect_clusters(out, 16, size);
  }
  cudaLaunchAttribute attributes[1] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = 3;  // does not divide the grid
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(16);
  config.blockDim = dim3(kThreads);
  config.attrs = attributes;
  config.numAttrs = 1;
  EXPECT(cudaLaunchKernelEx(&config, any_size, out) != cudaSuccess);
  EXPECT(cudaGetLastError() != cudaSuccess);
  CHECK(cudaFree(out));
  return ok("clusters");
}
