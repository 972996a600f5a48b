// SPDX-License-Identifier: Apache-2.0
/* Contexts: initialisation, device facts, primary contexts, the stack, one current context per thread. */
#include "program.h"

#pragma GCC diagnostic ignored "-Wdeprecated-declarations" /* they are asked for as well */

static CUcontext primary;

static void* other_thread(void* unused) {
  (void)unused;
  CUcontext ctx = (CUcontext)1;
  CUdeviceptr p;
  CHECK(cuCtxGetCurrent(&ctx));
  EXPECT(ctx == NULL);
  EXPECT_RESULT(cuMemAlloc(&p, 16), CUDA_ERROR_INVALID_CONTEXT);
  CHECK(cuCtxSetCurrent(primary));
  CHECK(cuMemAlloc(&p, 16));
  CHECK(cuMemFree(p));
  CHECK(cuCtxPopCurrent(&ctx));
  EXPECT(ctx == primary);
  return NULL;
}

/* The flags of the context that is current, and how often it is in use. */
static void flags_and_uses(CUdevice dev, CUcontext first) {
  CUcontext made, got, current;
  unsigned flags = 99;
  int active = 0;
  CHECK(cuCtxGetFlags(&flags));
  EXPECT_EQ(flags, 0);
  CHECK(cuCtxSetFlags(CU_CTX_SCHED_BLOCKING_SYNC | CU_CTX_MAP_HOST));
  CHECK(cuCtxGetFlags(&flags));
  EXPECT_EQ(flags, CU_CTX_SCHED_BLOCKING_SYNC | CU_CTX_MAP_HOST);
  flags = 0;
  CHECK(cuDevicePrimaryCtxGetState(dev, &flags, &active)); /* it is the primary one */
  EXPECT_EQ(flags, CU_CTX_SCHED_BLOCKING_SYNC | CU_CTX_MAP_HOST);
  EXPECT_RESULT(cuCtxSetFlags(CU_CTX_SCHED_SPIN | CU_CTX_SCHED_YIELD), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuCtxSetFlags(0x100), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuCtxSetFlags(0x80000000u), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuCtxSetFlags(CU_CTX_COREDUMP_ENABLE), CUDA_ERROR_NOT_SUPPORTED);
  CHECK(cuCtxGetFlags(&flags));
  EXPECT_EQ(flags, CU_CTX_SCHED_BLOCKING_SYNC | CU_CTX_MAP_HOST);

  /* a context that was created: flags of its own */
  CHECK(cuCtxCreate(&made, NULL, CU_CTX_SCHED_SPIN, dev));
  CHECK(cuCtxGetFlags(&flags));
  EXPECT_EQ(flags, CU_CTX_SCHED_SPIN);
  CHECK(cuCtxSetFlags(CU_CTX_LMEM_RESIZE_TO_MAX));
  CHECK(cuCtxGetFlags(&flags));
  EXPECT_EQ(flags, CU_CTX_LMEM_RESIZE_TO_MAX);

  /* it lives until everybody who uses it has let it go */
  EXPECT_RESULT(cuCtxAttach(&got, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuCtxAttach(NULL, 0), CUDA_ERROR_INVALID_VALUE);
  for (int i = 0; i < 2; ++i) {
    CHECK(cuCtxAttach(&got, 0));
    EXPECT(got == made);
  }
  CHECK(cuCtxDetach(made));
  CHECK(cuCtxDetach(made));
  CHECK(cuCtxGetCurrent(&current));
  EXPECT(current == made);
  CHECK(cuCtxPushCurrent(first));
  EXPECT_RESULT(cuCtxDetach(made), CUDA_ERROR_INVALID_CONTEXT); /* not current */
  CHECK(cuCtxPopCurrent(&current));
  CHECK(cuCtxDetach(made));
  CHECK(cuCtxGetCurrent(&current));
  EXPECT(current == first);
  EXPECT_RESULT(cuCtxPushCurrent(made), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_RESULT(cuCtxDetach(made), CUDA_ERROR_INVALID_CONTEXT);
  CHECK(cuCtxCreate(&made, NULL, 0, dev)); /* a destruction asks nobody */
  CHECK(cuCtxAttach(&got, 0));
  CHECK(cuCtxDestroy(made));
  CHECK(cuCtxGetCurrent(&current));
  EXPECT(current == first);

  /* a primary context is let go by who attached to it, and by nobody else */
  EXPECT_RESULT(cuCtxDetach(first), CUDA_ERROR_INVALID_CONTEXT);
  CHECK(cuCtxAttach(&got, 0));
  EXPECT(got == first);
  CHECK(cuCtxDetach(first));
  EXPECT_RESULT(cuCtxDetach(first), CUDA_ERROR_INVALID_CONTEXT);
  CHECK(cuCtxSetFlags(0));
}

static void banks_and_atomics(CUdevice dev) {
  CUsharedconfig banks = CU_SHARED_MEM_CONFIG_DEFAULT_BANK_SIZE;
  CHECK(cuCtxSetSharedMemConfig(CU_SHARED_MEM_CONFIG_EIGHT_BYTE_BANK_SIZE)); /* of no effect since Volta */
  CHECK(cuCtxGetSharedMemConfig(&banks));
  EXPECT_EQ(banks, CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE);
  EXPECT_RESULT(cuCtxSetSharedMemConfig((CUsharedconfig)3), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuCtxGetSharedMemConfig(NULL), CUDA_ERROR_INVALID_VALUE);

  const CUatomicOperation ask[] = {CU_ATOMIC_OPERATION_INTEGER_ADD, CU_ATOMIC_OPERATION_CAS,
                                   CU_ATOMIC_OPERATION_FLOAT_MAX};
  const CUatomicOperation bad[] = {CU_ATOMIC_OPERATION_CAS, CU_ATOMIC_OPERATION_MAX};
  unsigned can[4] = {9, 9, 9, 9};
  int native = 1, n = 0;
  CHECK(cuDeviceGetAttribute(&native, CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED, dev));
  EXPECT_EQ(native, 0);
  CHECK(cuDeviceGetHostAtomicCapabilities(can, ask, 3, dev));
  EXPECT(can[0] == 0 && can[1] == 0 && can[2] == 0 && can[3] == 9);
  EXPECT_RESULT(cuDeviceGetHostAtomicCapabilities(can, ask, 0, dev), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuDeviceGetHostAtomicCapabilities(can, bad, 2, dev), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuDeviceGetHostAtomicCapabilities(NULL, ask, 3, dev), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuDeviceGetHostAtomicCapabilities(can, NULL, 3, dev), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuDeviceGetHostAtomicCapabilities(can, ask, 3, -1), CUDA_ERROR_INVALID_DEVICE);
  CHECK(cuDeviceGetCount(&n));
  EXPECT_RESULT(cuDeviceGetHostAtomicCapabilities(can, ask, 3, n), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_RESULT(cuDeviceGetP2PAtomicCapabilities(can, ask, 3, dev, dev), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_RESULT(cuDeviceGetP2PAtomicCapabilities(can, ask, 3, dev, n), CUDA_ERROR_INVALID_DEVICE);

  /* what is refused by name */
  CUasyncCallbackHandle callback = NULL;
  EXPECT_RESULT(cuDeviceRegisterAsyncNotification(dev, NULL, NULL, &callback), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_RESULT(cuDeviceUnregisterAsyncNotification(dev, callback), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_RESULT(cuFlushGPUDirectRDMAWrites(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                                           CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER),
                CUDA_ERROR_NOT_SUPPORTED);
}

int main(void) {
  int n = 0, version = 0, value = 0, active = 0;
  unsigned flags = 0;
  char name[64] = "";
  size_t total = 0;
  CUdevice dev = -1, got = -1;
  CUcontext ctx, second, current;
  CUuuid uuid;

  EXPECT_RESULT(cuDeviceGetCount(&n), CUDA_ERROR_NOT_INITIALIZED);
  EXPECT_RESULT(cuInit(1), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuInit(0));
  CHECK(cuInit(0));
  CHECK(cuDriverGetVersion(&version));
  EXPECT(version >= 12000);
  CHECK(cuDeviceGetCount(&n));
  EXPECT(n >= 1);
  EXPECT_RESULT(cuDeviceGet(&dev, n), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_RESULT(cuDeviceGet(&dev, -1), CUDA_ERROR_INVALID_DEVICE);
  CHECK(cuDeviceGet(&dev, 0));
  CHECK(cuDeviceGetName(name, sizeof name, dev));
  EXPECT(name[0]);
  CHECK(cuDeviceTotalMem(&total, dev));
  EXPECT(total > 0);
  CHECK(cuDeviceGetUuid(&uuid, dev));
  CHECK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, dev));
  EXPECT(value >= 256);
  CHECK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, dev));
  EXPECT_EQ(value, 1);
  EXPECT_RESULT(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_WARP_SIZE, n), CUDA_ERROR_INVALID_DEVICE);

  /* no context yet */
  CHECK(cuCtxGetCurrent(&current));
  EXPECT(current == NULL);
  EXPECT_RESULT(cuCtxGetDevice(&got), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_RESULT(cuCtxSynchronize(), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_RESULT(cuCtxSetFlags(0), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_RESULT(cuCtxAttach(&ctx, 0), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_RESULT(cuCtxSetSharedMemConfig(CU_SHARED_MEM_CONFIG_DEFAULT_BANK_SIZE), CUDA_ERROR_INVALID_CONTEXT);

  /* primary context: one per device, counted */
  CHECK(cuDevicePrimaryCtxGetState(dev, &flags, &active));
  EXPECT_EQ(active, 0);
  CHECK(cuDevicePrimaryCtxRetain(&primary, dev));
  CHECK(cuDevicePrimaryCtxRetain(&ctx, dev));
  EXPECT(ctx == primary);
  CHECK(cuDevicePrimaryCtxGetState(dev, &flags, &active));
  EXPECT_EQ(active, 1);
  CHECK(cuDevicePrimaryCtxRelease(dev));
  CHECK(cuDevicePrimaryCtxGetState(dev, &flags, &active));
  EXPECT_EQ(active, 1);

  /* retaining does not make it current */
  CHECK(cuCtxGetCurrent(&current));
  EXPECT(current == NULL);
  CHECK(cuCtxSetCurrent(primary));
  CHECK(cuCtxGetDevice(&got));
  EXPECT_EQ(got, dev);
  CHECK(cuCtxSynchronize());

  /* a created context is pushed; the stack gives back in order */
  CHECK(cuCtxCreate(&second, NULL, CU_CTX_SCHED_AUTO, dev));
  EXPECT(second != primary);
  CHECK(cuCtxGetCurrent(&current));
  EXPECT(current == second);
  CHECK(cuCtxPushCurrent(primary));
  CHECK(cuCtxGetCurrent(&current));
  EXPECT(current == primary);
  CHECK(cuCtxPopCurrent(&current));
  EXPECT(current == primary);
  CHECK(cuCtxGetCurrent(&current));
  EXPECT(current == second);

  /* memory of one context is reachable from the other on the same device (unified addressing) */
  CUdeviceptr p;
  uint32_t word = 7;
  CHECK(cuMemAlloc(&p, 4));
  CHECK(cuMemcpyHtoD(p, &word, 4));
  CHECK(cuCtxPopCurrent(&current));
  EXPECT(current == second);
  CHECK(cuCtxGetCurrent(&current));
  EXPECT(current == primary);
  word = 0;
  CHECK(cuMemcpyDtoH(&word, p, 4));
  EXPECT_EQ(word, 7);
  CHECK(cuCtxDestroy(second));
  EXPECT_RESULT(cuMemFree(p), CUDA_ERROR_INVALID_VALUE); /* went with its context */

  flags_and_uses(dev, primary);
  banks_and_atomics(dev);

  unsigned long long id = 0, id2 = 0;
  CHECK(cuCtxGetId(primary, &id));
  CHECK(cuCtxGetId(NULL, &id2));
  EXPECT_EQ(id, id2);
  int least = 1, greatest = 1;
  CHECK(cuCtxGetStreamPriorityRange(&least, &greatest));
  EXPECT(greatest <= least);

  pthread_t t;
  EXPECT_EQ(pthread_create(&t, NULL, other_thread, NULL), 0);
  pthread_join(t, NULL);

  CHECK(cuCtxPopCurrent(&current));
  EXPECT_RESULT(cuCtxPopCurrent(&current), CUDA_ERROR_INVALID_CONTEXT);
  CHECK(cuDevicePrimaryCtxRelease(dev));
  CHECK(cuDevicePrimaryCtxGetState(dev, &flags, &active));
  EXPECT_EQ(active, 0);
  EXPECT_RESULT(cuDevicePrimaryCtxRelease(dev), CUDA_ERROR_INVALID_CONTEXT);

  /* and once more from nothing */
  CHECK(cuDevicePrimaryCtxRetain(&primary, dev));
  CHECK(cuCtxSetCurrent(primary));
  CHECK(cuMemAlloc(&p, 1 << 20));
  CHECK(cuMemFree(p));
  return pass("context");
}
