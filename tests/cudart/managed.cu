// Managed memory, a little of it: the host and a kernel write the same pages in turn.
#include "check.cuh"

constexpr int kCount = 1024;

__global__ void add(uint32_t* words, uint32_t by) { words[here()] += by; }

int main() {
  uint32_t* words = nullptr;
  CHECK(cudaMallocManaged(&words, kCount * 4));
  for (int i = 0; i < kCount; ++i) words[i] = i;
  add<<<4, 256>>>(words, 5);
  LAUNCHED();
  CHECK(cudaDeviceSynchronize());
  for (int i = 0; i < kCount; ++i) EXPECT_EQ(words[i], made(i + 5, i));
  CHECK(cudaFree(words));
  return ok("managed");
}
