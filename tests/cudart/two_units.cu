// SPDX-License-Identifier: Apache-2.0
// Two translation units, each with a fat binary, variables and kernels of its own, some under the same names.
// also: two_units_other.cu
#include "check.cuh"

int other_unit(uint32_t* words, uint32_t count);
void other_launch(uint32_t* words, uint32_t count, cudaStream_t stream);

static __device__ uint32_t secret = 1000;

static __global__ void add_secret(uint32_t* words, uint32_t count) {
  for (size_t i = here(); i < count; i += threads()) words[i] += secret;
}

int main() {
  constexpr uint32_t kCount = 1000;
  uint32_t* words = zeroes<uint32_t>(kCount);
  add_secret<<<4, 64>>>(words, kCount);
  LAUNCHED();
  other_launch(words, kCount, 0);
  add_secret<<<4, 64>>>(words, kCount);
  LAUNCHED();
  EXPECT_ALL(back(words, kCount), made(1000u + 7 + 1000, 0u));
  EXPECT_EQ(other_unit(words, kCount), 0);
  uint32_t mine = 0;
  CHECK(cudaMemcpyFromSymbol(&mine, secret, 4));
  EXPECT_EQ(mine, 1000);
  CHECK(cudaFree(words));
  return ok("two_units");
}
