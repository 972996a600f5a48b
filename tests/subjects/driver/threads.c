// SPDX-License-Identifier: Apache-2.0
/* Threads: eight launch at once on streams of their own; order across a handshake of two threads is kept. */
#include "program.h"

enum { kThreads = 8, kLaunches = 400, kWords = 64, kHandshakes = 300, kShortLived = 600 };

static CUcontext ctx;
static CUfunction fill, affine;
static CUstream shared_stream;
static CUdeviceptr shared_words;
static _Atomic int turn;

static void* worker(void* arg) {
  const uint32_t me = (uint32_t)(uintptr_t)arg;
  CHECK(cuCtxSetCurrent(ctx));
  CUstream s;
  CUdeviceptr p;
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CHECK(cuMemAlloc(&p, kWords * 4));
  launch_fill(fill, s, p, me, kWords);
  uint32_t want = me;
  for (uint32_t i = 0; i < kLaunches; ++i) {
    launch_affine(affine, s, p, 5, me + i, kWords);
    want = want * 5 + me + i;
    if (i % 100 == 99) {
      uint32_t words[kWords];
      CHECK(cuMemcpyDtoHAsync(words, p, sizeof words, s));
      CHECK(cuStreamSynchronize(s));
      expect_words(words, want, kWords);
    }
    if (i % 50 == 25) { /* allocate and free between, as frameworks do */
      CUdeviceptr q;
      CHECK(cuMemAlloc(&q, 1000 + i));
      CHECK(cuMemsetD8Async(q, 1, 1000 + i, s));
      CHECK(cuMemFree(q));
    }
  }
  CHECK(cuMemFree(p));
  CHECK(cuStreamDestroy(s));
  return NULL;
}

/* Two threads take turns on one stream: words = words * 2 + 0 and words = words + 1 do not commute. */
static void* player(void* arg) {
  const int me = (int)(uintptr_t)arg;
  CHECK(cuCtxSetCurrent(ctx));
  for (int i = 0; i < kHandshakes; ++i) {
    while (atomic_load(&turn) != me) sched_yield();
    launch_affine(affine, shared_stream, shared_words, me ? 1 : 2, me ? 1 : 0, kWords);
    atomic_store(&turn, !me);
  }
  return NULL;
}

static void* short_lived(void* arg) {
  CHECK(cuCtxSetCurrent(ctx));
  uint32_t words[4];
  CUdeviceptr p;
  CHECK(cuMemAlloc(&p, sizeof words));
  CHECK(cuMemsetD32(p, (uint32_t)(uintptr_t)arg, 4));
  CHECK(cuMemcpyDtoH(words, p, sizeof words));
  expect_words(words, (uint32_t)(uintptr_t)arg, 4);
  CHECK(cuMemFree(p));
  return NULL;
}

int main(void) {
  start();
  CHECK(cuCtxGetCurrent(&ctx));
  CUmodule mod = load_kernels();
  fill = kernel(mod, "fill");
  affine = kernel(mod, "affine");
  pthread_t t[kThreads];
  for (uintptr_t i = 0; i < kThreads; ++i) EXPECT_EQ(pthread_create(&t[i], NULL, worker, (void*)i), 0);
  for (int i = 0; i < kThreads; ++i) pthread_join(t[i], NULL);

  CHECK(cuStreamCreate(&shared_stream, CU_STREAM_NON_BLOCKING));
  CHECK(cuMemAlloc(&shared_words, kWords * 4));
  launch_fill(fill, shared_stream, shared_words, 1, kWords);
  uint32_t want = 1;
  for (int i = 0; i < kHandshakes; ++i) want = want * 2 + 1;
  for (uintptr_t i = 0; i < 2; ++i) EXPECT_EQ(pthread_create(&t[i], NULL, player, (void*)i), 0);
  for (int i = 0; i < 2; ++i) pthread_join(t[i], NULL);
  CHECK(cuStreamSynchronize(shared_stream));
  expect_device_words(shared_words, want, kWords);

  /* threads come and go, more than there are reply slots: each gives its own back */
  for (uintptr_t i = 0; i < kShortLived; i += kThreads) {
    for (uintptr_t k = 0; k < kThreads; ++k) EXPECT_EQ(pthread_create(&t[k], NULL, short_lived, (void*)(i + k)), 0);
    for (int k = 0; k < kThreads; ++k) pthread_join(t[k], NULL);
  }
  return pass("threads");
}
