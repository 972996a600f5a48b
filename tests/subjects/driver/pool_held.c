// SPDX-License-Identifier: Apache-2.0
/* What a memory pool holds on to, to the byte: so not for a test that moves the job meanwhile. */
#include "program.h"

enum { kWords = 4096 };

int main(void) {
  CUdevice dev = start();
  CUmodule mod = load_kernels();
  CUfunction slow_fill = kernel(mod, "slow_fill"), fill = kernel(mod, "fill");
  CUstream s, other;
  CUmemoryPool pool;
  cuuint64_t before = 0, used = 0;
  const size_t bytes = kWords * 4;
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CHECK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  CHECK(cuDeviceGetDefaultMemPool(&pool, dev));

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
  CHECK(cuStreamDestroy(s));
  return pass("pool held");
}
