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

  /* within its release threshold a pool holds on to what is freed, and others may have it all the same */
  cuuint64_t threshold = ~0ull, reserved = 0;
  enum { kLarge = 40 << 20, kBlocks = 8 };
  CUdeviceptr large[kBlocks];
  size_t free_bytes = 0, free_held = 0, total = 0;
  CHECK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &before));
  CHECK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
  CHECK(cuMemGetInfo(&free_bytes, &total));
  for (int round = 0; round < 3; ++round) { /* the first is where it learns that the GPU has room */
    for (int i = 0; i < kBlocks; ++i) CHECK(cuMemAllocAsync(&large[i], kLarge, s));
    for (int i = 0; i < kBlocks; ++i) CHECK(cuMemFreeAsync(large[i], s));
    CHECK(cuStreamSynchronize(s));
  }
  CHECK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved));
  EXPECT(reserved >= before + (kBlocks - 2) * (cuuint64_t)kLarge);
  CHECK(cuMemGetInfo(&free_held, &total));
  EXPECT_EQ(free_held, free_bytes);
  CHECK(cuMemAlloc(&large[0], 4 * (size_t)kLarge));
  CHECK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &used));
  EXPECT(used < reserved);
  CHECK(cuMemFree(large[0]));
  CHECK(cuMemPoolTrimTo(pool, 0));
  CHECK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved));
  EXPECT_EQ(reserved, before);

  /* a small block comes back to its own stream at once, as another allocation; nobody else has it meanwhile */
  CUdeviceptr small, again, elsewhere;
  unsigned long long id = 0, id_again = 0;
  CHECK(cuMemAllocAsync(&small, bytes, s));
  CHECK(cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, small));
  CHECK(cuMemGetInfo(&free_bytes, &total));
  launch_slow_fill(slow_fill, s, small, 5, kWords, 1500);
  CHECK(cuMemFreeAsync(small, s));
  CHECK(cuMemGetInfo(&free_held, &total));
  EXPECT_EQ(free_held, free_bytes + bytes);
  EXPECT_RESULT(cuMemFreeAsync(small, s), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemFree(small), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuPointerGetAttribute(&id_again, CU_POINTER_ATTRIBUTE_BUFFER_ID, small), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemAllocAsync(&elsewhere, bytes, other));
  EXPECT(elsewhere != small);
  CHECK(cuMemAllocAsync(&again, bytes, s));
  EXPECT_EQ(again, small);
  CHECK(cuPointerGetAttribute(&id_again, CU_POINTER_ATTRIBUTE_BUFFER_ID, again));
  EXPECT(id_again != id);
  launch_fill(fill, s, again, 9, kWords); /* behind the slow one */
  CHECK(cuStreamSynchronize(s));
  expect_device_words(again, 9, kWords);
  CHECK(cuMemFreeAsync(again, s));
  CHECK(cuMemFreeAsync(elsewhere, other));
  /* what is held is not missing where memory runs short */
  CHECK(cuMemGetInfo(&free_bytes, &total));
  CHECK(cuMemAlloc(&large[0], free_bytes / (1 << 20) * (1 << 20)));
  CHECK(cuMemFree(large[0]));
  EXPECT_RESULT(cuMemFreeAsync(0x1234, s), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuStreamDestroy(s));
  CHECK(cuMemFreeAsync(keep[0], other));
  return pass("pool");
}
