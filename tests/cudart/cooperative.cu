// SPDX-License-Identifier: Apache-2.0
// A cooperative launch: the whole grid waits for itself several times; one that cannot be resident at once is refused.
#include <cooperative_groups.h>

#include "check.cuh"

namespace cg = cooperative_groups;
constexpr int kThreads = 128, kRounds = 8;

// Each round every block publishes a number that depends on all numbers of the round before.
__global__ void rounds(unsigned long long* numbers) {
  cg::grid_group grid = cg::this_grid();
  for (int round = 0; round < kRounds; ++round) {
    unsigned long long sum = 1;
    const unsigned long long* from = numbers + (round % 2) * gridDim.x;
    for (unsigned block = 0; block < gridDim.x; ++block) sum += from[block];
    if (threadIdx.x == 0) numbers[(1 - round % 2) * gridDim.x + blockIdx.x] = sum + blockIdx.x;
    grid.sync();
  }
}

int main() {
  if (!attribute(cudaDevAttrCooperativeLaunch)) not_here("cooperative launches");
  int per_sm = 0;
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, rounds, kThreads, 0));
  EXPECT(per_sm >= 1);
  const int most = per_sm * attribute(cudaDevAttrMultiProcessorCount);
  for (int blocks : {1, 2, min(most, 96)}) {
    unsigned long long* numbers = zeroes<unsigned long long>(2 * blocks);
    void* arguments[] = {&numbers};
    CHECK(cudaLaunchCooperativeKernel(rounds, dim3(blocks), dim3(kThreads), arguments, 0, 0));
    const std::vector<unsigned long long> got = back(numbers, 2 * blocks);
    std::vector<unsigned long long> want(blocks, 0), next(blocks);
    for (int round = 0; round < kRounds; ++round) {
      unsigned long long sum = 1;
      for (unsigned long long one : want) sum += one;
      for (int block = 0; block < blocks; ++block) next[block] = sum + block;
      want = next;
    }
    for (int block = 0; block < blocks; ++block) EXPECT_EQ(got[block], made(want[block], 0ull));
    CHECK(cudaFree(numbers));
  }
  unsigned long long* numbers = device<unsigned long long>(2 * (most + 1));
  void* arguments[] = {&numbers};
  EXPECT_ERROR(cudaLaunchCooperativeKernel(rounds, dim3(most + 1), dim3(kThreads), arguments, 0, 0),
               cudaErrorCooperativeLaunchTooLarge);
  CHECK(cudaFree(numbers));
  return ok("cooperative");
}
