// SPDX-License-Identifier: Apache-2.0
// Eight threads of one process, each with its stream, buffers and errors, in one kernel and its module's first use.
#include <atomic>
#include <thread>

#include "check.cuh"

constexpr int kThreads = 8, kTimes = 200, kCount = 2000;

__global__ void affine(uint32_t* words, uint32_t factor, uint32_t add) {
  for (size_t i = here(); i < kCount; i += threads()) words[i] = words[i] * factor + add;
}

static void work(uint32_t number, const std::atomic<bool>* go) {
  while (!*go) std::this_thread::yield();
  cudaStream_t s;
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  uint32_t *words = device<uint32_t>(kCount), *host, want = number;
  CHECK(cudaMallocHost(&host, kCount * 4));
  for (int i = 0; i < kCount; ++i) host[i] = number;
  CHECK(cudaMemcpyAsync(words, host, kCount * 4, cudaMemcpyHostToDevice, s));
  for (uint32_t k = 0; k < kTimes; ++k) {
    affine<<<4, 128, 0, s>>>(words, 2 * number + 1, k);
    LAUNCHED();
    want = want * (2 * number + 1) + k;
    if (k % 50 == number) {
      affine<<<1, 5000, 0, s>>>(words, 0, 0);  // wrong, and only this thread hears of it
      EXPECT_RESULT(cudaGetLastError(), cudaErrorInvalidConfiguration);
    }
    if (k % 64 == 63) CHECK(cudaStreamSynchronize(s));
  }
  CHECK(cudaMemcpyAsync(host, words, kCount * 4, cudaMemcpyDeviceToHost, s));
  CHECK(cudaStreamSynchronize(s));
  for (int i = 0; i < kCount; ++i) EXPECT_EQ(host[i], made(want, number));
  CHECK(cudaGetLastError());
  CHECK(cudaFreeHost(host));
  CHECK(cudaFree(words));
  CHECK(cudaStreamDestroy(s));
}

int main() {
  std::atomic<bool> go{false};
  std::vector<std::thread> all;
  for (uint32_t k = 0; k < kThreads; ++k) all.emplace_back(work, k, &go);
  go = true;
  for (std::thread& one : all) one.join();
  return ok("host_threads");
}
