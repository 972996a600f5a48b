// SPDX-License-Identifier: Apache-2.0
/* What kernels print: to this process's stdout, in its order, before the call that synchronises returns.
 *
 *   printing        prints "host N" and lets kernels print "kernel N", in rising order; then limits
 *   printing claim  a kernel whose assertion fails: CUDA_ERROR_ASSERT, and its text on stderr */
#include "program.h"

static CUresult say(CUfunction f, CUstream s, uint32_t number) {
  void* params[] = {&number};
  return launch1(f, s, params);
}

int main(int argc, char** argv) {
  start();
  CUmodule mod = load_kernels();
  CUstream s;
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  if (argc > 1 && !strcmp(argv[1], "claim")) {
    CUfunction claim = kernel(mod, "claim");
    CHECK(launch1(claim, s, NULL));
    EXPECT_RESULT(cuStreamSynchronize(s), CUDA_ERROR_ASSERT);
    EXPECT_RESULT(cuCtxSynchronize(), CUDA_ERROR_ASSERT);
    return pass("printing");
  }
  CUfunction f = kernel(mod, "say");
  CUevent e;
  CUdeviceptr p;
  char byte;
  CHECK(cuEventCreate(&e, 0));
  CHECK(cuMemAlloc(&p, 64));
  printf("host 1\n");
  CHECK(say(f, s, 2));
  CHECK(say(f, s, 3));
  CHECK(cuStreamSynchronize(s));
  printf("host 4\n");
  CHECK(say(f, NULL, 5));
  CHECK(cuCtxSynchronize());
  printf("host 6\n");
  CHECK(say(f, s, 7));
  CHECK(cuEventRecord(e, s));
  CHECK(cuEventSynchronize(e));
  printf("host 8\n");
  CHECK(say(f, NULL, 9));
  CHECK(cuMemcpyDtoH(&byte, p, 1));
  printf("host 10\n");
  for (uint32_t i = 11; i < 1000; ++i) CHECK(say(f, s, i)); /* more than one answer holds */
  CHECK(cuStreamSynchronize(s));
  printf("host 1000\n");
  CHECK(cuCtxSynchronize()); /* once and no more */

  size_t value = 0;
  CHECK(cuCtxSetLimit(CU_LIMIT_PRINTF_FIFO_SIZE, 4 << 20));
  CHECK(cuCtxGetLimit(&value, CU_LIMIT_PRINTF_FIFO_SIZE));
  EXPECT(value >= 4 << 20);
  CHECK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 2001));
  CHECK(cuCtxGetLimit(&value, CU_LIMIT_STACK_SIZE));
  EXPECT(value >= 2001);
  EXPECT_RESULT(cuCtxSetLimit((CUlimit)77, 1), CUDA_ERROR_UNSUPPORTED_LIMIT);
  return pass("printing");
}
