// SPDX-License-Identifier: Apache-2.0
/* Events: record, query, wait, elapsed time, re-recording, waiting for an event that was never recorded. */
#include "program.h"

int main(void) {
  start();
  CUmodule mod = load_kernels();
  CUfunction slow = kernel(mod, "slow"), fill = kernel(mod, "fill"), affine = kernel(mod, "affine");
  CUfunction slow_fill = kernel(mod, "slow_fill");
  CUstream a, b;
  CUevent start_event, end_event, plain, blocking;
  CUdeviceptr p;
  const uint64_t n = 512;
  float ms = -1;
  CHECK(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
  CHECK(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
  CHECK(cuEventCreate(&start_event, CU_EVENT_DEFAULT));
  CHECK(cuEventCreate(&end_event, CU_EVENT_DEFAULT));
  CHECK(cuEventCreate(&plain, CU_EVENT_DISABLE_TIMING));
  CHECK(cuEventCreate(&blocking, CU_EVENT_BLOCKING_SYNC));
  CHECK(cuMemAlloc(&p, n * 4));
  EXPECT_RESULT(cuEventCreate(&plain, 0xdead0), CUDA_ERROR_INVALID_VALUE);

  /* never recorded: complete, and waiting for it is no wait */
  CHECK(cuEventQuery(plain));
  CHECK(cuEventSynchronize(plain));
  CHECK(cuStreamWaitEvent(a, plain, 0));
  EXPECT_RESULT(cuEventElapsedTime(&ms, start_event, end_event), CUDA_ERROR_INVALID_HANDLE);

  /* time between two events is the work between them */
  CHECK(cuEventRecord(start_event, a));
  launch_slow(slow, a, 30000);
  Gate gate;
  close_gate(&gate, a);
  CHECK(cuEventRecord(end_event, a));
  EXPECT_RESULT(cuEventQuery(end_event), CUDA_ERROR_NOT_READY);
  EXPECT_RESULT(cuEventElapsedTime(&ms, start_event, end_event), CUDA_ERROR_NOT_READY);
  open_gate(&gate);
  CHECK(cuEventSynchronize(end_event));
  CHECK(cuEventQuery(end_event));
  CHECK(cuEventElapsedTime(&ms, start_event, end_event));
  EXPECT(ms >= 29.9f);
  CHECK(cuEventRecord(plain, a));
  CHECK(cuEventSynchronize(plain));
  EXPECT_RESULT(cuEventElapsedTime(&ms, start_event, plain), CUDA_ERROR_INVALID_HANDLE);

  /* b waits for a */
  for (uint32_t i = 0; i < 20; ++i) {
    launch_slow_fill(slow_fill, a, p, i, n, 2000);
    CHECK(cuEventRecord(plain, a));
    CHECK(cuStreamWaitEvent(b, plain, 0));
    launch_affine(affine, b, p, 2, 1, n);
    CHECK(cuEventRecord(blocking, b));
    CHECK(cuEventSynchronize(blocking));
    CHECK(cuStreamWaitEvent(a, blocking, 0));
    expect_device_words(p, 2 * i + 1, n);
  }

  /* a wait means the record before it, not one that comes later */
  launch_slow_fill(slow_fill, a, p, 100, n, 20000);
  CHECK(cuEventRecord(plain, a));
  CHECK(cuStreamWaitEvent(b, plain, 0));
  close_gate(&gate, a);
  CHECK(cuEventRecord(plain, a)); /* re-recorded behind what does not end yet */
  launch_affine(affine, b, p, 1, 1, n);
  CHECK(cuStreamSynchronize(b));
  EXPECT_RESULT(cuEventQuery(plain), CUDA_ERROR_NOT_READY);
  open_gate(&gate);
  CHECK(cuEventSynchronize(plain));
  expect_device_words(p, 101, n);

  /* polling alone sees completion */
  launch_fill(fill, b, p, 3, n);
  CHECK(cuEventRecord(plain, b));
  CUresult r;
  while ((r = cuEventQuery(plain)) == CUDA_ERROR_NOT_READY) {}
  CHECK(r);
  expect_device_words(p, 3, n);

  /* an event may go while its record is pending: the wait that names it stays */
  launch_slow_fill(slow_fill, a, p, 60, n, 30000);
  CHECK(cuEventRecord(end_event, a));
  CHECK(cuStreamWaitEvent(b, end_event, 0));
  CHECK(cuEventDestroy(end_event));
  launch_affine(affine, b, p, 1, 6, n);
  CHECK(cuStreamSynchronize(b));
  expect_device_words(p, 66, n);
  EXPECT_RESULT(cuEventQuery(end_event), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_RESULT(cuEventRecord(NULL, a), CUDA_ERROR_INVALID_HANDLE);
  CHECK(cuEventRecord(plain, NULL));
  CHECK(cuEventSynchronize(plain));
  return pass("events");
}
