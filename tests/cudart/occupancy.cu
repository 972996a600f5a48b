// SPDX-License-Identifier: Apache-2.0
// What the runtime says of kernels: registers, shared memory, most threads, blocks that fit on a multiprocessor.
#include "check.cuh"

__global__ void plain(float* out) { out[here()] = 1; }

__global__ void __launch_bounds__(128, 4) bounded(float* out) {
  __shared__ float part[256];
  part[threadIdx.x] = float(threadIdx.x);
  __syncthreads();
  out[here()] = part[255 - threadIdx.x % 128 - 128];
}

__global__ void dynamic(float* out) {
  extern __shared__ float part[];
  part[threadIdx.x] = 2;
  out[here()] = part[threadIdx.x];
}

int main() {
  cudaFuncAttributes a{};
  CHECK(cudaFuncGetAttributes(&a, plain));
  EXPECT(a.numRegs > 0 && a.numRegs <= 255);
  EXPECT_EQ(a.sharedSizeBytes, 0);
  EXPECT_EQ(a.maxThreadsPerBlock, 1024);
  EXPECT(a.binaryVersion >= 75 && a.binaryVersion <= compute_capability());
  EXPECT(a.ptxVersion >= 75);
  CHECK(cudaFuncGetAttributes(&a, bounded));
  EXPECT_EQ(a.sharedSizeBytes, 1024);
  EXPECT_EQ(a.maxThreadsPerBlock, 128);

  const int threads_per_sm = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  const int shared_per_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  const int most_blocks = attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
  int blocks = 0;
  for (int threads_per_block : {32, 128, 256, 1024}) {
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, plain, threads_per_block, 0));
    EXPECT_EQ(blocks, min(threads_per_sm / threads_per_block, most_blocks));
  }
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, bounded, 128, 0));
  EXPECT(blocks >= 4);
  const int most_shared = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  CHECK(cudaFuncSetAttribute(dynamic, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared));
  CHECK(cudaFuncGetAttributes(&a, dynamic));
  EXPECT_EQ(a.maxDynamicSharedSizeBytes, most_shared);
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, dynamic, 64, most_shared));
  EXPECT_EQ(blocks, 1);
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&blocks, dynamic, 64, shared_per_sm / 4,
                                                               cudaOccupancyDefault));
  EXPECT(blocks >= 3 && blocks <= 4);  // each block also has a little for the system
  int grid = 0, block = 0;
  CHECK(cudaOccupancyMaxPotentialBlockSize(&grid, &block, plain, size_t{0}, 0));
  EXPECT(block >= 32 && block <= 1024 && block % 32 == 0);
  EXPECT(grid >= attribute(cudaDevAttrMultiProcessorCount));
  size_t left = 0;
  CHECK(cudaOccupancyAvailableDynamicSMemPerBlock(&left, dynamic, 2, 64));
  EXPECT(left > 0 && left <= size_t(shared_per_sm) / 2);
  CHECK(cudaFuncSetCacheConfig(plain, cudaFuncCachePreferL1));
  CHECK(cudaFuncSetAttribute(plain, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxL1));

  float* out = zeroes<float>(1024);
  bounded<<<1, 128>>>(out);
  LAUNCHED();
  dynamic<<<1, 64, 1024>>>(out);
  LAUNCHED();
  plain<<<1, 1024>>>(out);
  LAUNCHED();
  EXPECT_ALL(back(out, 1024), made(1.0f, 0.0f));
  CHECK(cudaFree(out));
  return ok("occupancy");
}
