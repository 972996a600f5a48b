// SPDX-License-Identifier: Apache-2.0
/* cuMemGetInfo counts; out-of-memory comes at the call that does not fit, exactly, and memory comes back. */
#include "program.h"

static size_t free_bytes(void) {
  size_t f = 0, t = 0;
  CHECK(cuMemGetInfo(&f, &t));
  EXPECT(f <= t);
  return f;
}

int main(void) {
  start();
  size_t total = 0, reported = 0;
  CUdevice dev;
  CHECK(cuCtxGetDevice(&dev));
  CHECK(cuDeviceTotalMem(&total, dev));
  size_t before = 0;
  CHECK(cuMemGetInfo(&before, &reported));
  EXPECT_EQ(reported, total);

  CUdeviceptr a, b, c;
  const size_t piece = 16u << 20;
  CHECK(cuMemAlloc(&a, piece));
  EXPECT_EQ(before - free_bytes(), piece);
  CHECK(cuMemAlloc(&b, piece));
  EXPECT_EQ(before - free_bytes(), 2 * piece);
  CHECK(cuMemFree(a));
  EXPECT_EQ(before - free_bytes(), piece);
  CHECK(cuMemFree(b));
  EXPECT_EQ(free_bytes(), before);

  /* all that is free fits in one piece, one byte more does not */
  EXPECT_RESULT(cuMemAlloc(&a, before + 1), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(free_bytes(), before);
  CHECK(cuMemAlloc(&a, before));
  EXPECT_EQ(free_bytes(), 0);
  EXPECT_RESULT(cuMemAlloc(&b, 1), CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(cuMemFree(a));

  /* in many pieces: as many as there is room for, then the same again */
  for (int round = 0; round < 2; ++round) {
    enum { kMax = 4096 };
    static CUdeviceptr pieces[kMax];
    const size_t each = 4u << 20;
    size_t n = 0;
    CUresult r = CUDA_SUCCESS;
    while (n < kMax && (r = cuMemAlloc(&pieces[n], each)) == CUDA_SUCCESS) ++n;
    EXPECT_EQ(n, before / each < kMax ? before / each : kMax);
    if (n < kMax) EXPECT_EQ(r, CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(cuMemsetD32(pieces[n - 1], 0xabcd, each / 4));
    expect_device_words(pieces[n - 1], 0xabcd, 1024);
    for (size_t i = 0; i < n; i += 2) CHECK(cuMemFree(pieces[i]));
    /* an error is no fault: what was freed can be had again */
    CHECK(cuMemAlloc(&c, each));
    CHECK(cuMemFree(c));
    for (size_t i = 1; i < n; i += 2) CHECK(cuMemFree(pieces[i]));
    EXPECT_EQ(free_bytes(), before);
  }

  /* the stream-ordered allocator draws on the same memory */
  CUstream s;
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CHECK(cuMemAllocAsync(&a, piece, s));
  EXPECT(before - free_bytes() >= piece);
  CHECK(cuMemFreeAsync(a, s));
  CHECK(cuStreamSynchronize(s));
  EXPECT_RESULT(cuMemAllocAsync(&a, total + 1, s), CUDA_ERROR_OUT_OF_MEMORY);
  return pass("out_of_memory");
}
