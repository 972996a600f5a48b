// SPDX-License-Identifier: Apache-2.0
// Shuffles, votes, matches and reductions within a warp, and a block's sum out of them.
#include "check.cuh"

constexpr unsigned kFull = 0xFFFFFFFFu;
constexpr int kBlocks = 8, kThreads = 256;

struct Lane {
  int up, down, across, from_seven, sum, prefix;
  unsigned odd, any_of_five, same;
};

__global__ void lanes(Lane* out, long long* block_sums) {
  const int lane = threadIdx.x % 32, value = int(here()) * 3 + 1;
  Lane& mine = out[here()];
  mine.up = __shfl_up_sync(kFull, value, 2);
  mine.down = __shfl_down_sync(kFull, value, 3);
  mine.across = __shfl_xor_sync(kFull, value, 16);
  mine.from_seven = __shfl_sync(kFull, value, 7);
  mine.odd = __ballot_sync(kFull, value & 1);
  mine.any_of_five = __any_sync(kFull, lane == 5) && !__all_sync(kFull, lane == 5);
  mine.same = __match_any_sync(kFull, lane / 4);
  int sum = value;
  for (int step = 16; step; step /= 2) sum += __shfl_down_sync(kFull, sum, step);
  mine.sum = __shfl_sync(kFull, sum, 0);
  int prefix = value;
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(kFull, prefix, step);
    if (lane >= step) prefix += before;
  }
  mine.prefix = prefix;
  __shared__ long long of_warps[kThreads / 32];
  if (lane == 0) of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    long long all = 0;
    for (long long one : of_warps) all += one;
    block_sums[blockIdx.x] = all;
  }
}

__global__ void reductions(unsigned* out) {
#if __CUDA_ARCH__ >= 800
  const unsigned lane = threadIdx.x % 32;
  const unsigned sum = __reduce_add_sync(kFull, lane * lane), most = __reduce_max_sync(kFull, lane ^ 21);
  if (threadIdx.x == 0) out[0] = sum, out[1] = most;
#endif
}

int main() {
  const size_t count = kBlocks * kThreads;
  Lane* out = zeroes<Lane>(count);
  long long* sums = zeroes<long long>(kBlocks);
  unsigned* reduced = zeroes<unsigned>(2);
  lanes<<<kBlocks, kThreads>>>(out, sums);
  LAUNCHED();
  reductions<<<1, 32>>>(reduced);
  LAUNCHED();
  const std::vector<Lane> got = back(out, count);
  const auto value = [](long long i) { return int(i) * 3 + 1; };
  for (int i = 0; kernels_run() && i < int(count); ++i) {
    const int lane = i % 32, warp = i - lane;
    int sum = 0, prefix = 0;
    unsigned odd = 0;
    for (int k = 0; k < 32; ++k) {
      sum += value(warp + k);
      prefix += k <= lane ? value(warp + k) : 0;
      odd |= unsigned(value(warp + k) & 1) << k;
    }
    EXPECT_EQ(got[i].up, value(lane < 2 ? i : i - 2));
    EXPECT_EQ(got[i].down, value(lane > 28 ? i : i + 3));
    EXPECT_EQ(got[i].across, value(i ^ 16));
    EXPECT_EQ(got[i].from_seven, value(warp + 7));
    EXPECT_EQ(got[i].odd, odd);
    EXPECT_EQ(got[i].any_of_five, 1);
    EXPECT_EQ(got[i].same, 0xFu << lane / 4 * 4);
    EXPECT_EQ(got[i].sum, sum);
    EXPECT_EQ(got[i].prefix, prefix);
  }
  const std::vector<long long> blocks = back(sums, kBlocks);
  for (long long block = 0; block < kBlocks; ++block) {
    long long want = 0;
    for (int k = 0; k < kThreads; ++k) want += value(block * kThreads + k);
    EXPECT_EQ(blocks[block], made(want, 0ll));
  }
  if (compute_capability() >= 80) {
    const std::vector<unsigned> two = back(reduced, 2);
    EXPECT_EQ(two[0], made(10416u, 0u));  // the squares of 0 to 31
    EXPECT_EQ(two[1], made(31u, 0u));
  }
  CHECK(cudaFree(out));
  CHECK(cudaFree(sums));
  CHECK(cudaFree(reduced));
  return ok("warps");
}
