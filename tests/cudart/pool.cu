// SPDX-License-Identifier: Apache-2.0
// Memory in stream order: allocated and freed in a stream, from the device's pool and from one of our own.
#include "check.cuh"

__global__ void add(uint32_t* words, size_t count, uint32_t by) {
  for (size_t i = here(); i < count; i += threads()) words[i] += by;
}

int main() {
  if (!attribute(cudaDevAttrMemoryPoolsSupported)) not_here("memory pools");
  constexpr size_t kCount = 50'000;
  cudaStream_t s;
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  cudaMemPool_t standard = nullptr, mine = nullptr;
  CHECK(cudaDeviceGetDefaultMemPool(&standard, 0));
  uint64_t threshold = uint64_t{64} << 20, got = 0;
  CHECK(cudaMemPoolSetAttribute(standard, cudaMemPoolAttrReleaseThreshold, &threshold));
  CHECK(cudaMemPoolGetAttribute(standard, cudaMemPoolAttrReleaseThreshold, &got));
  EXPECT_EQ(got, threshold);
  cudaMemPoolProps about{};
  about.allocType = cudaMemAllocationTypePinned;
  about.location.type = cudaMemLocationTypeDevice;
  CHECK(cudaMemPoolCreate(&mine, &about));
  for (uint32_t round = 0; round < 20; ++round) {
    uint32_t *first = nullptr, *second = nullptr;
    CHECK(cudaMallocAsync(&first, kCount * 4, s));
    CHECK(cudaMallocFromPoolAsync(&second, kCount * 4, mine, s));
    EXPECT(first && second && first != second);
    CHECK(cudaMemsetAsync(first, 0, kCount * 4, s));
    add<<<16, 128, 0, s>>>(first, kCount, round + 1);
    LAUNCHED();
    CHECK(cudaMemcpyAsync(second, first, kCount * 4, cudaMemcpyDeviceToDevice, s));
    CHECK(cudaFreeAsync(first, s));
    std::vector<uint32_t> values(kCount, 9);
    CHECK(cudaMemcpyAsync(values.data(), second, kCount * 4, cudaMemcpyDeviceToHost, s));
    CHECK(cudaFreeAsync(second, s));
    CHECK(cudaStreamSynchronize(s));
    EXPECT_ALL(values, made(round + 1, 0u));
  }
  CHECK(cudaMemPoolGetAttribute(standard, cudaMemPoolAttrUsedMemCurrent, &got));
  EXPECT_EQ(got, 0);
  CHECK(cudaMemPoolTrimTo(standard, 0));
  CHECK(cudaMemPoolDestroy(mine));
  CHECK(cudaStreamDestroy(s));
  return ok("pool");
}
