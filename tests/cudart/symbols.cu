// SPDX-License-Identifier: Apache-2.0
// Device and constant variables: what they begin with, their address and size, copies to and from them, kernels that
// use them. Their addresses are the driver's choice, and a kernel that is given one must find the same variable there.
#include "check.cuh"

__device__ uint32_t counters[256] = {1, 2, 3};
__device__ float scale = 0.5f;
__device__ uint64_t untouched[1 << 16];
__constant__ uint32_t settings[64] = {10, 20, 30, 40};

__global__ void use(uint32_t* out) {
  const size_t i = threadIdx.x;
  out[i] = counters[i] * settings[i % 64] + uint32_t(scale * 100);
  counters[i] += 1000;
}

__global__ void read_through(const uint32_t* pointer, uint32_t* out) { out[threadIdx.x] = pointer[threadIdx.x]; }

int main() {
  uint32_t first[256] = {}, given[64];
  CHECK(cudaMemcpyFromSymbol(first, counters, sizeof first));
  EXPECT_EQ(first[0], 1);
  EXPECT_EQ(first[2], 3);
  EXPECT_EQ(first[3], 0);
  size_t size = 0;
  void *at = nullptr, *settings_at = nullptr;
  CHECK(cudaGetSymbolSize(&size, counters));
  EXPECT_EQ(size, sizeof first);
  CHECK(cudaGetSymbolSize(&size, untouched));
  EXPECT_EQ(size, 8 << 16);
  CHECK(cudaGetSymbolAddress(&at, counters));
  CHECK(cudaGetSymbolAddress(&settings_at, settings));
  EXPECT(at && settings_at && at != settings_at);

  for (uint32_t i = 0; i < 64; ++i) given[i] = 2 * i + 1;
  for (uint32_t i = 0; i < 256; ++i) first[i] = i;
  const float new_scale = 0.25f;
  CHECK(cudaMemcpyToSymbol(settings, given, sizeof given));
  CHECK(cudaMemcpyToSymbolAsync(counters, first, sizeof first, 0, cudaMemcpyHostToDevice, 0));
  CHECK(cudaMemcpyToSymbol(scale, &new_scale, sizeof new_scale));
  CHECK(cudaMemcpyToSymbol(settings, given, 4, 8));  // settings[2] = 1
  uint32_t* out = zeroes<uint32_t>(256);
  use<<<1, 256>>>(out);
  LAUNCHED();
  const std::vector<uint32_t> got = back(out, 256);
  for (uint32_t i = 0; i < 256; ++i) EXPECT_EQ(got[i], made(i * (i % 64 == 2 ? 1 : 2 * (i % 64) + 1) + 25, 0u));
  uint32_t after[256], through[256];
  CHECK(cudaMemcpyFromSymbolAsync(after, counters, sizeof after, 0, cudaMemcpyDeviceToHost, 0));
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemcpy(through, at, sizeof through, cudaMemcpyDeviceToHost));
  for (uint32_t i = 0; i < 256; ++i) EXPECT_EQ(after[i], made(i + 1000, i));
  EXPECT(!memcmp(after, through, sizeof after));
  // The address of a variable as an argument, of both kinds.
  read_through<<<1, 64>>>(static_cast<uint32_t*>(settings_at), out);
  LAUNCHED();
  const std::vector<uint32_t> constants = back(out, 64);
  if (kernels_run())
    for (uint32_t i = 0; i < 64; ++i) EXPECT_EQ(constants[i], i == 2 ? 1 : 2 * i + 1);
  uint64_t last = 7;
  CHECK(cudaMemcpyFromSymbol(&last, untouched, 8, sizeof untouched - 8));
  EXPECT_EQ(last, 0);
  static uint32_t no_symbol;
  EXPECT_ERROR(cudaGetSymbolSize(&size, no_symbol), cudaErrorInvalidSymbol);
  CHECK(cudaFree(out));
  return ok("symbols");
}
