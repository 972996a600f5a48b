// SPDX-License-Identifier: Apache-2.0
// Host functions and callbacks: in their stream's order, each once, with what was given, after what comes before them.
#include "check.cuh"

constexpr size_t kCount = 4096;
constexpr int kTimes = 25;

__global__ void add(uint32_t* words, uint32_t by) {
  for (size_t i = here(); i < kCount; i += threads()) words[i] += by;
}

struct Seen {
  const uint32_t* words;
  int order[2 * kTimes];
  uint32_t first[2 * kTimes];
  int count;
};

struct Call {
  Seen* seen;
  int number;
  cudaStream_t stream;
};

static void note(Call* call) {
  Seen& seen = *call->seen;
  seen.order[seen.count] = call->number;
  seen.first[seen.count++] = seen.words[kCount - 1];
}

static void CUDART_CB host_function(void* call) { note(static_cast<Call*>(call)); }

static void CUDART_CB callback(cudaStream_t stream, cudaError_t status, void* data) {
  Call* call = static_cast<Call*>(data);
  EXPECT(stream == call->stream);
  EXPECT_EQ(status, cudaSuccess);
  note(call);
}

int main() {
  cudaStream_t s;
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  uint32_t *words = zeroes<uint32_t>(kCount), *host;
  CHECK(cudaMallocHost(&host, kCount * 4));
  memset(host, 0xFF, kCount * 4);
  Seen seen{host, {}, {}, 0};
  Call calls[2 * kTimes];
  for (int k = 0; k < 2 * kTimes; ++k) {
    calls[k] = {&seen, k, s};
    add<<<8, 128, 0, s>>>(words, 3);
    LAUNCHED();
    CHECK(cudaMemcpyAsync(host, words, kCount * 4, cudaMemcpyDeviceToHost, s));
    if (k % 2)
      CHECK(cudaStreamAddCallback(s, callback, &calls[k], 0));
    else
      CHECK(cudaLaunchHostFunc(s, host_function, &calls[k]));
  }
  CHECK(cudaStreamSynchronize(s));
  EXPECT_EQ(seen.count, 2 * kTimes);
  for (int k = 0; k < 2 * kTimes; ++k) {
    EXPECT_EQ(seen.order[k], k);
    EXPECT_EQ(seen.first[k], made(3u * (k + 1), 0u));
  }
  CHECK(cudaFreeHost(host));
  CHECK(cudaFree(words));
  CHECK(cudaStreamDestroy(s));
  return ok("callbacks");
}
