// SPDX-License-Identifier: Apache-2.0
/* Launches: kernelParams and extra, awkward layouts, 32 KB of parameters, megabytes of extra, cuLaunchKernelEx. */
#include "program.h"

enum { kBig = 32756 };

static CUresult launch_extra(CUfunction f, CUstream s, void* block, size_t bytes) {
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, block, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
  return cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, s, NULL, extra);
}

int main(void) {
  start();
  CUmodule mod = load_kernels();
  CUstream s;
  CUdeviceptr p;
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CHECK(cuMemAlloc(&p, 1 << 20));

  /* saxpy by kernelParams */
  {
    const uint64_t n = 1000;
    float x[1000], y[1000], a = 1.5f;
    CUdeviceptr dx = p, dy = p + 4096;
    for (int i = 0; i < 1000; ++i) x[i] = (float)i, y[i] = (float)(2 * i);
    CHECK(cuMemcpyHtoD(dx, x, sizeof x));
    CHECK(cuMemcpyHtoD(dy, y, sizeof y));
    void* params[] = {&a, &dx, &dy, (void*)&n};
    CHECK(cuLaunchKernel(kernel(mod, "saxpy"), 8, 1, 1, 128, 1, 1, 0, NULL, params, NULL));
    CHECK(cuMemcpyDtoH(y, dy, sizeof y));
    for (int i = 0; i < 1000; ++i) EXPECT(y[i] == 3.5f * (float)i);
  }
  /* parameters are taken when the call returns, however long the kernel waits */
  {
    CUfunction fill = kernel(mod, "fill"), slow = kernel(mod, "slow");
    CUdeviceptr dst = p;
    uint32_t value = 1;
    uint64_t n = 64;
    void* params[] = {&dst, &value, &n};
    launch_slow(slow, s, 20000);
    for (value = 1; value <= 100; ++value, dst += 256) CHECK(launch1(fill, s, params));
    CHECK(cuStreamSynchronize(s));
    for (uint32_t i = 0; i < 100; ++i) expect_device_words(p + i * 256, i + 1, 64);
  }
  /* mixed sizes, by both ways */
  {
    CUfunction mixed = kernel(mod, "mixed");
    struct {
      uint8_t a;
      uint64_t out;
      uint16_t b;
      double c;
      uint8_t d;
      uint32_t e;
    } block;
    memset(&block, 0, sizeof block);
    block.a = 200, block.out = p, block.b = 60000, block.c = 0.25, block.d = 100, block.e = 4000000000u;
    const double want = 200 + 60000 + 0.25 + 100 + 4000000000.0;
    double got = 0;
    void* params[] = {&block.a, &block.out, &block.b, &block.c, &block.d, &block.e};
    CHECK(launch1(mixed, s, params));
    CHECK(cuStreamSynchronize(s));
    CHECK(cuMemcpyDtoH(&got, p, 8));
    EXPECT(got == want);
    CHECK(cuMemsetD8(p, 0, 8));
    CHECK(launch_extra(mixed, NULL, &block, sizeof block));
    CHECK(cuMemcpyDtoH(&got, p, 8));
    EXPECT(got == want);
  }
  /* 32 KB of parameters, many in a row */
  {
    CUfunction sum = kernel(mod, "sum_struct");
    uint8_t* big = malloc(kBig);
    for (int round = 0; round < 100; ++round) {
      uint64_t want = 0, got = 0;
      CUdeviceptr out = p + (unsigned)round * 8;
      for (int i = 0; i < kBig; ++i) big[i] = (uint8_t)(i * 7 + round), want += (uint64_t)big[i] * (uint64_t)(i + 1);
      void* params[] = {&out, big};
      CHECK(launch1(sum, s, params));
      memset(big, 0, kBig);
      if (round % 10 == 9) {
        CHECK(cuStreamSynchronize(s));
        CHECK(cuMemcpyDtoH(&got, out, 8));
        EXPECT_EQ(got, want);
      }
    }
    free(big);
  }
  /* extra blocks from bytes to megabytes: a kernel of the software GPU takes those, none of a real one does */
  CUfunction sum_extra;
  if (cuModuleGetFunction(&sum_extra, mod, "sum_extra") != CUDA_SUCCESS) {
    printf("launch: these kernels have no sum_extra; extra blocks of any length were not tried\n");
  } else {
    const size_t sizes[] = {8, 100, 32764, 65536, 65544, 300001, 524288, 524289, 1u << 20, 5u << 20, 9000003};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; ++k) {
      const size_t n = sizes[k];
      uint8_t* block = malloc(n);
      uint64_t want = 0, got[2] = {0, 0};
      memcpy(block, &p, 8);
      for (size_t i = 8; i < n; ++i) block[i] = (uint8_t)(i * 13 + k), want += (uint64_t)block[i] * (i % 251 + 1);
      CHECK(launch_extra(sum_extra, s, block, n));
      memset(block, 0, n);
      free(block);
      CHECK(cuStreamSynchronize(s));
      CHECK(cuMemcpyDtoH(got, p, 16));
      EXPECT_EQ(got[1], n);
      EXPECT_EQ(got[0], want);
    }
  }
  /* shape, and cuLaunchKernelEx */
  {
    CUfunction shape = kernel(mod, "shape");
    uint32_t got[7];
    void* params[] = {&p};
    CHECK(cuLaunchKernel(shape, 7, 6, 5, 4, 3, 2, 512, NULL, params, NULL));
    CHECK(cuMemcpyDtoH(got, p, sizeof got));
    const uint32_t want[7] = {7, 6, 5, 4, 3, 2, 512};
    for (int i = 0; i < 7; ++i) EXPECT_EQ(got[i], want[i]);
    CUlaunchConfig config;
    memset(&config, 0, sizeof config);
    config.gridDimX = 9, config.gridDimY = config.gridDimZ = 1;
    config.blockDimX = 32, config.blockDimY = config.blockDimZ = 1;
    config.hStream = s;
    CHECK(cuLaunchKernelEx(&config, shape, params, NULL));
    CHECK(cuStreamSynchronize(s));
    CHECK(cuMemcpyDtoH(got, p, sizeof got));
    EXPECT_EQ(got[0], 9);
    EXPECT_EQ(got[3], 32);

    /* what can be checked is checked by the call itself */
    EXPECT_RESULT(cuLaunchKernel(shape, 0, 1, 1, 1, 1, 1, 0, s, params, NULL), CUDA_ERROR_INVALID_VALUE);
    EXPECT_RESULT(cuLaunchKernel(shape, 1, 1, 1, 0, 1, 1, 0, s, params, NULL), CUDA_ERROR_INVALID_VALUE);
    EXPECT_RESULT(cuLaunchKernel(shape, 1, 1, 1, 512, 1, 1, 0, s, params, NULL), CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
    EXPECT_RESULT(cuLaunchKernel(shape, 1, 1, 1, 2048, 1, 1, 0, s, params, NULL), CUDA_ERROR_INVALID_VALUE);
    EXPECT_RESULT(cuLaunchKernel(shape, 1, 70000, 1, 1, 1, 1, 0, s, params, NULL), CUDA_ERROR_INVALID_VALUE);
    EXPECT_RESULT(cuLaunchKernel(shape, 1, 1, 1, 1, 1, 1, 100 << 20, s, params, NULL), CUDA_ERROR_INVALID_VALUE);
    EXPECT_RESULT(cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, s, params, NULL), CUDA_ERROR_INVALID_HANDLE);
    void* extra[] = {CU_LAUNCH_PARAM_END};
    EXPECT_RESULT(cuLaunchKernel(shape, 1, 1, 1, 1, 1, 1, 0, s, params, extra), CUDA_ERROR_INVALID_VALUE);
    CHECK(cuLaunchKernel(shape, 1, 1, 1, 1, 1, 1, 0, s, params, NULL));
    CHECK(cuStreamSynchronize(s));
  }
  return pass("launch");
}
