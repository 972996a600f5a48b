// SPDX-License-Identifier: Apache-2.0
// Host memory that kernels read and write: allocated mapped, and registered from ordinary pages.
#include <sys/mman.h>

#include "check.cuh"

constexpr int kCount = 10'000;

__global__ void twice(uint32_t* out, const uint32_t* in) {
  for (size_t i = here(); i < kCount; i += threads()) out[i] = 2 * in[i];
}

static void use(uint32_t* host, uint32_t* seen_by_device, uint32_t seed) {
  for (uint32_t i = 0; i < kCount; ++i) host[i] = i + seed, host[kCount + i] = 0;
  twice<<<8, 128>>>(seen_by_device + kCount, seen_by_device);
  LAUNCHED();
  CHECK(cudaDeviceSynchronize());
  for (uint32_t i = 0; i < kCount; ++i) {
    EXPECT_EQ(host[i], i + seed);
    EXPECT_EQ(host[kCount + i], made(2 * (i + seed), 0u));
  }
}

int main() {
  EXPECT(attribute(cudaDevAttrCanMapHostMemory));
  constexpr size_t kBytes = 2 * kCount * sizeof(uint32_t);
  uint32_t *host = nullptr, *on_device = nullptr;
  CHECK(cudaHostAlloc(&host, kBytes, cudaHostAllocMapped | cudaHostAllocPortable));
  CHECK(cudaHostGetDevicePointer(&on_device, host, 0));
  unsigned flags = 0;
  CHECK(cudaHostGetFlags(&flags, host));
  EXPECT(flags & cudaHostAllocMapped);
  use(host, on_device, 3);
  if (attribute(cudaDevAttrCanUseHostPointerForRegisteredMem)) use(host, host, 5);  // one address space
  CHECK(cudaFreeHost(host));

  const size_t pages = (kBytes + 4095) / 4096 * 4096;
  void* mine = mmap(nullptr, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  EXPECT(mine != MAP_FAILED);
  CHECK(cudaHostRegister(mine, pages, cudaHostRegisterMapped));
  CHECK(cudaHostGetDevicePointer(&on_device, mine, 0));
  use(static_cast<uint32_t*>(mine), on_device, 8);
  cudaPointerAttributes about{};
  CHECK(cudaPointerGetAttributes(&about, static_cast<char*>(mine) + 4096));
  EXPECT_EQ(about.type, cudaMemoryTypeHost);
  CHECK(cudaHostUnregister(mine));
  CHECK(cudaPointerGetAttributes(&about, mine));
  EXPECT_EQ(about.type, cudaMemoryTypeUnregistered);
  EXPECT_ERROR(cudaHostUnregister(mine), cudaErrorHostMemoryNotRegistered);
  munmap(mine, pages);
  return ok("mapped");
}
