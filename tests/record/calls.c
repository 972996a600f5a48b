// SPDX-License-Identifier: Apache-2.0
/* A driver-API program for the recording GPU: what tests/integration/test_record.py finds in the record comes from
 * here.
 *
 * calls            goes through every kind of call, and sees that no kernel was executed
 * calls params     launches with a parameter block that is too long: an execution fault, by name
 * calls required   the same with a block size that the kernel does not take
 * calls loop GO S  launches with S milliseconds between them until there is a file GO, then "digest done": for a
 *                  checkpoint in the middle */
#include "../subjects/driver/program.h"

static CUresult launch_extra(CUfunction f, void* block, size_t bytes) {
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, block, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
  return cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, extra);
}

static void expect_param(CUfunction f, size_t i, size_t offset, size_t size) {
  size_t got_offset = 99, got_size = 99;
  CHECK(cuFuncGetParamInfo(f, i, &got_offset, &got_size));
  EXPECT_EQ(got_offset, offset);
  EXPECT_EQ(got_size, size);
}

static void host_work(void* done) { *(int*)done = 1; }

static void hold(void* released) {
  while (!__atomic_load_n((int*)released, __ATOMIC_ACQUIRE)) usleep(100);
}

static int all(CUmodule mod) {
  CUdeviceptr p, q, global;
  CUstream s;
  CUevent e, f;
  size_t bytes;
  uint32_t table[4];
  int value;
  CHECK(cuMemAlloc(&p, 1 << 20));
  CHECK(cuMemAlloc(&q, 1 << 20));
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CHECK(cuEventCreate(&e, CU_EVENT_DEFAULT));
  CHECK(cuEventCreate(&f, CU_EVENT_DEFAULT));

  CUfunction fill = kernel(mod, "fill"), shape = kernel(mod, "shape"), mixed = kernel(mod, "mixed");
  CUfunction big = kernel(mod, "sum_struct");
  CUfunction none;
  EXPECT_RESULT(cuModuleGetFunction(&none, mod, "no_such_kernel"), CUDA_ERROR_NOT_FOUND);
  expect_param(fill, 0, 0, 8);
  expect_param(fill, 1, 8, 4);
  expect_param(fill, 2, 16, 8);
  expect_param(mixed, 5, 36, 4);
  expect_param(big, 1, 8, 32756);
  size_t offset;
  EXPECT_RESULT(cuFuncGetParamInfo(fill, 3, &offset, NULL), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, shape));
  EXPECT_EQ(value, 256);
  CHECK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, shape));
  EXPECT_EQ(value, 1024);

  /* copies and sets are real; a kernel is not executed */
  CHECK(cuMemsetD32(p, 7, 1024));
  launch_fill(fill, NULL, p, 1, 1024);
  expect_device_words(p, 7, 1024);
  CHECK(cuMemcpyDtoDAsync(q, p, 4096, s));
  CHECK(cuStreamSynchronize(s));
  expect_device_words(q, 7, 1024);

  /* variables lie in memory with their initial values */
  CHECK(cuModuleGetGlobal(&global, &bytes, mod, "table"));
  EXPECT_EQ(bytes, 16);
  CHECK(cuMemcpyDtoH(table, global, 16));
  EXPECT_EQ(table[0], 11);
  EXPECT_EQ(table[3], 44);
  CHECK(cuModuleGetGlobal(&global, &bytes, mod, "settings"));
  CHECK(cuMemcpyDtoH(table, global, 16));
  EXPECT_EQ(table[1], 2);
  CHECK(cuModuleGetGlobal(&global, &bytes, mod, "zeroes"));
  EXPECT_EQ(bytes, 4096);
  expect_device_words(global, 0, 1024);
  EXPECT_RESULT(cuModuleGetGlobal(&global, &bytes, mod, "no_such_variable"), CUDA_ERROR_NOT_FOUND);

  /* launches of all shapes, events, a host function */
  void* params[] = {&p};
  CHECK(cuEventRecord(e, s));
  CHECK(cuLaunchKernel(shape, 7, 6, 5, 4, 3, 2, 512, s, params, NULL));
  int released = 0; /* the stream is busy: a wait for an event that has completed needs no command */
  CHECK(cuLaunchHostFunc(s, hold, &released));
  CHECK(cuEventRecord(f, s));
  CHECK(cuStreamWaitEvent(NULL, f, 0));
  __atomic_store_n(&released, 1, __ATOMIC_RELEASE);
  struct {
    uint8_t a;
    uint64_t out;
    uint16_t b;
    double c;
    uint8_t d;
    uint32_t e;
  } block = {1, p, 2, 3, 4, 5};
  CHECK(launch_extra(mixed, &block, sizeof block));
  uint8_t* large = calloc(1, 32756);
  void* both[] = {&p, large};
  CHECK(cuLaunchKernel(big, 1, 1, 1, 1, 1, 1, 0, s, both, NULL));
  int done = 0;
  CHECK(cuLaunchHostFunc(s, host_work, &done));
  CHECK(cuStreamSynchronize(s));
  EXPECT_EQ(done, 1);
  float ms;
  CHECK(cuEventElapsedTime(&ms, e, f));

  /* what the call itself can check */
  EXPECT_RESULT(cuLaunchKernel(shape, 1, 1, 1, 257, 1, 1, 0, s, params, NULL), CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
  EXPECT_RESULT(cuLaunchKernel(shape, 1, 1, 1, 1, 1, 1, 49152 - 1024 + 1, s, params, NULL), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuFuncSetAttribute(shape, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 232448 - 1024));
  EXPECT_RESULT(cuFuncSetAttribute(shape, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 232448 - 1023),
                CUDA_ERROR_INVALID_VALUE);
  CHECK(cuLaunchKernel(shape, 1, 1, 1, 256, 1, 1, 232448 - 1024, s, params, NULL));
  CHECK(cuCtxSynchronize());
  CHECK(cuModuleUnload(mod));
  return pass("calls");
}

/* After a launch that the device refuses: every call says so. */
static int refused(CUresult first) {
  EXPECT_EQ(first, CUDA_SUCCESS);
  EXPECT_RESULT(cuCtxSynchronize(), CUDA_ERROR_LAUNCH_FAILED);
  CUdeviceptr p;
  EXPECT_RESULT(cuMemAlloc(&p, 16), CUDA_ERROR_LAUNCH_FAILED);
  return pass("calls");
}

int main(int argc, char** argv) {
  int value;
  const CUdevice dev = start();
  CHECK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, dev));
  EXPECT_EQ(value, 9);
  CUmodule mod = load_kernels();
  if (argc == 1) return all(mod);
  if (strcmp(argv[1], "params") == 0) {
    uint8_t block[300] = {0};
    return refused(launch_extra(kernel(mod, "fill"), block, 200));
  }
  if (strcmp(argv[1], "required") == 0)
    return refused(cuLaunchKernel(kernel(mod, "required"), 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL));
  if (strcmp(argv[1], "loop") == 0 && argc == 4) {
    CUdeviceptr p, global;
    uint32_t table[4], words[4];
    CHECK(cuMemAlloc(&p, 4096));
    CHECK(cuModuleGetGlobal(&global, NULL, mod, "table"));
    CHECK(cuMemsetD32(global, 77, 1));
    for (int i = 0; access(argv[2], F_OK) != 0; ++i) {
      CHECK(cuMemsetD32(p, (unsigned)i, 4));
      launch_fill(kernel(mod, "fill"), NULL, p, 1, 4);
      CHECK(cuMemcpyDtoH(words, p, 16));
      EXPECT_EQ(words[3], i);
      printf("calls step %d\n", i);
      fflush(stdout);
      usleep((unsigned)atoi(argv[3]) * 1000);
    }
    CHECK(cuMemcpyDtoH(table, global, 16));
    EXPECT_EQ(table[0], 77);
    EXPECT_EQ(table[1], 22);
    printf("digest done\n");
    return 0;
  }
  fprintf(stderr, "usage: calls [params | required | loop GO MS]\n");
  return 2;
}
