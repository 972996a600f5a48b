// SPDX-License-Identifier: Apache-2.0
/* Every way to wait for a stream, and to look until it is done, ends soon; on a device that tells of completions only where
 * somebody asks for them too. It needs no kernel. */
#include <time.h>

#include "program.h"

enum { kBytes = 1 << 16 };
static CUdeviceptr d;
static CUcontext ctx;

static void work(CUstream s) {
  for (int i = 0; i < 3; ++i) CHECK(cuMemsetD8Async(d, (unsigned char)i, kBytes, s));
}

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Looks until `query` is done. */
#define LOOK(query)                                      \
  do {                                                   \
    const double begun_ = now_s();                       \
    for (CUresult r_; (r_ = (query)) != CUDA_SUCCESS;) { \
      EXPECT_EQ(r_, CUDA_ERROR_NOT_READY);               \
      EXPECT(now_s() - begun_ < 20);                     \
    }                                                    \
  } while (0)

static void* waiter(void* arg) {
  CHECK(cuCtxSetCurrent(ctx));
  CHECK(cuStreamSynchronize(*(CUstream*)arg));
  return NULL;
}

int main(void) {
  start();
  CHECK(cuCtxGetCurrent(&ctx));
  CHECK(cuMemAlloc(&d, kBytes));
  CUstream a, b;
  CHECK(cuStreamCreate(&a, CU_STREAM_DEFAULT));
  CHECK(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
  CUevent event;
  CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  uint8_t host[16];

  for (int round = 0; round < 50; ++round) {
    work(a);
    CHECK(cuStreamSynchronize(a));
    work(NULL);
    CHECK(cuStreamSynchronize(NULL));
    work(a);
    work(b);
    CHECK(cuCtxSynchronize());
    CHECK(cuStreamQuery(a));
    CHECK(cuStreamQuery(b));

    work(b);
    CHECK(cuEventRecord(event, b));
    work(b);
    CHECK(cuEventSynchronize(event));
    CHECK(cuEventRecord(event, b));
    LOOK(cuEventQuery(event));
    work(a);
    LOOK(cuStreamQuery(a));

    work(b);
    CHECK(cuEventRecord(event, b));
    CHECK(cuStreamWaitEvent(a, event, 0));
    work(a);
    CHECK(cuStreamSynchronize(a));
    work(a);
    CHECK(cuMemcpyDtoH(host, d, sizeof host));
    EXPECT_EQ(host[15], 2);

    /* Two threads wait for one position. */
    work(a);
    pthread_t thread;
    EXPECT(pthread_create(&thread, NULL, waiter, &a) == 0);
    CHECK(cuStreamSynchronize(a));
    pthread_join(thread, NULL);
  }

  /* An event outlives its stream, and memory that goes back in a stream's order waits for it. */
  work(b);
  CHECK(cuEventRecord(event, b));
  CHECK(cuStreamDestroy(b));
  CHECK(cuEventSynchronize(event));
  CUdeviceptr p;
  CHECK(cuMemAllocAsync(&p, kBytes, a));
  CHECK(cuMemsetD8Async(p, 9, kBytes, a));
  CHECK(cuMemFreeAsync(p, a));
  CHECK(cuMemFree(d));
  return pass("waits");
}
