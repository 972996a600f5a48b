// SPDX-License-Identifier: Apache-2.0
// The other half of two_units.cu.
// part of: two_units.cu
#include "check.cuh"

static __device__ uint32_t secret = 7;

static __global__ void add_secret(uint32_t* words, uint32_t count) {
  for (size_t i = here(); i < count; i += threads()) words[i] += secret;
}

void other_launch(uint32_t* words, uint32_t count, cudaStream_t stream) {
  add_secret<<<4, 64, 0, stream>>>(words, count);
  LAUNCHED();
}

int other_unit(uint32_t* words, uint32_t count) {
  const uint32_t eight = 8;
  CHECK(cudaMemcpyToSymbol(secret, &eight, 4));
  CHECK(cudaMemset(words, 0, count * 4));
  other_launch(words, count, 0);
  EXPECT_ALL(back(words, count), made(8u, 0u));
  return 0;
}
