// SPDX-License-Identifier: Apache-2.0
// malloc and free within kernels, memory that outlives its kernel, and the limits of the device's own heap and stack.
#include "check.cuh"

constexpr int kBlocks = 8, kThreads = 64, kWords = 40;

__global__ void take(uint32_t** kept, uint32_t* failed) {
  const size_t i = here();
  uint32_t* mine = static_cast<uint32_t*>(malloc(kWords * sizeof(uint32_t)));
  kept[i] = mine;
  if (!mine) {
    atomicAdd(failed, 1u);
    return;
  }
  for (int k = 0; k < kWords; ++k) mine[k] = uint32_t(i) * 1000 + k;
}

__global__ void give(uint32_t** kept, uint32_t* sums) {
  const size_t i = here(), from = (i + 17) % threads();  // another thread's
  uint32_t sum = 0;
  for (int k = 0; k < kWords; ++k) sum += kept[from][k];
  sums[from] = sum;
  free(kept[from]);
}

int main() {
  constexpr size_t kHeap = 32 << 20;
  size_t got = 0;
  CHECK(cudaDeviceSetLimit(cudaLimitMallocHeapSize, kHeap));
  CHECK(cudaDeviceGetLimit(&got, cudaLimitMallocHeapSize));
  EXPECT(got >= kHeap);
  CHECK(cudaDeviceSetLimit(cudaLimitStackSize, 4096));
  CHECK(cudaDeviceGetLimit(&got, cudaLimitStackSize));
  EXPECT(got >= 4096);
  CHECK(cudaDeviceGetLimit(&got, cudaLimitPrintfFifoSize));
  EXPECT(got > 0);
  uint32_t** kept = zeroes<uint32_t*>(kBlocks * kThreads);
  uint32_t *failed = zeroes<uint32_t>(1), *sums = zeroes<uint32_t>(kBlocks * kThreads);
  for (int round = 0; round < 5; ++round) {
    take<<<kBlocks, kThreads>>>(kept, failed);
    LAUNCHED();
    give<<<kBlocks, kThreads>>>(kept, sums);
    LAUNCHED();
  }
  EXPECT_EQ(back(failed, 1)[0], 0);
  const std::vector<uint32_t> all = back(sums, kBlocks * kThreads);
  for (uint32_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i], made(i * 1000 * kWords + kWords * (kWords - 1) / 2, 0u));
  CHECK(cudaFree(kept));
  CHECK(cudaFree(failed));
  CHECK(cudaFree(sums));
  return ok("heap");
}
