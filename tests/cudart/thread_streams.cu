// SPDX-License-Identifier: Apache-2.0
// One default stream per thread: a thread's work does not wait for another's, and the legacy stream waits for all.
// build: --default-stream per-thread
#include <thread>

#include "gate.cuh"

constexpr size_t kCount = 1 << 14;

__global__ void affine(uint32_t* words, uint32_t factor, uint32_t add) {
  for (size_t i = here(); i < kCount; i += threads()) words[i] = words[i] * factor + add;
}

int main() {
  uint32_t* mine = zeroes<uint32_t>(kCount);
  uint32_t* others = zeroes<uint32_t>(kCount);
  affine<<<1, 32>>>(mine, 1, 0);
  LAUNCHED();
  CHECK(cudaDeviceSynchronize());
  Gate gate;
  gate.close(0);
  affine<<<32, 128>>>(mine, 1, 3);
  LAUNCHED();
  EXPECT_EQ(cudaStreamQuery(0), cudaErrorNotReady);
  EXPECT_EQ(cudaStreamQuery(cudaStreamPerThread), cudaErrorNotReady);
  cudaGetLastError();
  std::thread([&] {
    for (uint32_t k = 0; k < 10; ++k) affine<<<32, 128>>>(others, k, k + 1);
    LAUNCHED();
    std::vector<uint32_t> got(kCount, 9);
    CHECK(cudaMemcpyAsync(got.data(), others, kCount * 4, cudaMemcpyDeviceToHost, 0));
    CHECK(cudaStreamSynchronize(0));  // ends, though the first thread's stream waits at its gate
    uint32_t want = 0;
    for (uint32_t k = 0; k < 10; ++k) want = want * k + k + 1;
    EXPECT_ALL(got, made(want, 0u));
  }).join();
  // In the legacy stream, behind every thread's.
  affine<<<32, 128, 0, cudaStreamLegacy>>>(mine, 5, 1);
  LAUNCHED();
  EXPECT_EQ(cudaStreamQuery(cudaStreamLegacy), cudaErrorNotReady);
  cudaGetLastError();
  gate.open();
  CHECK(cudaStreamSynchronize(cudaStreamLegacy));
  EXPECT_ALL(back(mine, kCount), made(3u * 5 + 1, 0u));
  CHECK(cudaFree(mine));
  CHECK(cudaFree(others));
  return ok("thread_streams");
}
