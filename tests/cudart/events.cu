// SPDX-License-Identifier: Apache-2.0
// Events: recorded, asked, waited for; their times are sane; what cannot be timed says so.
#include <chrono>

#include "gate.cuh"

__global__ void busy(unsigned long long ns) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < ns);
}

static void states() {
  cudaStream_t s;
  cudaEvent_t e;
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  CHECK(cudaEventCreate(&e));
  CHECK(cudaEventQuery(e));  // never recorded: complete
  CHECK(cudaEventSynchronize(e));
  Gate gate;
  gate.close(s);
  CHECK(cudaEventRecord(e, s));
  EXPECT_EQ(cudaEventQuery(e), cudaErrorNotReady);
  cudaGetLastError();
  gate.open();
  CHECK(cudaEventSynchronize(e));
  CHECK(cudaEventQuery(e));
  CHECK(cudaEventRecordWithFlags(e, s, cudaEventRecordDefault));
  CHECK(cudaStreamSynchronize(s));
  CHECK(cudaEventQuery(e));
  // Destroyed while it is pending: the stream goes on.
  gate.close(s);
  CHECK(cudaEventRecord(e, s));
  CHECK(cudaEventDestroy(e));
  gate.open();
  CHECK(cudaStreamSynchronize(s));
  CHECK(cudaStreamDestroy(s));
}

static void times() {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreateWithFlags(&end, cudaEventBlockingSync));
  busy<<<1, 1>>>(1000);
  CHECK(cudaDeviceSynchronize());
  const auto before = std::chrono::steady_clock::now();
  CHECK(cudaEventRecord(begin, 0));
  busy<<<1, 1>>>(20'000'000);
  LAUNCHED();
  CHECK(cudaEventRecord(end, 0));
  CHECK(cudaEventSynchronize(end));
  const double wall_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - before).count();
  float ms = -1, back_ms = 1;
  CHECK(cudaEventElapsedTime(&ms, begin, end));
  EXPECT_MADE(ms > 18);
  EXPECT(ms >= 0);
  EXPECT(ms <= wall_ms + 1);
  CHECK(cudaEventElapsedTime(&back_ms, end, begin));
  EXPECT(back_ms + ms < 0.01f && back_ms + ms > -0.01f);
  CHECK(cudaEventElapsedTime(&ms, end, end));
  EXPECT(ms == 0);
  cudaEvent_t untimed, unused;
  CHECK(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming));
  CHECK(cudaEventCreate(&unused));
  CHECK(cudaEventRecord(untimed, 0));
  CHECK(cudaEventSynchronize(untimed));
  EXPECT_ERROR(cudaEventElapsedTime(&ms, begin, untimed), cudaErrorInvalidResourceHandle);
  EXPECT_ERROR(cudaEventElapsedTime(&ms, begin, unused), cudaErrorInvalidResourceHandle);
  for (cudaEvent_t e : {begin, end, untimed, unused}) CHECK(cudaEventDestroy(e));
}

int main() {
  states();
  times();
  return ok("events");
}
