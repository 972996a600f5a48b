// SPDX-License-Identifier: Apache-2.0
/* Execution faults stick: fault KIND, KIND = assert | address | crash.
 *
 * A kernel that fails returns no error from its launch; the next call that observes it returns the fault, and so does
 * every later call of the context. Waits end, nothing hangs. */
#include "program.h"

int main(int argc, char** argv) {
  const char* kind = argc > 1 ? argv[1] : "assert";
  start();
  CUmodule mod = load_kernels();
  CUstream s, other;
  CUevent e;
  CUdeviceptr p;
  uint32_t word = 0;
  CHECK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  CHECK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  CHECK(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
  CHECK(cuMemAlloc(&p, 4096));
  CUfunction fill = kernel(mod, "fill");
  launch_fill(fill, s, p, 1, 16);
  CHECK(cuStreamSynchronize(s));

  CUresult want;
  if (!strcmp(kind, "assert")) {
    int32_t code = 710;
    void* params[] = {&code};
    CHECK(launch1(kernel(mod, "fail"), s, params));
    want = CUDA_ERROR_ASSERT;
  } else if (!strcmp(kind, "address")) {
    CUdeviceptr bad = p + (1ull << 33);
    uint32_t value = 1;
    uint64_t n = 16;
    void* params[] = {&bad, &value, &n};
    CHECK(launch1(fill, s, params));
    want = CUDA_ERROR_ILLEGAL_ADDRESS;
  } else {
    CHECK(launch1(kernel(mod, "crash"), s, NULL));
    want = CUDA_ERROR_ILLEGAL_ADDRESS;
  }
  /* commands behind it do not run, and do not hang */
  for (int i = 0; i < 100; ++i) {
    void* params[] = {&p, &word, &(uint64_t){16}};
    const CUresult r = launch1(fill, s, params);
    EXPECT(r == CUDA_SUCCESS || r == want);
  }
  cuEventRecord(e, s);
  CUresult r = cuStreamSynchronize(s);
  if (!strcmp(kind, "crash") && r == CUDA_ERROR_LAUNCH_FAILED) want = r; /* either names an execution fault */
  EXPECT_RESULT(r, want);

  EXPECT_RESULT(cuStreamSynchronize(other), want);
  EXPECT_RESULT(cuCtxSynchronize(), want);
  EXPECT_RESULT(cuMemcpyDtoH(&word, p, 4), want);
  EXPECT_RESULT(cuEventQuery(e), want);
  EXPECT_RESULT(cuEventSynchronize(e), want);
  EXPECT_RESULT(cuStreamQuery(s), want);
  CUdeviceptr q;
  EXPECT_RESULT(cuMemAlloc(&q, 16), want);
  void* params[] = {&p, &word, &(uint64_t){16}};
  EXPECT_RESULT(launch1(fill, s, params), want);
  EXPECT_RESULT(cuMemsetD8(p, 0, 16), want);

  /* what needs no device still answers */
  int n = 0;
  CHECK(cuDeviceGetCount(&n));
  CUcontext ctx;
  CHECK(cuCtxGetCurrent(&ctx));
  char name[32];
  snprintf(name, sizeof name, "fault %s", kind);
  return pass(name);
}
