// SPDX-License-Identifier: Apache-2.0
/* Memset of every width, 1D and 2D, synchronous and on a stream; what lies beside the area stays. */
#include "program.h"

enum { kPitch = 512, kRows = 33, kBytes = kPitch * (kRows + 2) };
static CUdeviceptr d;
static CUstream s;
static uint8_t host[kBytes], want[kBytes];

static void begin(void) {
  memset(want, 0xaa, kBytes);
  CHECK(cuMemsetD8(d, 0xaa, kBytes));
  CHECK(cuStreamSynchronize(NULL)); /* the stream of the test does not wait for the legacy one */
}

static void put(size_t at, uint32_t value, size_t width, size_t count) {
  for (size_t i = 0; i < count; ++i) memcpy(want + at + i * width, &value, width); /* little-endian */
}

static void compare(int line) {
  CHECK(cuStreamSynchronize(s));
  CHECK(cuMemcpyDtoH(host, d, kBytes));
  for (size_t i = 0; i < kBytes; ++i)
    if (host[i] != want[i]) {
      fprintf(stderr, "memset.c:%d: byte %zu is 0x%x, expected 0x%x\n", line, i, host[i], want[i]);
      exit(1);
    }
}

int main(void) {
  start();
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CHECK(cuMemAlloc(&d, kBytes));

  begin();
  put(5, 0x11, 1, 1001);
  CHECK(cuMemsetD8(d + 5, 0x11, 1001));
  compare(__LINE__);
  begin();
  put(6, 0x1234, 2, 501);
  CHECK(cuMemsetD16(d + 6, 0x1234, 501));
  compare(__LINE__);
  begin();
  put(8, 0x12345678, 4, 301);
  CHECK(cuMemsetD32(d + 8, 0x12345678, 301));
  compare(__LINE__);
  begin();
  put(5, 0x21, 1, 1001);
  CHECK(cuMemsetD8Async(d + 5, 0x21, 1001, s));
  compare(__LINE__);
  begin();
  put(6, 0x2234, 2, 501);
  CHECK(cuMemsetD16Async(d + 6, 0x2234, 501, s));
  compare(__LINE__);
  begin();
  put(8, 0x22345678, 4, 301);
  CHECK(cuMemsetD32Async(d + 8, 0x22345678, 301, s));
  compare(__LINE__);

  begin();
  for (size_t y = 0; y < kRows; ++y) put(3 + y * kPitch, 0x31, 1, 99);
  CHECK(cuMemsetD2D8(d + 3, kPitch, 0x31, 99, kRows));
  compare(__LINE__);
  begin();
  for (size_t y = 0; y < kRows; ++y) put(4 + y * kPitch, 0x3132, 2, 99);
  CHECK(cuMemsetD2D16(d + 4, kPitch, 0x3132, 99, kRows));
  compare(__LINE__);
  begin();
  for (size_t y = 0; y < kRows; ++y) put(4 + y * kPitch, 0x31323334, 4, 99);
  CHECK(cuMemsetD2D32(d + 4, kPitch, 0x31323334, 99, kRows));
  compare(__LINE__);
  begin();
  for (size_t y = 0; y < kRows; ++y) put(3 + y * kPitch, 0x41, 1, 99);
  CHECK(cuMemsetD2D8Async(d + 3, kPitch, 0x41, 99, kRows, s));
  compare(__LINE__);
  begin();
  for (size_t y = 0; y < kRows; ++y) put(4 + y * kPitch, 0x4142, 2, 99);
  CHECK(cuMemsetD2D16Async(d + 4, kPitch, 0x4142, 99, kRows, s));
  compare(__LINE__);
  begin();
  for (size_t y = 0; y < kRows; ++y) put(4 + y * kPitch, 0x41424344, 4, 99);
  CHECK(cuMemsetD2D32Async(d + 4, kPitch, 0x41424344, 99, kRows, s));
  compare(__LINE__);

  /* nothing, misaligned, outside */
  CHECK(cuMemsetD32(d, 1, 0));
  EXPECT_RESULT(cuMemsetD16(d + 1, 1, 4), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemsetD32(d + 2, 1, 4), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemsetD8(0, 1, 4), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemsetD8(d, 1, 1ull << 40), CUDA_ERROR_INVALID_VALUE);

  CUdeviceptr pitched;
  size_t pitch = 0;
  CHECK(cuMemAllocPitch(&pitched, &pitch, 1000, 10, 4));
  EXPECT(pitch >= 1000 && pitch % 16 == 0);
  CHECK(cuMemsetD2D8(pitched, pitch, 7, 1000, 10));
  CHECK(cuMemcpyDtoH(host, pitched + 9 * pitch, 1000));
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(host[i], 7);
  CHECK(cuMemFree(pitched));
  return pass("memset");
}
