// SPDX-License-Identifier: Apache-2.0
// Compiled for the per-thread default stream: a null stream is the thread's own, in every form of call.
#define CUDA_API_PER_THREAD_DEFAULT_STREAM 1
#include "program.h"

int main() {
  constexpr size_t kBytes = 1 << 16;
  void* a = nullptr;
  unsigned char out[64];
  CHECK(cudaMalloc(&a, kBytes));
  // The thread's stream is held; the legacy stream's commands must not wait for it in another thread.
  Gate gate;
  gate.close(nullptr);
  EXPECT_RESULT(cudaStreamQuery(nullptr), cudaErrorNotReady);
  EXPECT_RESULT(cudaStreamQuery(cudaStreamPerThread), cudaErrorNotReady);
  std::thread([a] {
    void* own = nullptr;
    CHECK(cudaMalloc(&own, kBytes));
    CHECK(cudaMemset(own, 3, kBytes));
    unsigned char seen = 0;
    CHECK(cudaMemcpy(&seen, own, 1, cudaMemcpyDeviceToHost));  // waits for this thread's stream only
    EXPECT(seen == 3);
    CHECK(cudaMemcpyAsync(own, &seen, 1, cudaMemcpyHostToDevice, nullptr));
    CHECK(cudaStreamSynchronize(nullptr));
    CHECK(cudaStreamQuery(nullptr));
  }).join();
  CHECK(cudaMemset(a, 5, kBytes));  // behind the gate
  EXPECT_RESULT(cudaStreamQuery(nullptr), cudaErrorNotReady);
  gate.open();
  CHECK(cudaMemcpy2D(out, 8, a, 8, 8, 8, cudaMemcpyDeviceToHost));
  for (const unsigned char c : out) EXPECT(c == 5);
  cudaEvent_t e;
  CHECK(cudaEventCreate(&e));
  CHECK(cudaEventRecord(e, nullptr));
  CHECK(cudaEventSynchronize(e));
  CHECK(cudaFreeAsync(a, nullptr));
  CHECK(cudaStreamSynchronize(nullptr));
  return pass("per_thread");
}
