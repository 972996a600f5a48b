// SPDX-License-Identifier: Apache-2.0
// Virtual memory management by the driver API: a range that grows in place, a handle that moves to another address,
// with the argument `alias` one handle at two addresses at once, and kernels and copies of the runtime on all of it.
// run:
// run: alias
#include <cstring>

#include "driver.cuh"

__global__ void number(uint32_t* words, size_t count, uint32_t from) {
  for (size_t i = here(); i < count; i += threads()) words[i] = uint32_t(i) + from;
}

int main(int argc, char** argv) {
  const bool twice = argc > 1 && strcmp(argv[1], "alias") == 0;
  CHECK(cudaFree(nullptr));
  if (!attribute(static_cast<cudaDeviceAttr>(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)))
    not_here("virtual memory management");
  DRIVER(cuMemGetAllocationGranularity);
  DRIVER(cuMemAddressReserve);
  DRIVER(cuMemAddressFree);
  DRIVER(cuMemCreate);
  DRIVER(cuMemRelease);
  DRIVER(cuMemMap);
  DRIVER(cuMemUnmap);
  DRIVER(cuMemSetAccess);
  DRIVER(cuMemGetAccess);
  CUmemAllocationProp what{};
  what.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  what.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  size_t granularity = 0;
  CHECK_CU(p_cuMemGetAllocationGranularity(&granularity, &what, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  EXPECT(granularity >= 65536 && (granularity & (granularity - 1)) == 0);
  const size_t piece = granularity, whole = 4 * piece;
  CUdeviceptr base = 0, alias = 0;
  CHECK_CU(p_cuMemAddressReserve(&base, whole, 0, 0, 0));
  CHECK_CU(p_cuMemAddressReserve(&alias, piece, 0, 0, 0));
  EXPECT(base && alias && base % granularity == 0);
  CUmemAccessDesc access{};
  access.location = what.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CUmemGenericAllocationHandle handles[3];
  uint32_t* words = reinterpret_cast<uint32_t*>(base);
  for (int k = 0; k < 3; ++k) {  // it grows, and what was in it stays
    CHECK_CU(p_cuMemCreate(&handles[k], piece, &what, 0));
    CHECK_CU(p_cuMemMap(base + k * piece, piece, 0, handles[k], 0));
    CHECK_CU(p_cuMemSetAccess(base + k * piece, piece, &access, 1));
    CHECK(cudaMemset(words + k * piece / 4, k + 1, piece));
  }
  unsigned long long allowed = 0;
  CHECK_CU(p_cuMemGetAccess(&allowed, &what.location, base + piece));
  EXPECT_EQ(allowed, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  const size_t count = 3 * piece / 4;
  std::vector<uint32_t> got = back(words, count);
  for (size_t i = 0; i < count; ++i) EXPECT_EQ(got[i], 0x01010101u * uint32_t(i / (piece / 4) + 1));
  number<<<32, 128>>>(words, count, 7);  // across all three
  LAUNCHED();
  got = back(words, count);
  for (size_t i = 0; i < count; ++i)
    EXPECT_EQ(got[i], made(uint32_t(i) + 7, 0x01010101u * uint32_t(i / (piece / 4) + 1)));
  // The middle piece at another address: what is written there is seen here, at once or when it has come back.
  if (!twice) CHECK_CU(p_cuMemUnmap(base + piece, piece));
  CHECK_CU(p_cuMemMap(alias, piece, 0, handles[1], 0));
  CHECK_CU(p_cuMemSetAccess(alias, piece, &access, 1));
  uint32_t* moved = reinterpret_cast<uint32_t*>(alias);
  EXPECT_EQ(back(moved, 100)[99], made(uint32_t(piece / 4 + 99) + 7, 0x02020202u));
  CHECK(cudaMemset(moved, 0x44, 64));
  CHECK(cudaDeviceSynchronize());
  if (twice) EXPECT_EQ(back(words + piece / 4, 1)[0], 0x44444444);
  CHECK_CU(p_cuMemUnmap(alias, piece));
  if (!twice) {
    CHECK_CU(p_cuMemMap(base + piece, piece, 0, handles[1], 0));
    CHECK_CU(p_cuMemSetAccess(base + piece, piece, &access, 1));
  }
  CHECK_CU(p_cuMemAddressFree(alias, piece));
  for (CUmemGenericAllocationHandle handle : handles) CHECK_CU(p_cuMemRelease(handle));  // the mappings hold it
  EXPECT_EQ(back(words + piece / 4, 1)[0], 0x44444444);
  for (int k = 0; k < 3; ++k) CHECK_CU(p_cuMemUnmap(base + k * piece, piece));
  CHECK_CU(p_cuMemAddressFree(base, whole));
  return ok("virtual_memory");
}
