/* Contexts: initialisation, device facts, primary contexts, the stack, one current context per thread. */
#include "program.h"

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
