// SPDX-License-Identifier: Apache-2.0
/* Mapped host memory: a kernel writes to it, the host reads it where it lies. Without it: refused by name.
 *
 *   mapped refused     the device does not map host memory */
#include "program.h"

int main(int argc, char** argv) {
  const CUdevice dev = start();
  CUmodule mod = load_kernels();
  CUfunction f;
  CUdeviceptr d = 0;
  uint32_t* p = NULL;
  int maps = -1;
  CHECK(cuDeviceGetAttribute(&maps, CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, dev));
  if (argc > 1 && !strcmp(argv[1], "refused")) {
    EXPECT_EQ(maps, 0);
    EXPECT_RESULT(cuMemHostAlloc((void**)&p, 4096, CU_MEMHOSTALLOC_DEVICEMAP), CUDA_ERROR_NOT_SUPPORTED);
    CHECK(cuMemHostAlloc((void**)&p, 4096, 0));
    EXPECT_RESULT(cuMemHostGetDevicePointer(&d, p, 0), CUDA_ERROR_NOT_SUPPORTED);
    EXPECT_RESULT(cuPointerGetAttribute(&d, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, (CUdeviceptr)(uintptr_t)p),
                  CUDA_ERROR_INVALID_VALUE);
    return pass("mapped");
  }
  EXPECT_EQ(maps, 1);
  for (int round = 0; round < 3; ++round) { /* pages that were freed and are used again */
    CHECK(cuMemHostAlloc((void**)&p, 3 << 20, CU_MEMHOSTALLOC_DEVICEMAP));
    memset(p, 0, 3 << 20);
    CHECK(cuMemHostGetDevicePointer(&d, p + 1024, 0));
    EXPECT(d == (CUdeviceptr)(uintptr_t)(p + 1024)); /* one address space */
    if (cuModuleGetFunction(&f, mod, "fill") == CUDA_SUCCESS) {
      launch_fill(f, NULL, d, 9, 1);
    } else { /* tests/subjects/variables.ptx: *p = counter, which is 5 */
      void* params[] = {&d};
      CHECK(launch1(kernel(mod, "peek"), NULL, params));
    }
    CHECK(cuCtxSynchronize());
    EXPECT(p[1024] == 9 || p[1024] == 5);
    EXPECT_EQ(p[1023], 0);
    EXPECT_EQ(p[1025], 0);
    CHECK(cuMemFreeHost(p));
    EXPECT_RESULT(cuMemHostGetDevicePointer(&d, p, 0), CUDA_ERROR_INVALID_VALUE);
  }
  return pass("mapped");
}
