// SPDX-License-Identifier: Apache-2.0
/* Virtual memory management: reserve, create, map, open, use, unmap, map elsewhere; grow in place as PyTorch's
 * expandable segments do; what cannot be done is refused. */
#include "program.h"

static CUmemAllocationProp prop_of(CUdevice dev) {
  CUmemAllocationProp p;
  memset(&p, 0, sizeof p);
  p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  p.location.id = dev;
  return p;
}

int main(void) {
  const CUdevice dev = start();
  int value = 0;
  CUmodule mod = load_kernels();
  CHECK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, dev));
  EXPECT_EQ(value, 1);
  CUmemAllocationProp prop = prop_of(dev), got;
  CUmemAccessDesc access;
  memset(&access, 0, sizeof access);
  access.location = prop.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  size_t unit = 0, free0 = 0, free1 = 0, total = 0;
  CHECK(cuMemGetAllocationGranularity(&unit, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  EXPECT(unit >= 65536);
  CUdeviceptr range = 0, other = 0, plain = 0;
  CUmemGenericAllocationHandle a, b, c;
  CHECK(cuMemAddressReserve(&range, 64 * unit, 0, 0, 0));
  CHECK(cuMemAddressReserve(&other, 8 * unit, 16 * unit, 0, 0));
  EXPECT_EQ(other % (16 * unit), 0);
  EXPECT_RESULT(cuMemAddressReserve(&plain, unit + 1, 0, 0, 0), CUDA_ERROR_INVALID_VALUE);

  /* nothing is usable before it is mapped and opened */
  CHECK(cuMemAlloc(&plain, 4 * unit));
  EXPECT_RESULT(cuMemsetD32(range, 1, 1), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemGetInfo(&free0, &total));
  CHECK(cuMemCreate(&a, 2 * unit, &prop, 0));
  CHECK(cuMemCreate(&b, unit, &prop, 0));
  CHECK(cuMemGetInfo(&free1, &total));
  EXPECT_EQ(free0 - free1, 3 * unit);
  CHECK(cuMemGetAllocationPropertiesFromHandle(&got, a));
  EXPECT_EQ(got.location.id, dev);
  CHECK(cuMemMap(range, 2 * unit, 0, a, 0));
  EXPECT_RESULT(cuMemMap(range + unit, unit, 0, b, 0), CUDA_ERROR_INVALID_VALUE);     /* taken */
  EXPECT_RESULT(cuMemMap(range + 4 * unit, unit, 0, a, 0), CUDA_ERROR_INVALID_VALUE); /* not the handle's size */
  EXPECT_RESULT(cuMemsetD32(range, 1, 1), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemMap(range + 2 * unit, unit, 0, b, 0)); /* the segment grows */
  CHECK(cuMemSetAccess(range, 3 * unit, &access, 1));
  unsigned long long flags = 0;
  CHECK(cuMemGetAccess(&flags, &access.location, range + 3 * unit - 1));
  EXPECT_EQ(flags, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);

  /* one range over two handles: sets, copies and kernels cross the border */
  const size_t words = 3 * unit / 4;
  CHECK(cuMemsetD32(range, 7, words));
  launch_fill(kernel(mod, "fill"), NULL, range + unit, 8, unit / 2); /* ends 1 unit behind the border */
  CHECK(cuMemcpyDtoD(plain, range, 3 * unit));
  expect_device_words(plain, 7, unit / 4);
  expect_device_words(plain + unit, 8, unit / 2);
  EXPECT_RESULT(cuMemsetD32(range, 7, words + 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemUnmap(range, (size_t)0 - unit), CUDA_ERROR_INVALID_VALUE); /* an end that wraps is none */
  EXPECT_RESULT(cuMemSetAccess(range + 8 * unit, (size_t)0 - unit, &access, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_RESULT(cuMemFree(range), CUDA_ERROR_INVALID_VALUE);
  CUdeviceptr base = 0;
  CHECK(cuMemGetAddressRange(&base, NULL, range + 2 * unit + 5));
  EXPECT(base == range + 2 * unit);

  /* contents belong to the handle, wherever it is mapped */
  CHECK(cuMemUnmap(range, 2 * unit));
  EXPECT_RESULT(cuMemsetD32(range, 1, 1), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemsetD32(range + 2 * unit, 9, unit / 4)); /* the neighbour stays */
  CHECK(cuMemMap(other, 2 * unit, 0, a, 0));
  EXPECT_RESULT(cuMemMap(other + 4 * unit, 2 * unit, 0, a, 0), CUDA_ERROR_NOT_SUPPORTED); /* twice at once */
  CHECK(cuMemSetAccess(other, 2 * unit, &access, 1));
  CHECK(cuMemcpyDtoD(plain, other, 2 * unit));
  expect_device_words(plain, 7, unit / 4);
  expect_device_words(plain + unit, 8, unit / 4);
  /* unmapped, its old addresses used by another handle, mapped there again later */
  CHECK(cuMemUnmap(other, 2 * unit));
  CHECK(cuMemCreate(&c, 2 * unit, &prop, 0));
  CHECK(cuMemMap(other, 2 * unit, 0, c, 0));
  CHECK(cuMemSetAccess(other, 2 * unit, &access, 1));
  CHECK(cuMemsetD32(other, 1, 2 * unit / 4));
  CHECK(cuMemMap(range, 2 * unit, 0, a, 0));
  CHECK(cuMemSetAccess(range, 2 * unit, &access, 1));
  CHECK(cuMemcpyDtoD(plain, range, 2 * unit));
  expect_device_words(plain, 7, unit / 4);

  /* a handle lives as long as it is mapped or named */
  CUmemGenericAllocationHandle again;
  CHECK(cuMemRetainAllocationHandle(&again, (void*)(uintptr_t)(other + 5)));
  EXPECT(again == c);
  CHECK(cuMemRelease(c));
  CHECK(cuMemRelease(c));
  EXPECT_RESULT(cuMemRelease(c), CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemsetD32(other, 2, 4));
  EXPECT_RESULT(cuMemAddressFree(other, 8 * unit), CUDA_ERROR_INVALID_VALUE); /* something is mapped */
  CHECK(cuMemUnmap(other, 2 * unit));
  CHECK(cuMemUnmap(range, 3 * unit));
  CHECK(cuMemRelease(a));
  CHECK(cuMemRelease(b));
  CHECK(cuMemAddressFree(other, 8 * unit));
  CHECK(cuMemAddressFree(range, 64 * unit));
  CHECK(cuMemGetInfo(&free1, &total));
  EXPECT_EQ(free0, free1);

  /* refused: out of memory at the call, other devices, less than read and write */
  EXPECT_RESULT(cuMemCreate(&c, total / unit * unit + unit, &prop, 0), CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(cuMemAddressReserve(&range, unit, 0, 0, 0));
  CHECK(cuMemCreate(&c, unit, &prop, 0));
  CHECK(cuMemMap(range, unit, 0, c, 0));
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READ;
  EXPECT_RESULT(cuMemSetAccess(range, unit, &access, 1), CUDA_ERROR_NOT_SUPPORTED);
  prop.location.type = CU_MEM_LOCATION_TYPE_HOST;
  EXPECT_RESULT(cuMemCreate(&c, unit, &prop, 0), CUDA_ERROR_NOT_SUPPORTED);
  return pass("vmm");
}
