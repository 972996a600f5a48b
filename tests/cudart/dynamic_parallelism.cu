// SPDX-License-Identifier: Apache-2.0
// Kernels that launch kernels: children of every thread, and one behind its parent's end.
// build: -rdc=true -lcudadevrt
#include "check.cuh"

constexpr int kParents = 16, kEach = 64;

__global__ void child(uint32_t* words, uint32_t parent) {
  words[parent * kEach + threadIdx.x] += parent * 100 + threadIdx.x;
}

__global__ void last(uint32_t* words, uint32_t* sum) {
  uint32_t all = 0;
  for (int i = 0; i < kParents * kEach; ++i) all += words[i];
  *sum = all;
}

__global__ void parent(uint32_t* words, uint32_t* sum) {
  child<<<1, kEach, 0, cudaStreamFireAndForget>>>(words, threadIdx.x);
  if (threadIdx.x == 0) last<<<1, 1, 0, cudaStreamTailLaunch>>>(words, sum);
}

int main() {
  uint32_t *words = zeroes<uint32_t>(kParents * kEach), *sum = zeroes<uint32_t>(1);
  size_t pending = 0;
  CHECK(cudaDeviceGetLimit(&pending, cudaLimitDevRuntimePendingLaunchCount));
  EXPECT(pending >= kParents);
  parent<<<1, kParents>>>(words, sum);
  LAUNCHED();
  CHECK(cudaDeviceSynchronize());
  const std::vector<uint32_t> got = back(words, kParents * kEach);
  uint32_t all = 0;
  for (uint32_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i], made(i / kEach * 100 + i % kEach, 0u));
    all += i / kEach * 100 + i % kEach;
  }
  EXPECT_EQ(back(sum, 1)[0], made(all, 0u));
  CHECK(cudaFree(words));
  CHECK(cudaFree(sum));
  return ok("dynamic_parallelism");
}
