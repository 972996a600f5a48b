// SPDX-License-Identifier: Apache-2.0
/* Streams: default, per-thread, non-blocking, priorities; what the legacy stream waits for and what not. */
#include "program.h"

static CUcontext ctx;
static CUfunction fill, slow_fill;

/* Each thread has a default stream of its own under CU_STREAM_PER_THREAD. */
static void* per_thread(void* arg) {
  CUdeviceptr p = *(CUdeviceptr*)arg;
  CHECK(cuCtxSetCurrent(ctx));
  launch_fill(fill, CU_STREAM_PER_THREAD, p, 5, 64);
  uint32_t words[64];
  CHECK(cuMemcpyDtoHAsync(words, p, sizeof words, CU_STREAM_PER_THREAD));
  CHECK(cuStreamSynchronize(CU_STREAM_PER_THREAD));
  expect_words(words, 5, 64);
  return NULL;
}

int main(void) {
  start();
  CHECK(cuCtxGetCurrent(&ctx));
  CUmodule mod = load_kernels();
  fill = kernel(mod, "fill");
  slow_fill = kernel(mod, "slow_fill");
  CUfunction copy = kernel(mod, "copy_words"), affine = kernel(mod, "affine");
  CUdeviceptr p, q;
  const uint64_t n = 1024;
  CHECK(cuMemAlloc(&p, n * 4));
  CHECK(cuMemAlloc(&q, n * 4));

  CUstream blocking, free_running, high;
  unsigned flags = 99;
  int priority = 99, least, greatest;
  CUcontext owner;
  CHECK(cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
  CHECK(cuStreamCreate(&free_running, CU_STREAM_NON_BLOCKING));
  CHECK(cuCtxGetStreamPriorityRange(&least, &greatest));
  CHECK(cuStreamCreateWithPriority(&high, CU_STREAM_NON_BLOCKING, greatest));
  CHECK(cuStreamGetFlags(blocking, &flags));
  EXPECT_EQ(flags, CU_STREAM_DEFAULT);
  CHECK(cuStreamGetFlags(free_running, &flags));
  EXPECT_EQ(flags, CU_STREAM_NON_BLOCKING);
  CHECK(cuStreamGetPriority(high, &priority));
  EXPECT_EQ(priority, greatest);
  CHECK(cuStreamGetCtx(high, &owner));
  EXPECT(owner == ctx);
  EXPECT_RESULT(cuStreamCreate(&high, 0xdead), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuStreamQuery(blocking));

  /* one stream keeps order */
  Gate gate;
  launch_fill(fill, blocking, p, 1, n);
  close_gate(&gate, blocking);
  launch_affine(affine, blocking, p, 3, 4, n);
  launch_copy(copy, blocking, q, p, n);
  EXPECT_RESULT(cuStreamQuery(blocking), CUDA_ERROR_NOT_READY);
  open_gate(&gate);
  CHECK(cuStreamSynchronize(blocking));
  CHECK(cuStreamQuery(blocking));
  expect_device_words(q, 7, n);

  /* the legacy stream waits for blocking streams, and they for it */
  launch_slow_fill(slow_fill, blocking, p, 21, n, 20000);
  launch_affine(affine, NULL, p, 2, 0, n);
  launch_affine(affine, blocking, p, 1, 1, n);
  CHECK(cuStreamSynchronize(blocking));
  expect_device_words(p, 43, n);
  launch_slow_fill(slow_fill, CU_STREAM_LEGACY, p, 50, n, 20000);
  launch_affine(affine, blocking, p, 1, 5, n);
  CHECK(cuStreamSynchronize(blocking));
  expect_device_words(p, 55, n);

  /* a non-blocking stream goes on while the legacy stream is busy */
  close_gate(&gate, NULL);
  launch_fill(fill, free_running, q, 9, n);
  CHECK(cuStreamSynchronize(free_running));
  EXPECT_RESULT(cuStreamQuery(NULL), CUDA_ERROR_NOT_READY);
  open_gate(&gate);
  CHECK(cuStreamSynchronize(NULL));
  CHECK(cuStreamQuery(NULL));

  pthread_t t[4];
  CUdeviceptr area[4];
  for (int i = 0; i < 4; ++i) {
    CHECK(cuMemAlloc(&area[i], 256));
    EXPECT_EQ(pthread_create(&t[i], NULL, per_thread, &area[i]), 0);
  }
  for (int i = 0; i < 4; ++i) pthread_join(t[i], NULL);

  /* destroying a busy stream lets its work finish */
  launch_slow_fill(slow_fill, free_running, p, 77, n, 50000);
  CHECK(cuStreamDestroy(free_running));
  EXPECT_RESULT(cuStreamDestroy(free_running), CUDA_ERROR_INVALID_HANDLE);
  CHECK(cuCtxSynchronize());
  expect_device_words(p, 77, n);

  /* many streams, made and destroyed over and over: their places are reused */
  for (int round = 0; round < 40; ++round) {
    CUstream many[64];
    for (int i = 0; i < 64; ++i) CHECK(cuStreamCreate(&many[i], CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < 64; i += 16) launch_fill(fill, many[i], p + i * 4, (uint32_t)(round + i), 1);
    for (int i = 0; i < 64; i += 16) CHECK(cuStreamSynchronize(many[i]));
    for (int i = 0; i < 64; ++i) CHECK(cuStreamDestroy(many[i]));
  }
  expect_device_words(p + 16 * 4, 39 + 16, 1);
  CHECK(cuStreamDestroy(blocking));
  CHECK(cuStreamDestroy(high));
  return pass("streams");
}
