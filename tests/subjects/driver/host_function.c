// SPDX-License-Identifier: Apache-2.0
/* Host functions and stream callbacks: run when the stream reaches them, on a thread of the job, in order; the stream
 * waits for them. */
#include "program.h"

enum { kMany = 600 }; /* more than the server's queue of host functions holds */

static _Atomic int calls;
static int order[kMany];
static pthread_t caller;
static uint32_t* pinned;

static void note(void* arg) {
  caller = pthread_self();
  order[atomic_fetch_add(&calls, 1)] = (int)(uintptr_t)arg;
}

static void slow_write(void* arg) {
  usleep(20000);
  for (int i = 0; i < 1024; ++i) pinned[i] = (uint32_t)(uintptr_t)arg;
}

static void callback(CUstream s, CUresult status, void* arg) {
  EXPECT(s != NULL);
  EXPECT_EQ(status, CUDA_SUCCESS);
  EXPECT_EQ(pinned[0], 4); /* what the stream did before is there */
  atomic_store((_Atomic int*)arg, 1);
}

int main(void) {
  start();
  CUmodule mod = load_kernels();
  CUfunction slow_fill = kernel(mod, "slow_fill");
  CUstream s, other;
  CUdeviceptr p;
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CHECK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  CHECK(cuMemAlloc(&p, 4096));
  CHECK(cuMemAllocHost((void**)&pinned, 4096));

  /* not before the kernel, and not on this thread */
  Gate gate;
  launch_slow_fill(slow_fill, s, p, 1, 1024, 20000);
  close_gate(&gate, s);
  CHECK(cuLaunchHostFunc(s, note, (void*)7));
  EXPECT_EQ(atomic_load(&calls), 0);
  open_gate(&gate);
  CHECK(cuStreamSynchronize(s));
  EXPECT_EQ(atomic_load(&calls), 1);
  EXPECT_EQ(order[0], 7);
  EXPECT(!pthread_equal(caller, pthread_self()));

  /* the stream waits: the copy behind the function sees what it wrote */
  for (uintptr_t i = 1; i <= 3; ++i) {
    CHECK(cuLaunchHostFunc(s, slow_write, (void*)(i + 100)));
    CHECK(cuMemcpyHtoDAsync(p, pinned, 4096, s));
    CHECK(cuStreamSynchronize(s));
    expect_device_words(p, (uint32_t)i + 100, 1024);
  }

  /* so does an event behind it, and another stream through the event */
  CUevent e;
  CHECK(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
  CHECK(cuLaunchHostFunc(s, slow_write, (void*)55));
  CHECK(cuEventRecord(e, s));
  CHECK(cuStreamWaitEvent(other, e, 0));
  CHECK(cuMemcpyHtoDAsync(p, pinned, 4096, other));
  CHECK(cuStreamSynchronize(other));
  expect_device_words(p, 55, 1024);

  /* many, in order */
  atomic_store(&calls, 0);
  for (uintptr_t i = 0; i < kMany; ++i) CHECK(cuLaunchHostFunc(s, note, (void*)i));
  CHECK(cuStreamSynchronize(s));
  EXPECT_EQ(atomic_load(&calls), kMany);
  for (int i = 0; i < kMany; ++i) EXPECT_EQ(order[i], i);

  _Atomic int called = 0;
  CHECK(cuMemsetD32Async(p, 4, 1024, s));
  CHECK(cuMemcpyDtoHAsync(pinned, p, 4096, s));
  CHECK(cuStreamAddCallback(s, callback, &called, 0));
  CHECK(cuStreamSynchronize(s));
  EXPECT_EQ(atomic_load(&called), 1);
  EXPECT_RESULT(cuLaunchHostFunc(s, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
  return pass("host_function");
}
