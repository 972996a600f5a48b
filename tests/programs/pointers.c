/* What the driver says of an address: device, pinned, unknown, inside and outside. */
#include "program.h"

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
