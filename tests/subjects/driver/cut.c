// SPDX-License-Identifier: Apache-2.0
/* For tests/integration/test_cut.py, which cuts, moves and restores the server under this program.
 *
 *   cut lock      a callback needs a lock whose holder waits for the server
 *   cut state     everything that a restore must keep; says "ready", goes on when a line comes on stdin
 *   cut held      a pool holds on to memory; on another GPU it gives that back
 *   cut fault     a sticky error stays, with its text
 *   cut lost      calls until one fails; says how long the failing call took
 *   cut busy [S]  says "ready" with S seconds of kernel under way, or six
 *   cut chain S   S seconds of dependent work on several streams and threads, checked to the last word */
#include <time.h>

#include "program.h"

enum { kWords = 4096 };

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void wait_for_line(void) {
  char line[16];
  printf("ready\n");
  fflush(stdout);
  EXPECT(fgets(line, sizeof line, stdin));
}

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static CUcontext ctx;
static CUfunction affine, slow_fill;
static int seconds;

static void needs_lock(void* counter) {
  pthread_mutex_lock(&mu);
  ++*(int*)counter;
  pthread_mutex_unlock(&mu);
}

static int lock_case(void) {
  CUstream s, other;
  CUdeviceptr p;
  int calls = 0;
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CHECK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  CHECK(cuMemAlloc(&p, kWords * 4));
  const double until = now_s() + seconds;
  int rounds = 0;
  for (; now_s() < until; ++rounds) {
    pthread_mutex_lock(&mu);
    CHECK(cuLaunchHostFunc(s, needs_lock, &calls)); /* waits for the lock that we hold */
    for (int i = 0; i < 20; ++i) {                  /* and we wait for the server, several times */
      size_t free_bytes, total;
      CHECK(cuMemGetInfo(&free_bytes, &total));
      launch_slow_fill(slow_fill, other, p, (uint32_t)i, kWords, 200);
      CHECK(cuStreamSynchronize(other));
    }
    pthread_mutex_unlock(&mu);
    CHECK(cuStreamSynchronize(s));
  }
  EXPECT_EQ(calls, rounds);
  return pass("cut lock");
}

static int state_case(CUmodule mod) {
  CUevent before, after, never, gone_stream;
  CUstream s, temporary;
  CUdeviceptr p, q;
  float ms, again;
  uint32_t words[kWords];
  int priority;
  unsigned flags;
  CHECK(cuStreamCreateWithPriority(&s, CU_STREAM_NON_BLOCKING, -1));
  CHECK(cuStreamCreate(&temporary, CU_STREAM_DEFAULT));
  CHECK(cuEventCreate(&before, CU_EVENT_DEFAULT));
  CHECK(cuEventCreate(&after, CU_EVENT_DEFAULT));
  CHECK(cuEventCreate(&never, CU_EVENT_DEFAULT));
  CHECK(cuEventCreate(&gone_stream, CU_EVENT_DEFAULT));
  CHECK(cuMemAlloc(&p, sizeof words));
  CHECK(cuMemAlloc(&q, 3 << 20));
  CHECK(cuMemFree(q));
  CHECK(cuMemAlloc(&q, 100));
  uint32_t* pinned;
  CHECK(cuMemAllocHost((void**)&pinned, 1 << 20));
  for (int i = 0; i < (1 << 18); ++i) pinned[i] = (uint32_t)i * 3;
  CHECK(cuEventRecord(gone_stream, temporary));
  CHECK(cuStreamDestroy(temporary));
  CHECK(cuEventRecord(before, s));
  launch_slow_fill(slow_fill, s, p, 77, kWords, 5000);
  CHECK(cuEventRecord(after, s));
  CHECK(cuStreamSynchronize(s));
  CHECK(cuEventElapsedTime(&ms, before, after));
  size_t free_before, free_after, total;
  CHECK(cuMemGetInfo(&free_before, &total));
  CUdeviceptr global, global_after;
  size_t global_bytes;
  CHECK(cuModuleGetGlobal(&global, &global_bytes, mod, "table"));
  CHECK(cuMemsetD8(global, 9, global_bytes));

  wait_for_line();

  CHECK(cuEventElapsedTime(&again, before, after));
  EXPECT(ms == again);
  CHECK(cuEventQuery(gone_stream));
  EXPECT_RESULT(cuEventElapsedTime(&again, never, after), CUDA_ERROR_INVALID_HANDLE);
  CHECK(cuStreamGetPriority(s, &priority));
  CHECK(cuStreamGetFlags(s, &flags));
  EXPECT_EQ(flags, CU_STREAM_NON_BLOCKING);
  CHECK(cuModuleGetGlobal(&global_after, &global_bytes, mod, "table"));
  EXPECT_EQ(global, global_after);
  unsigned char bytes[64];
  CHECK(cuMemcpyDtoH(bytes, global, global_bytes < 64 ? global_bytes : 64));
  EXPECT_EQ(bytes[0], 9);
  CHECK(cuMemGetInfo(&free_after, &total));
  EXPECT_EQ(free_before, free_after);
  CHECK(cuMemcpyDtoH(words, p, sizeof words));
  expect_words(words, 77, kWords);
  for (int i = 0; i < (1 << 18); ++i) EXPECT_EQ(pinned[i], (uint32_t)i * 3);
  CHECK(cuStreamWaitEvent(s, after, 0));
  launch_affine(affine, s, p, 2, 1, kWords);
  CHECK(cuEventRecord(never, s));
  CHECK(cuStreamSynchronize(s));
  CHECK(cuEventElapsedTime(&again, after, never));
  EXPECT(again > 0 && again < 60000);
  CHECK(cuMemcpyDtoHAsync(pinned, p, sizeof words, s));
  CHECK(cuStreamSynchronize(s));
  expect_words(pinned, 155, kWords);
  CHECK(cuMemFree(q));
  CHECK(cuMemFree(p));
  CHECK(cuMemFreeHost(pinned));
  CHECK(cuEventDestroy(before));
  CHECK(cuStreamDestroy(s));
  CHECK(cuModuleUnload(mod));
  return pass("cut state");
}

static int fault_case(CUmodule mod) {
  int code = CUDA_ERROR_ASSERT;
  void* params[] = {&code};
  const CUresult r = launch1(kernel(mod, "fail"), NULL, params);
  EXPECT(r == CUDA_SUCCESS || r == CUDA_ERROR_ASSERT);
  EXPECT_RESULT(cuCtxSynchronize(), CUDA_ERROR_ASSERT);
  wait_for_line();
  EXPECT_RESULT(cuCtxSynchronize(), CUDA_ERROR_ASSERT);
  CUdeviceptr p;
  EXPECT_RESULT(cuMemAlloc(&p, 64), CUDA_ERROR_ASSERT);
  return pass("cut fault");
}

static int busy_case(CUmodule mod, int kernel_seconds) {
  CUstream s;
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  launch_slow(kernel(mod, "slow"), s, (uint32_t)kernel_seconds * 1000000);
  size_t free_bytes,
      total; /* an answer: the server has come to the launch, which a cut could otherwise leave in the ring */
  CHECK(cuMemGetInfo(&free_bytes, &total));
  wait_for_line();
  CHECK(cuStreamSynchronize(s));
  return pass("cut busy");
}

static int held_case(void) {
  enum { kLarge = 40 << 20, kBlocks = 8 };
  CUstream s;
  CUdevice dev;
  CUmemoryPool pool;
  CUdeviceptr large[kBlocks], small, other;
  cuuint64_t threshold = ~0ull, before = 0, after = 0;
  size_t free_before, free_after, total;
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CHECK(cuCtxGetDevice(&dev));
  CHECK(cuDeviceGetDefaultMemPool(&pool, dev));
  CHECK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < kBlocks; ++i) CHECK(cuMemAllocAsync(&large[i], kLarge, s));
    for (int i = 0; i < kBlocks; ++i) CHECK(cuMemFreeAsync(large[i], s));
  }
  CHECK(cuMemAllocAsync(&small, kWords * 4, s));
  launch_slow_fill(slow_fill, s, small, 3, kWords, 3000);
  CHECK(cuMemFreeAsync(small, s));
  CHECK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &before));
  EXPECT(before >= 6 * (cuuint64_t)kLarge);
  CHECK(cuMemGetInfo(&free_before, &total));
  wait_for_line();
  CHECK(cuMemGetInfo(&free_after, &total));
  EXPECT_EQ(free_before, free_after);
  CHECK(cuMemAllocAsync(&large[0], kLarge, s)); /* with this the server says so */
  CHECK(cuMemGetInfo(&free_after, &total));
  CHECK(cuMemFreeAsync(large[0], s));
  CHECK(cuMemAllocAsync(&other, kWords * 4, s));
  CHECK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &after));
  EXPECT_EQ(after, kWords * 4);
  launch_affine(affine, s, other, 0, 7, kWords);
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < kBlocks; ++i) CHECK(cuMemAllocAsync(&large[i], kLarge, s));
    for (int i = 0; i < kBlocks; ++i) CHECK(cuMemFreeAsync(large[i], s));
  }
  CHECK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &after));
  EXPECT(after >= 6 * (cuuint64_t)kLarge); /* and here there is room, too */
  CHECK(cuStreamSynchronize(s));
  expect_device_words(other, 7, kWords);
  return pass("cut held");
}

static int lost_case(void) {
  wait_for_line();
  for (;;) {
    size_t free_bytes, total;
    const double began = now_s();
    const CUresult r = cuMemGetInfo(&free_bytes, &total);
    if (r == CUDA_SUCCESS) continue;
    EXPECT_RESULT(r, CUDA_ERROR_DEVICE_UNAVAILABLE);
    printf("failed after %.3f\n", now_s() - began);
    return pass("cut lost");
  }
}

static void* chain(void* arg) {
  const uint32_t me = (uint32_t)(uintptr_t)arg;
  CHECK(cuCtxSetCurrent(ctx));
  CUstream s;
  CUevent e;
  CUdeviceptr p;
  CHECK(cuStreamCreate(&s, me % 2 ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT));
  CHECK(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
  CHECK(cuMemAlloc(&p, kWords * 4));
  CHECK(cuMemsetD32Async(p, me, kWords, s));
  uint32_t want = me, words[kWords];
  const double until = now_s() + seconds;
  for (uint32_t i = 0; now_s() < until; ++i) {
    launch_affine(affine, s, p, 5, i, kWords);
    want = want * 5 + i;
    if (i % 16 == 3) {
      CUdeviceptr q;
      CHECK(cuMemAlloc(&q, kWords * 4));
      CHECK(cuMemcpyDtoDAsync(q, p, kWords * 4, s));
      CHECK(cuMemcpyDtoDAsync(p, q, kWords * 4, s));
      CHECK(cuEventRecord(e, s));
      CHECK(cuMemFree(q));
    }
    if (i % 64 == 7) {
      CHECK(cuMemcpyDtoHAsync(words, p, sizeof words, s));
      CHECK(cuStreamSynchronize(s));
      expect_words(words, want, kWords);
      while (cuEventQuery(e) == CUDA_ERROR_NOT_READY) sched_yield();
    }
  }
  CHECK(cuMemcpyDtoHAsync(words, p, sizeof words, s));
  CHECK(cuStreamSynchronize(s));
  expect_words(words, want, kWords);
  return NULL;
}

int main(int argc, char** argv) {
  EXPECT(argc >= 2);
  seconds = argc > 2 ? atoi(argv[2]) : 3;
  start();
  CHECK(cuCtxGetCurrent(&ctx));
  CUmodule mod = load_kernels();
  affine = kernel(mod, "affine");
  slow_fill = kernel(mod, "slow_fill");
  if (!strcmp(argv[1], "lock")) return lock_case();
  if (!strcmp(argv[1], "state")) return state_case(mod);
  if (!strcmp(argv[1], "held")) return held_case();
  if (!strcmp(argv[1], "fault")) return fault_case(mod);
  if (!strcmp(argv[1], "busy")) return busy_case(mod, argc > 2 ? seconds : 6);
  if (!strcmp(argv[1], "lost")) return lost_case();
  pthread_t threads[4];
  for (uintptr_t i = 0; i < 4; ++i) EXPECT(pthread_create(&threads[i], NULL, chain, (void*)(i + 1)) == 0);
  for (int i = 0; i < 4; ++i) pthread_join(threads[i], NULL);
  return pass("cut chain");
}
