// SPDX-License-Identifier: Apache-2.0
/* Copies of every kind: host-device with pageable and pinned memory, device-device, host-host, 2D, 3D, async, sizes. */
#include "program.h"

static uint8_t byte_at(size_t i, unsigned salt) { return (uint8_t)(i * 131 + (i >> 9) + salt); }

static void fill_bytes(uint8_t* p, size_t n, unsigned salt) {
  for (size_t i = 0; i < n; ++i) p[i] = byte_at(i, salt);
}

static void expect_bytes(const uint8_t* p, size_t n, unsigned salt) {
  for (size_t i = 0; i < n; ++i)
    if (p[i] != byte_at(i, salt)) {
      fprintf(stderr, "byte %zu of %zu is 0x%x, expected 0x%x\n", i, n, p[i], byte_at(i, salt));
      exit(1);
    }
}

int main(void) {
  start();
  CUmodule mod = load_kernels();
  CUfunction slow_fill = kernel(mod, "slow_fill"), slow = kernel(mod, "slow");
  CUstream s;
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  const size_t big = 40u << 20; /* more than all staging chunks together */
  CUdeviceptr d, d2;
  CHECK(cuMemAlloc(&d, big));
  CHECK(cuMemAlloc(&d2, big));
  uint8_t *pageable = malloc(big), *back = malloc(big), *pinned;
  CHECK(cuMemAllocHost((void**)&pinned, big));

  /* sizes around the inline, chunk and page borders, odd offsets */
  const size_t sizes[] = {0, 1, 3, 63, 64, 65, 4095, 4096, 4097, 65535, 65536, 65537, 524287, 524288, 524289, 1500001};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i)
    for (size_t off = 0; off < 8; off += 7) {
      const size_t n = sizes[i];
      fill_bytes(pageable + off, n, (unsigned)i);
      CHECK(cuMemcpyHtoD(d + off, pageable + off, n));
      memset(back, 0xee, n + 16);
      CHECK(cuMemcpyDtoH(back, d + off, n));
      expect_bytes(back, n, (unsigned)i);
      EXPECT_EQ(back[n], 0xee);
    }

  /* large, pageable and pinned, both ways, synchronous and not */
  fill_bytes(pageable, big, 1);
  CHECK(cuMemcpyHtoD(d, pageable, big));
  memset(pinned, 0, big);
  CHECK(cuMemcpyDtoH(pinned, d, big));
  expect_bytes(pinned, big, 1);
  fill_bytes(pinned, big, 2);
  CHECK(cuMemcpyHtoDAsync(d, pinned, big, s));
  CHECK(cuMemcpyDtoDAsync(d2, d, big, s));
  CHECK(cuMemcpyDtoHAsync(back, d2, big, s));
  CHECK(cuStreamSynchronize(s));
  expect_bytes(back, big, 2);

  /* pageable source may be overwritten as soon as the call returns, also while the stream is busy */
  for (int round = 0; round < 20; ++round) {
    const size_t n = 1000 + (size_t)round * 40000;
    launch_slow(slow, s, 3000);
    fill_bytes(pageable, n, (unsigned)round);
    CHECK(cuMemcpyHtoDAsync(d, pageable, n, s));
    memset(pageable, 0x55, n);
    CHECK(cuMemcpyDtoHAsync(back, d, n, s));
    CHECK(cuStreamSynchronize(s));
    expect_bytes(back, n, (unsigned)round);
  }

  /* device to host into pageable memory through the generic call, which finds the direction by itself */
  fill_bytes(pageable, 5000, 3);
  CHECK(cuMemcpy(d, (CUdeviceptr)(uintptr_t)pageable, 5000));
  CHECK(cuMemcpy(d2, d, 5000));
  CHECK(cuStreamSynchronize(NULL)); /* neither call waits for the device, and s does not wait for the legacy stream */
  CHECK(cuMemcpyAsync((CUdeviceptr)(uintptr_t)back, d2, 5000, s));
  CHECK(cuStreamSynchronize(s));
  expect_bytes(back, 5000, 3);
  memset(back, 0, 5000);
  CHECK(cuMemcpy((CUdeviceptr)(uintptr_t)back, (CUdeviceptr)(uintptr_t)pageable, 5000));
  expect_bytes(back, 5000, 3);

  /* synchronous calls wait for the legacy stream's work */
  launch_slow_fill(slow_fill, NULL, d, 0x01020304, 1024, 20000);
  uint32_t words[1024];
  CHECK(cuMemcpyDtoH(words, d, sizeof words));
  expect_words(words, 0x01020304, 1024);

  /* 2D: every pair of places, pitches and offsets */
  enum { kW = 100, kH = 37, kPitchA = 256, kPitchB = 160 };
  fill_bytes(pageable, kPitchA * (kH + 4), 9);
  CHECK(cuMemsetD8(d, 0, kPitchB * (kH + 4)));
  CUDA_MEMCPY2D c;
  memset(&c, 0, sizeof c);
  c.srcMemoryType = CU_MEMORYTYPE_HOST;
  c.srcHost = pageable;
  c.srcPitch = kPitchA;
  c.srcXInBytes = 5;
  c.srcY = 2;
  c.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  c.dstDevice = d;
  c.dstPitch = kPitchB;
  c.dstXInBytes = 3;
  c.dstY = 1;
  c.WidthInBytes = kW;
  c.Height = kH;
  CHECK(cuMemcpy2D(&c));
  CHECK(cuStreamSynchronize(NULL));
  CUDA_MEMCPY2D dd;
  memset(&dd, 0, sizeof dd);
  dd.srcMemoryType = dd.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  dd.srcDevice = d;
  dd.srcPitch = kPitchB;
  dd.dstDevice = d2;
  dd.dstPitch = kPitchA;
  dd.WidthInBytes = kPitchB;
  dd.Height = kH + 2;
  CHECK(cuMemcpy2DAsync(&dd, s));
  CUDA_MEMCPY2D h;
  memset(&h, 0, sizeof h);
  h.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  h.srcDevice = d2;
  h.srcPitch = kPitchA;
  h.srcXInBytes = 3;
  h.srcY = 1;
  h.dstMemoryType = CU_MEMORYTYPE_HOST;
  h.dstHost = back;
  h.dstPitch = kW;
  h.WidthInBytes = kW;
  h.Height = kH;
  memset(back, 0, big);
  CHECK(cuMemcpy2DAsync(&h, s));
  CHECK(cuStreamSynchronize(s));
  for (size_t y = 0; y < kH; ++y)
    for (size_t x = 0; x < kW; ++x) EXPECT_EQ(back[y * kW + x], pageable[(y + 2) * kPitchA + x + 5]);
  uint8_t edge[8];
  CHECK(cuMemcpyDtoH(edge, d + kPitchB, 8)); /* bytes beside the rectangle stay */
  EXPECT_EQ(edge[2], 0);
  EXPECT_EQ(edge[3], pageable[2 * kPitchA + 5]);
  c.WidthInBytes = kPitchA + 1; /* wider than a row */
  EXPECT_RESULT(cuMemcpy2D(&c), CUDA_ERROR_INVALID_VALUE);

  /* a 2D copy to host is pinned memory's too */
  h.dstHost = pinned;
  memset(pinned, 0, kW * kH);
  CHECK(cuMemcpy2DUnaligned(&h));
  EXPECT(memcmp(pinned, back, kW * kH) == 0);

  /* 3D: a box out of a volume and back */
  enum { kDepth = 5, kSlices = 9 };
  CUDA_MEMCPY3D v;
  memset(&v, 0, sizeof v);
  fill_bytes(pageable, kPitchA * 40 * kSlices, 17);
  CHECK(cuMemsetD8(d, 0, kPitchB * 30 * kSlices));
  v.srcMemoryType = CU_MEMORYTYPE_HOST;
  v.srcHost = pageable;
  v.srcPitch = kPitchA;
  v.srcHeight = 40;
  v.srcXInBytes = 7;
  v.srcY = 3;
  v.srcZ = 2;
  v.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  v.dstDevice = d;
  v.dstPitch = kPitchB;
  v.dstHeight = 30;
  v.dstXInBytes = 1;
  v.dstY = 4;
  v.dstZ = 1;
  v.WidthInBytes = 90;
  v.Height = 20;
  v.Depth = kDepth;
  CHECK(cuMemcpy3D(&v));
  CHECK(cuStreamSynchronize(NULL));
  CUDA_MEMCPY3D w;
  memset(&w, 0, sizeof w);
  w.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  w.srcDevice = d;
  w.srcPitch = kPitchB;
  w.srcHeight = 30;
  w.srcXInBytes = 1;
  w.srcY = 4;
  w.srcZ = 1;
  w.dstMemoryType = CU_MEMORYTYPE_HOST;
  w.dstHost = back;
  w.dstPitch = 90;
  w.dstHeight = 20;
  w.WidthInBytes = 90;
  w.Height = 20;
  w.Depth = kDepth;
  CHECK(cuMemcpy3DAsync(&w, s));
  CHECK(cuStreamSynchronize(s));
  for (size_t z = 0; z < kDepth; ++z)
    for (size_t y = 0; y < 20; ++y)
      for (size_t x = 0; x < 90; ++x)
        EXPECT_EQ(back[(z * 20 + y) * 90 + x], pageable[((z + 2) * 40 + y + 3) * kPitchA + x + 7]);

  /* registered host memory: staged, but right */
  CHECK(cuMemHostRegister(pageable, 1 << 20, 0));
  fill_bytes(pageable, 1 << 20, 33);
  CHECK(cuMemcpyHtoDAsync(d, pageable, 1 << 20, s));
  CHECK(cuMemcpyDtoHAsync(back, d, 1 << 20, s));
  CHECK(cuStreamSynchronize(s));
  expect_bytes(back, 1 << 20, 33);
  CHECK(cuMemHostUnregister(pageable));
  EXPECT_RESULT(cuMemHostUnregister(pageable), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);

  CHECK(cuMemFreeHost(pinned));
  CHECK(cuMemFree(d));
  CHECK(cuMemFree(d2));
  return pass("copies");
}
