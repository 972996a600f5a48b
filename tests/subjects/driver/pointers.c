// SPDX-License-Identifier: Apache-2.0
/* What the driver says of an address: device, pinned, unknown, inside and outside. */
#include "program.h"

#include <stdbool.h>

static Gate gate;

static void* open_later(void* unused) {
  (void)unused;
  usleep(30000); /* who does not wait is back before */
  open_gate(&gate);
  return NULL;
}

/* A synchronous memset behind a closed gate: does it come back before the gate is open? */
static void expect_memset(CUdeviceptr p, int waits) {
  pthread_t t;
  close_gate(&gate, NULL);
  if (waits) EXPECT_EQ(pthread_create(&t, NULL, open_later, NULL), 0);
  CHECK(cuMemsetD8(p, 1, 100));
  EXPECT_RESULT(cuStreamQuery(NULL), waits ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
  if (waits)
    pthread_join(t, NULL);
  else
    open_gate(&gate);
  CHECK(cuStreamSynchronize(NULL));
}

static bool sync_memops(CUdeviceptr p) {
  bool on = true;
  CHECK(cuPointerGetAttribute(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, p));
  return on;
}

static void synchronous_operations(void) {
  CUdeviceptr p, q;
  unsigned on = 1, off = 0;
  void* pinned;
  uint32_t local = 0;
  CHECK(cuMemAlloc(&p, 4096));
  CHECK(cuMemAlloc(&q, 4096));
  CHECK(cuMemAllocHost(&pinned, 4096));
  EXPECT(!sync_memops(p));
  expect_memset(p, 0);
  CHECK(cuPointerSetAttribute(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, p + 100));
  EXPECT(sync_memops(p) && sync_memops(p + 4095) && !sync_memops(q));
  expect_memset(p, 1);
  expect_memset(p + 200, 1);
  expect_memset(q, 0);
  close_gate(&gate, NULL); /* what was asked for on a stream stays asynchronous */
  CHECK(cuMemsetD8Async(p, 1, 100, NULL));
  EXPECT_RESULT(cuStreamQuery(NULL), CUDA_ERROR_NOT_READY);
  open_gate(&gate);
  CHECK(cuPointerSetAttribute(&off, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, p));
  EXPECT(!sync_memops(p));
  expect_memset(p, 0);
  /* what was under way is over when it is set */
  pthread_t t;
  close_gate(&gate, NULL);
  CHECK(cuMemsetD8(p, 2, 100));
  EXPECT_EQ(pthread_create(&t, NULL, open_later, NULL), 0);
  CHECK(cuPointerSetAttribute(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, p));
  CHECK(cuStreamQuery(NULL));
  pthread_join(t, NULL);
  /* and the same for a whole context */
  CHECK(cuCtxSetFlags(CU_CTX_SYNC_MEMOPS));
  expect_memset(q, 1);
  CHECK(cuCtxSetFlags(0));
  expect_memset(q, 0);
  CHECK(cuPointerSetAttribute(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, (CUdeviceptr)(uintptr_t)pinned));
  EXPECT(sync_memops((CUdeviceptr)(uintptr_t)pinned));

  EXPECT_RESULT(cuPointerSetAttribute(NULL, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, p), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuPointerSetAttribute(&on, CU_POINTER_ATTRIBUTE_BUFFER_ID, p), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuPointerSetAttribute(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, (CUdeviceptr)(uintptr_t)&local),
                CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuPointerSetAttribute(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, 0), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemFree(p));
  EXPECT_RESULT(cuPointerSetAttribute(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, p), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemAlloc(&p, 4096)); /* the next owner of the address has not asked */
  EXPECT(!sync_memops(p));
  CHECK(cuMemFree(p));
  CHECK(cuMemFree(q));
  CHECK(cuMemFreeHost(pinned));
}

int main(void) {
  CUdevice dev = start();
  CUcontext ctx, got_ctx = NULL;
  CHECK(cuCtxGetCurrent(&ctx));
  CUdeviceptr p, base = 0, as_device = 0;
  void *pinned, *as_host = NULL;
  size_t size = 0;
  unsigned type = 0, flags = 0;
  int ordinal = -1, managed = -1;
  CHECK(cuMemAlloc(&p, 5000));
  CHECK(cuMemAllocHost(&pinned, 8192));

  CHECK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p + 4999));
  EXPECT_EQ(type, CU_MEMORYTYPE_DEVICE);
  CHECK(cuPointerGetAttribute(&got_ctx, CU_POINTER_ATTRIBUTE_CONTEXT, p));
  EXPECT(got_ctx == ctx);
  CHECK(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, p));
  EXPECT_EQ(ordinal, dev);
  CHECK(cuPointerGetAttribute(&as_device, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, p + 8));
  EXPECT(as_device == p + 8);
  CHECK(cuPointerGetAttribute(&base, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, p + 100));
  EXPECT(base == p);
  CHECK(cuPointerGetAttribute(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, p + 100));
  EXPECT_EQ(size, 5000);
  CHECK(cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, p));
  EXPECT_EQ(managed & 0xff, 0);
  unsigned long long id = 0, id2 = 0;
  CHECK(cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, p));
  CHECK(cuMemFree(p));
  EXPECT_RESULT(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemAlloc(&p, 5000));
  CHECK(cuPointerGetAttribute(&id2, CU_POINTER_ATTRIBUTE_BUFFER_ID, p));
  EXPECT(id != id2);

  const CUdeviceptr host = (CUdeviceptr)(uintptr_t)pinned;
  CHECK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, host + 8191));
  EXPECT_EQ(type, CU_MEMORYTYPE_HOST);
  CHECK(cuPointerGetAttribute(&as_host, CU_POINTER_ATTRIBUTE_HOST_POINTER, host + 16));
  EXPECT(as_host == (char*)pinned + 16);
  CHECK(cuMemHostGetFlags(&flags, pinned));
  CHECK(cuMemHostGetDevicePointer(&as_device, pinned, 0));
  EXPECT(as_device == host); /* unified addressing */
  uint32_t local = 0;
  EXPECT_RESULT(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)(uintptr_t)&local),
                CUDA_ERROR_INVALID_VALUE);

  /* several at once: no error for foreign memory, but zeroes */
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_CONTEXT, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                      CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
  void* data[] = {&got_ctx, &type, &ordinal};
  CHECK(cuPointerGetAttributes(3, attributes, data, p));
  EXPECT(got_ctx == ctx && type == CU_MEMORYTYPE_DEVICE && ordinal == dev);
  CHECK(cuPointerGetAttributes(3, attributes, data, (CUdeviceptr)(uintptr_t)&local));
  EXPECT_EQ(type, 0);
  EXPECT(got_ctx == NULL);

  synchronous_operations();

  CHECK(cuMemGetAddressRange(&base, &size, p + 4999));
  EXPECT(base == p && size == 5000);
  EXPECT_RESULT(cuMemGetAddressRange(&base, &size, p + (1ull << 35)), CUDA_ERROR_NOT_FOUND);

  /* addresses are aligned, and lie apart */
  CUdeviceptr many[100];
  for (int i = 0; i < 100; ++i) {
    CHECK(cuMemAlloc(&many[i], 1 + (size_t)i * 37));
    EXPECT_EQ(many[i] % 256, 0);
    for (int k = 0; k < i; ++k)
      EXPECT(many[i] + 1 + (size_t)i * 37 <= many[k] || many[k] + 1 + (size_t)k * 37 <= many[i]);
  }
  for (int i = 0; i < 100; ++i) CHECK(cuMemFree(many[i]));
  CHECK(cuMemFreeHost(pinned));
  EXPECT_RESULT(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, host), CUDA_ERROR_INVALID_VALUE);
  return pass("pointers");
}
