// SPDX-License-Identifier: Apache-2.0
// Streams: order within one, order across them by events, the legacy stream's rule, priorities, flags.
#include "gate.cuh"

constexpr size_t kCount = 1 << 16;

// Any other order of several of these gives other words.
__global__ void affine(uint32_t* words, uint32_t factor, uint32_t add) {
  for (size_t i = here(); i < kCount; i += threads()) words[i] = words[i] * factor + add;
}

static void order_within_a_stream() {
  cudaStream_t s;
  CHECK(cudaStreamCreate(&s));
  uint32_t* words = device<uint32_t>(kCount);
  CHECK(cudaMemsetAsync(words, 0, kCount * 4, s));
  uint32_t want = 0;
  for (uint32_t k = 1; k <= 20; ++k) {
    affine<<<32, 128, 0, s>>>(words, k, k + 1);
    LAUNCHED();
    want = want * k + k + 1;
  }
  std::vector<uint32_t> got(kCount, 77);
  CHECK(cudaMemcpyAsync(got.data(), words, kCount * 4, cudaMemcpyDeviceToHost, s));
  CHECK(cudaStreamSynchronize(s));
  EXPECT_ALL(got, made(want, 0u));
  CHECK(cudaStreamQuery(s));
  CHECK(cudaStreamDestroy(s));
  CHECK(cudaFree(words));
}

// Two streams take turns on one buffer; only events put them in order.
static void order_across_streams() {
  cudaStream_t s[2];
  cudaEvent_t e[2];
  for (int k = 0; k < 2; ++k) {
    CHECK(cudaStreamCreateWithFlags(&s[k], cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&e[k], cudaEventDisableTiming));
  }
  uint32_t* words = zeroes<uint32_t>(kCount);
  uint32_t want = 0;
  for (uint32_t k = 0; k < 40; ++k) {
    const uint32_t me = k % 2;
    if (k) CHECK(cudaStreamWaitEvent(s[me], e[1 - me], 0));
    affine<<<32, 128, 0, s[me]>>>(words, 2 * k + 1, k);
    LAUNCHED();
    CHECK(cudaEventRecord(e[me], s[me]));
    want = want * (2 * k + 1) + k;
  }
  CHECK(cudaEventSynchronize(e[1]));
  EXPECT_ALL(back(words, kCount), made(want, 0u));
  for (int k = 0; k < 2; ++k) {
    CHECK(cudaEventDestroy(e[k]));
    CHECK(cudaStreamDestroy(s[k]));
  }
  CHECK(cudaFree(words));
}

// The legacy stream waits for blocking streams and they for it; a non-blocking one goes its own way.
static void the_legacy_stream() {
  cudaStream_t blocking, free_one;
  CHECK(cudaStreamCreate(&blocking));
  CHECK(cudaStreamCreateWithFlags(&free_one, cudaStreamNonBlocking));
  uint32_t* words = zeroes<uint32_t>(kCount);
  uint32_t* others = zeroes<uint32_t>(kCount);
  affine<<<1, 32, 0, free_one>>>(others, 1, 0);  // its module is loaded before any gate is closed
  LAUNCHED();
  CHECK(cudaDeviceSynchronize());
  Gate gate;
  gate.close(blocking);
  affine<<<32, 128, 0, blocking>>>(words, 1, 5);
  affine<<<32, 128>>>(words, 3, 1);
  affine<<<32, 128, 0, blocking>>>(words, 7, 2);
  affine<<<32, 128, 0, free_one>>>(others, 1, 9);
  LAUNCHED();
  CHECK(cudaStreamSynchronize(free_one));
  EXPECT_EQ(cudaStreamQuery(cudaStreamLegacy), cudaErrorNotReady);
  EXPECT_EQ(cudaStreamQuery(blocking), cudaErrorNotReady);
  cudaGetLastError();  // not ready is no failure; whether it is kept is not said
  gate.open();
  CHECK(cudaStreamSynchronize(blocking));
  EXPECT_ALL(back(words, kCount), made((5u * 3 + 1) * 7 + 2, 0u));
  EXPECT_ALL(back(others, kCount), made(9u, 0u));
  CHECK(cudaStreamDestroy(blocking));
  CHECK(cudaStreamDestroy(free_one));
  CHECK(cudaFree(words));
  CHECK(cudaFree(others));
}

static void priorities_and_flags() {
  int least = -1, greatest = 1;
  CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  EXPECT(greatest <= least);
  const int wished[] = {least, greatest, greatest - 10, least + 10};
  for (int wish : wished) {
    cudaStream_t s;
    int got = 99;
    unsigned flags = 99;
    CHECK(cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, wish));
    CHECK(cudaStreamGetPriority(s, &got));
    EXPECT_EQ(got, wish > least ? least : wish < greatest ? greatest : wish);  // clamped, not refused
    CHECK(cudaStreamGetFlags(s, &flags));
    EXPECT_EQ(flags, cudaStreamNonBlocking);
    CHECK(cudaStreamDestroy(s));
  }
  cudaStream_t s[2];
  unsigned long long id[2] = {0, 0};
  unsigned flags = 99;
  for (int k = 0; k < 2; ++k) {
    CHECK(cudaStreamCreate(&s[k]));
    CHECK(cudaStreamGetId(s[k], &id[k]));
  }
  EXPECT(id[0] != id[1]);
  CHECK(cudaStreamGetFlags(s[0], &flags));
  EXPECT_EQ(flags, cudaStreamDefault);
  for (cudaStream_t one : s) CHECK(cudaStreamDestroy(one));
}

// Destroying a stream does not wait, and what is in it still happens.
static void destroyed_with_work_in_it() {
  cudaStream_t s;
  CHECK(cudaStreamCreate(&s));
  uint32_t* words = zeroes<uint32_t>(kCount);
  Gate gate;
  gate.close(s);
  affine<<<32, 128, 0, s>>>(words, 1, 42);
  LAUNCHED();
  CHECK(cudaStreamDestroy(s));
  gate.open();
  CHECK(cudaDeviceSynchronize());
  EXPECT_ALL(back(words, kCount), made(42u, 0u));
  CHECK(cudaFree(words));
}

int main() {
  order_within_a_stream();
  order_across_streams();
  the_legacy_stream();
  priorities_and_flags();
  destroyed_with_work_in_it();
  return ok("streams");
}
