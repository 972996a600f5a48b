// SPDX-License-Identifier: Apache-2.0
/* The stream-ordered allocator, and plain frees with work pending: a range is not given to one stream while another can
 * still touch it. */
#include "program.h"

enum { kWords = 4096, kRounds = 60 };

int main(void) {
  CUdevice dev = start();
  CUmodule mod = load_kernels();
  CUfunction slow_fill = kernel(mod, "slow_fill"), fill = kernel(mod, "fill"), copy = kernel(mod, "copy_words");
  CUstream s, other;
  CUmemoryPool pool = NULL;
  CUdeviceptr keep[kRounds];
  const size_t bytes = kWords * 4;
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CHECK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  CHECK(cuDeviceGetDefaultMemPool(&pool, dev));
  EXPECT(pool != NULL);
  cuuint64_t threshold = ~0ull; /* so it holds on to memory all the time */
  CHECK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
  for (int i = 0; i < kRounds; ++i) CHECK(cuMemAlloc(&keep[i], bytes));

  /* freed on s behind a slow writer, allocated on `other` at once: the late write must not land in the new block */
  for (uint32_t i = 0; i < kRounds; ++i) {
    CUdeviceptr a, b;
    CHECK(cuMemAllocAsync(&a, bytes, s));
    launch_slow_fill(slow_fill, s, a, 0xdead0000 + i, kWords, 1500);
    CHECK(cuMemFreeAsync(a, s));
    CHECK(cuMemAllocAsync(&b, bytes, other));
    launch_fill(fill, other, b, i, kWords);
    CHECK(cuStreamSynchronize(other));
    usleep(300);
    launch_copy(copy, other, keep[i], b, kWords);
    CHECK(cuMemFreeAsync(b, other));
  }
  CHECK(cuCtxSynchronize());
  for (uint32_t i = 0; i < kRounds; ++i) expect_device_words(keep[i], i, kWords);

  /* the same stream may have its range back without waiting */
  for (uint32_t i = 0; i < kRounds; ++i) {
    CUdeviceptr a;
    CHECK(cuMemAllocFromPoolAsync(&a, bytes, pool, s));
    launch_slow_fill(slow_fill, s, a, i, kWords, 100);
    CHECK(cuMemcpyDtoDAsync(keep[i], a, bytes, s));
    CHECK(cuMemFreeAsync(a, s));
  }
  CHECK(cuStreamSynchronize(s));
  for (uint32_t i = 0; i < kRounds; ++i) expect_device_words(keep[i], i, kWords);

  /* allocated here, used there after an event, freed there */
  CUevent e;
  CHECK(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
  for (uint32_t i = 0; i < kRounds; ++i) {
    CUdeviceptr a;
    CHECK(cuMemAllocAsync(&a, bytes, s));
    launch_slow_fill(slow_fill, s, a, 7 * i, kWords, 200);
    CHECK(cuEventRecord(e, s));
    CHECK(cuStreamWaitEvent(other, e, 0));
    CHECK(cuMemcpyDtoDAsync(keep[i], a, bytes, other));
    CHECK(cuMemFreeAsync(a, other));
  }
  CHECK(cuStreamSynchronize(other));
  for (uint32_t i = 0; i < kRounds; ++i) expect_device_words(keep[i], 7 * i, kWords);

  /* plain cuMemFree with work pending on a stream: the block's next owner is safe too */
  for (uint32_t i = 0; i < kRounds; ++i) {
    CUdeviceptr a, b;
    CHECK(cuMemAlloc(&a, bytes));
    launch_slow_fill(slow_fill, s, a, 0xbad, kWords, 1500);
    CHECK(cuMemFree(a));
    CHECK(cuMemAlloc(&b, bytes));
    launch_fill(fill, other, b, i, kWords);
    CHECK(cuStreamSynchronize(other));
    usleep(200);
    CHECK(cuMemcpyDtoDAsync(keep[i], b, bytes, other));
    CHECK(cuStreamSynchronize(other));
    CHECK(cuMemFree(b));
  }
  CHECK(cuCtxSynchronize());
  for (uint32_t i = 0; i < kRounds; ++i) expect_device_words(keep[i], i, kWords);

  /* cuMemFree of a pool's memory: the pool has it no more */
  cuuint64_t before = 0, used = 0;
  CUdeviceptr of_pool;
  CHECK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &before));
  CHECK(cuMemAllocFromPoolAsync(&of_pool, bytes, pool, s));
  CHECK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
  EXPECT_EQ(used, before + bytes);
  CHECK(cuMemFree(of_pool));
  CHECK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
  EXPECT_EQ(used, before);

  CHECK(cuMemPoolTrimTo(pool, 0));
  EXPECT_RESULT(cuMemFreeAsync(0x1234, s), CUDA_ERROR_INVALID_VALUE);
  return pass("pool");
}
