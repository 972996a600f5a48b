// SPDX-License-Identifier: Apache-2.0
/* Errors that are no execution faults: returned by the call itself, and the context goes on as if nothing had been. */
#include "program.h"

int main(void) {
  CUdeviceptr p = 0, base = 0;
  uint32_t host[16] = {0};
  EXPECT_RESULT(cuMemAlloc(&p, 16), CUDA_ERROR_NOT_INITIALIZED);
  const char* text = NULL;
  CHECK(cuGetErrorName(CUDA_ERROR_OUT_OF_MEMORY, &text));
  EXPECT(!strcmp(text, "CUDA_ERROR_OUT_OF_MEMORY"));
  CHECK(cuGetErrorString(CUDA_ERROR_INVALID_VALUE, &text));
  EXPECT(text && text[0]);
  for (int e = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED; e <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD; ++e) {
    CHECK(cuGetErrorString((CUresult)e, &text));
    EXPECT(text && text[0]);
  }
  EXPECT_RESULT(cuGetErrorName((CUresult)123456, &text), CUDA_ERROR_INVALID_VALUE);
  start();
  CUmodule mod = load_kernels();
  CUfunction fill = kernel(mod, "fill");
  size_t size = 0;
  CHECK(cuMemAlloc(&p, 1000));

  EXPECT_RESULT(cuMemAlloc(&base, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemAlloc(NULL, 16), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemAlloc(&base, 1ull << 50), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_RESULT(cuMemFree(p + 8), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemFree(0x1234), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemFree(0)); /* as free(NULL) */
  EXPECT_RESULT(cuMemcpyHtoD(p, NULL, 16), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemcpyHtoD(0x1000, host, 16), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemcpyHtoD(p, host, 1ull << 40), CUDA_ERROR_INVALID_VALUE); /* past the allocation */
  EXPECT_RESULT(cuMemcpyDtoH(host, 0, 16), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemcpyDtoD(p, 0x99, 16), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemcpyHtoD(p, host, 0));
  EXPECT_RESULT(cuMemGetAddressRange(&base, &size, 0x1234), CUDA_ERROR_NOT_FOUND);
  CHECK(cuMemGetAddressRange(&base, &size, p + 500));
  EXPECT(base == p && size == 1000);

  CUstream s;
  CUevent e;
  CHECK(cuStreamCreate(&s, 0));
  CHECK(cuEventCreate(&e, 0));
  CHECK(cuStreamDestroy(s));
  EXPECT_RESULT(cuStreamSynchronize(s), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_RESULT(cuStreamQuery(s), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_RESULT(cuEventRecord(e, s), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_RESULT(cuMemsetD8Async(p, 0, 16, s), CUDA_ERROR_INVALID_HANDLE);
  uint32_t value = 3;
  uint64_t n = 4;
  void* params[] = {&p, &value, &n};
  EXPECT_RESULT(launch1(fill, s, params), CUDA_ERROR_INVALID_HANDLE);
  CHECK(cuEventDestroy(e));
  EXPECT_RESULT(cuEventDestroy(e), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_RESULT(cuStreamWaitEvent(NULL, e, 0), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_RESULT(cuStreamSynchronize((CUstream)(uintptr_t)0xdeadbeef), CUDA_ERROR_INVALID_HANDLE);

  /* memory that was freed is no longer valid for calls */
  CUdeviceptr freed;
  CHECK(cuMemAlloc(&freed, 4096));
  CHECK(cuMemFree(freed));
  EXPECT_RESULT(cuMemFree(freed), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemcpyHtoD(freed, host, 16), CUDA_ERROR_INVALID_VALUE);

  /* refused by name, with a code, and no harm */
  CUipcMemHandle shared;
  const CUresult r = cuIpcGetMemHandle(&shared, p);
  EXPECT(r == CUDA_ERROR_NOT_SUPPORTED || r == CUDA_ERROR_NOT_PERMITTED);

  /* after all that the context still works */
  CHECK(cuCtxSynchronize());
  CHECK(launch1(fill, NULL, params));
  expect_device_words(p, 3, 4);
  CHECK(cuMemFree(p));
  return pass("errors");
}
