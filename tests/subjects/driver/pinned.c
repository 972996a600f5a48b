// SPDX-License-Identifier: Apache-2.0
/* Pinned memory is one memory for both sides: copies are neither taken early nor late, kernels read and write it. */
#include "program.h"

int main(void) {
  start();
  CUmodule mod = load_kernels();
  CUfunction slow_fill = kernel(mod, "slow_fill"), affine = kernel(mod, "affine");
  CUfunction copy = kernel(mod, "copy_words");
  CUstream s;
  CUdeviceptr a, b;
  uint32_t* pinned;
  enum { kWords = 200000 };
  const size_t bytes = kWords * 4;
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CHECK(cuMemAlloc(&a, bytes));
  CHECK(cuMemAlloc(&b, bytes));
  CHECK(cuMemHostAlloc((void**)&pinned, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));

  /* D2H and then H2D through one buffer: the second must see what the first brought */
  for (uint32_t i = 1; i <= 10; ++i) {
    memset(pinned, 0, bytes);
    launch_slow_fill(slow_fill, s, a, i * 1000, kWords, 3000);
    CHECK(cuMemcpyDtoHAsync(pinned, a, bytes, s));
    CHECK(cuMemcpyHtoDAsync(b, pinned, bytes, s));
    CHECK(cuStreamSynchronize(s));
    expect_words(pinned, i * 1000, kWords);
    expect_device_words(b, i * 1000, kWords);
  }

  /* a pinned source is read when the stream comes to it, not at the call */
  memset(pinned, 0, bytes);
  Gate gate;
  close_gate(&gate, s);
  CHECK(cuMemcpyHtoDAsync(a, pinned, bytes, s));
  for (int i = 0; i < kWords; ++i) pinned[i] = 99;
  open_gate(&gate);
  CHECK(cuStreamSynchronize(s));
  expect_device_words(a, 99, kWords);

  /* kernels work on it directly */
  for (int i = 0; i < kWords; ++i) pinned[i] = 5;
  CUdeviceptr mapped;
  CHECK(cuMemHostGetDevicePointer(&mapped, pinned, 0));
  launch_affine(affine, s, mapped, 3, 1, kWords);
  launch_copy(copy, s, b, mapped, kWords);
  CHECK(cuStreamSynchronize(s));
  expect_words(pinned, 16, kWords);
  expect_device_words(b, 16, kWords);

  /* made and freed many times, also with work pending that uses it */
  for (uint32_t i = 0; i < 50; ++i) {
    uint32_t* p;
    CHECK(cuMemAllocHost((void**)&p, 100000 + i));
    memset(p, (int)i, 4096);
    CHECK(cuMemcpyHtoDAsync(a, p, 4096, s));
    CHECK(cuMemFreeHost(p)); /* waits for what uses it, as the driver does */
    CHECK(cuMemcpyDtoHAsync(pinned, a, 4096, s));
    CHECK(cuStreamSynchronize(s));
    expect_words(pinned, i * 0x01010101u, 1024);
  }
  CHECK(cuMemFreeHost(pinned));
  EXPECT_RESULT(cuMemFreeHost(pinned), CUDA_ERROR_INVALID_VALUE);
  uint32_t local;
  EXPECT_RESULT(cuMemFreeHost(&local), CUDA_ERROR_INVALID_VALUE);
  return pass("pinned");
}
