// SPDX-License-Identifier: Apache-2.0
/* Two devices: contexts, peer access, copies between them in order with both sides' streams. */
#include "program.h"

enum { kWords = 300000 };

/* No kernel of one GPU reaches the other's memory, so there are no atomics between them. */
static void no_atomics(void) {
  const CUatomicOperation ask[] = {CU_ATOMIC_OPERATION_INTEGER_ADD, CU_ATOMIC_OPERATION_CAS};
  const CUatomicOperation bad = CU_ATOMIC_OPERATION_MAX;
  unsigned can[2] = {9, 9};
  CHECK(cuDeviceGetP2PAtomicCapabilities(can, ask, 2, 0, 1));
  EXPECT(can[0] == 0 && can[1] == 0);
  EXPECT_RESULT(cuDeviceGetP2PAtomicCapabilities(can, ask, 0, 0, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuDeviceGetP2PAtomicCapabilities(can, &bad, 1, 0, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuDeviceGetP2PAtomicCapabilities(NULL, ask, 2, 0, 1), CUDA_ERROR_INVALID_VALUE);
}

/* A box and a batch from one GPU to the other, over rows that are longer than what is copied. */
static void boxes(CUcontext* ctx, CUstream* s, CUdeviceptr* p) {
  CUDA_MEMCPY3D_PEER c;
  CUmemcpyAttributes attrs;
  CUdeviceptr to[] = {p[1], p[0] + 400000}, from[] = {p[0] + 200000, p[1] + 600000};
  size_t sizes[] = {4096, 100000}, first = 0;
  memset(&c, 0, sizeof c);
  memset(&attrs, 0, sizeof attrs);
  attrs.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  c.srcMemoryType = c.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  c.srcDevice = p[0], c.srcContext = ctx[0], c.srcPitch = 64, c.srcHeight = 4;
  c.dstDevice = p[1], c.dstContext = ctx[1], c.dstPitch = 32, c.dstHeight = 2;
  c.WidthInBytes = 16, c.Height = 2, c.Depth = 3;
  for (int async = 0; async < 2; ++async) {
    CHECK(cuCtxSetCurrent(ctx[0]));
    CHECK(cuMemsetD32(p[0], 50 + (unsigned)async, kWords));
    CHECK(cuCtxSynchronize());
    CHECK(cuCtxSetCurrent(ctx[1]));
    CHECK(cuMemsetD32(p[1], 1, kWords));
    CHECK(cuCtxSynchronize());
    CHECK(async ? cuMemcpy3DPeerAsync(&c, s[1]) : cuMemcpy3DPeer(&c));
    if (async) CHECK(cuStreamSynchronize(s[1]));
    for (unsigned row = 0; row < 6; ++row) {
      expect_device_words(p[1] + row * 32, 50 + (unsigned)async, 4);
      expect_device_words(p[1] + row * 32 + 16, 1, 4);
    }
    expect_device_words(p[1] + 192, 1, 16);
  }
  c.Depth = kWords;
  EXPECT_RESULT(cuMemcpy3DPeer(&c), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemcpyBatchAsync(to, from, sizes, 2, &attrs, &first, 1, s[1]));
  CHECK(cuStreamSynchronize(s[1]));
  expect_device_words(p[1], 51, 1024);
  expect_device_words(p[0] + 400000, 1, 25000);
  CHECK(cuCtxSetCurrent(ctx[1]));
}

int main(void) {
  int n = 0, can = 0;
  CUdevice dev[2];
  CUcontext ctx[2], current;
  CUstream s[2];
  CUdeviceptr p[2];
  CUmodule mod[2];
  CUuuid uuid[2];
  CHECK(cuInit(0));
  CHECK(cuDeviceGetCount(&n));
  EXPECT(n >= 2);
  for (int i = 0; i < 2; ++i) {
    CHECK(cuDeviceGet(&dev[i], i));
    CHECK(cuDeviceGetUuid(&uuid[i], dev[i]));
    CHECK(cuDevicePrimaryCtxRetain(&ctx[i], dev[i]));
    CHECK(cuCtxSetCurrent(ctx[i]));
    CHECK(cuStreamCreate(&s[i], CU_STREAM_NON_BLOCKING));
    CHECK(cuMemAlloc(&p[i], kWords * 4));
    mod[i] = load_kernels();
  }
  EXPECT(memcmp(&uuid[0], &uuid[1], sizeof uuid[0]) != 0);
  EXPECT(ctx[0] != ctx[1]);
  CHECK(cuDeviceCanAccessPeer(&can, dev[0], dev[1]));

  /* address ranges are disjoint, and say their device */
  int ordinal = -1;
  CHECK(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, p[0]));
  EXPECT_EQ(ordinal, 0);
  CHECK(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, p[1]));
  EXPECT_EQ(ordinal, 1);

  /* device 0 -> device 1, synchronous and behind a slow kernel */
  CHECK(cuCtxSetCurrent(ctx[0]));
  launch_slow_fill(kernel(mod[0], "slow_fill"), NULL, p[0], 41, kWords, 20000);
  CHECK(cuMemcpyPeer(p[1], ctx[1], p[0], ctx[0], kWords * 4));
  CHECK(cuCtxSetCurrent(ctx[1]));
  expect_device_words(p[1], 41, kWords);
  CHECK(cuCtxSetCurrent(ctx[0]));
  for (uint32_t i = 0; i < 10; ++i) {
    launch_slow_fill(kernel(mod[0], "slow_fill"), s[0], p[0], i, kWords, 2000);
    CHECK(cuMemcpyPeerAsync(p[1], ctx[1], p[0], ctx[0], kWords * 4, s[0]));
    CHECK(cuStreamSynchronize(s[0]));
    CHECK(cuCtxSetCurrent(ctx[1]));
    expect_device_words(p[1], i, kWords);
    CHECK(cuCtxSetCurrent(ctx[0]));
  }
  /* through unified addressing, no context named, from device 1's stream */
  CHECK(cuCtxSetCurrent(ctx[1]));
  launch_fill(kernel(mod[1], "fill"), s[1], p[1], 77, kWords);
  CHECK(cuMemcpyAsync(p[0], p[1], kWords * 4, s[1]));
  CHECK(cuStreamSynchronize(s[1]));
  CHECK(cuCtxSetCurrent(ctx[0]));
  expect_device_words(p[0], 77, kWords);

  /* order across devices by an event */
  CUevent e;
  CHECK(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
  launch_slow_fill(kernel(mod[0], "slow_fill"), s[0], p[0], 123, kWords, 30000);
  CHECK(cuEventRecord(e, s[0]));
  CHECK(cuCtxSetCurrent(ctx[1]));
  CHECK(cuStreamWaitEvent(s[1], e, 0));
  CHECK(cuMemcpyPeerAsync(p[1], ctx[1], p[0], ctx[0], kWords * 4, s[1]));
  CHECK(cuStreamSynchronize(s[1]));
  expect_device_words(p[1], 123, kWords);

  /* handles belong to their device */
  void* params[] = {&(uint64_t){10}};
  EXPECT_RESULT(launch1(kernel(mod[1], "slow"), s[0], params), CUDA_ERROR_INVALID_HANDLE);
  CHECK(cuCtxGetCurrent(&current));
  EXPECT(current == ctx[1]);
  no_atomics();
  boxes(ctx, s, p);
  return pass("peer");
}
