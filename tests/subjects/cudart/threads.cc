// SPDX-License-Identifier: Apache-2.0
// Many threads at once: each its own stream, memory, events, last error; devices are chosen per thread.
#include "program.h"

static void work(int number) {
  constexpr size_t kBytes = 1 << 18;
  CHECK(cudaSetDevice(0));
  cudaStream_t s;
  cudaEvent_t e;
  void *a = nullptr, *b = nullptr, *pinned = nullptr;
  CHECK(cudaStreamCreate(&s));
  CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
  CHECK(cudaMalloc(&a, kBytes));
  CHECK(cudaMallocAsync(&b, kBytes, s));
  CHECK(cudaMallocHost(&pinned, kBytes));
  for (int round = 0; round < 40; ++round) {
    const int value = (number * 40 + round) & 0xff;
    CHECK(cudaMemsetAsync(a, value, kBytes, s));
    CHECK(cudaMemcpyAsync(b, a, kBytes, cudaMemcpyDeviceToDevice, s));
    CHECK(cudaMemcpyAsync(pinned, b, kBytes, cudaMemcpyDeviceToHost, s));
    CHECK(cudaEventRecord(e, s));
    CHECK(round % 2 ? cudaEventSynchronize(e) : cudaStreamSynchronize(s));
    const auto* bytes = static_cast<unsigned char*>(pinned);
    EXPECT(bytes[0] == value && bytes[kBytes - 1] == value);
    if (number % 2) {
      EXPECT_RESULT(cudaSetDevice(1000 + number), cudaErrorInvalidDevice);
      EXPECT_RESULT(cudaGetLastError(), cudaErrorInvalidDevice);
    } else {
      EXPECT_RESULT(cudaGetLastError(), cudaSuccess);
    }
  }
  CHECK(cudaFreeAsync(b, s));
  CHECK(cudaStreamSynchronize(s));
  CHECK(cudaFree(a));
  CHECK(cudaFreeHost(pinned));
  CHECK(cudaEventDestroy(e));
  CHECK(cudaStreamDestroy(s));
}

int main() {
  for (int wave = 0; wave < 3; ++wave) {  // threads end and others come
    std::vector<std::thread> threads;
    for (int i = 0; i < 12; ++i) threads.emplace_back(work, i);
    for (auto& t : threads) t.join();
  }
  CHECK(cudaDeviceSynchronize());
  return pass("threads");
}
