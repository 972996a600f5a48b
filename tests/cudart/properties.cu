// SPDX-License-Identifier: Apache-2.0
// The device's properties against its attributes, and against what is known of the architecture.
#include "check.cuh"

int main() {
  int count = 0, current = -1, runtime = 0, driver = 0;
  CHECK(cudaGetDeviceCount(&count));
  EXPECT(count >= 1);
  CHECK(cudaGetDevice(&current));
  EXPECT_EQ(current, 0);
  CHECK(cudaSetDevice(0));
  CHECK(cudaRuntimeGetVersion(&runtime));
  CHECK(cudaDriverGetVersion(&driver));
  EXPECT_EQ(runtime / 1000, CUDART_VERSION / 1000);
  EXPECT(driver >= 12'000);
  cudaDeviceProp p{};
  CHECK(cudaGetDeviceProperties(&p, 0));
  EXPECT(p.name[0]);
  const struct {
    const char* name;
    cudaDeviceAttr attribute;
    long long property;
  } pairs[] = {
      {"maxThreadsPerBlock", cudaDevAttrMaxThreadsPerBlock, p.maxThreadsPerBlock},
      {"maxThreadsDim[0]", cudaDevAttrMaxBlockDimX, p.maxThreadsDim[0]},
      {"maxThreadsDim[2]", cudaDevAttrMaxBlockDimZ, p.maxThreadsDim[2]},
      {"maxGridSize[0]", cudaDevAttrMaxGridDimX, p.maxGridSize[0]},
      {"maxGridSize[1]", cudaDevAttrMaxGridDimY, p.maxGridSize[1]},
      {"sharedMemPerBlock", cudaDevAttrMaxSharedMemoryPerBlock, (long long)(p.sharedMemPerBlock)},
      {"sharedMemPerBlockOptin", cudaDevAttrMaxSharedMemoryPerBlockOptin, (long long)(p.sharedMemPerBlockOptin)},
      {"sharedMemPerMultiprocessor", cudaDevAttrMaxSharedMemoryPerMultiprocessor,
       (long long)(p.sharedMemPerMultiprocessor)},
      {"reservedSharedMemPerBlock", cudaDevAttrReservedSharedMemoryPerBlock, (long long)(p.reservedSharedMemPerBlock)},
      {"totalConstMem", cudaDevAttrTotalConstantMemory, (long long)(p.totalConstMem)},
      {"warpSize", cudaDevAttrWarpSize, p.warpSize},
      {"regsPerBlock", cudaDevAttrMaxRegistersPerBlock, p.regsPerBlock},
      {"regsPerMultiprocessor", cudaDevAttrMaxRegistersPerMultiprocessor, p.regsPerMultiprocessor},
      {"textureAlignment", cudaDevAttrTextureAlignment, (long long)(p.textureAlignment)},
      {"multiProcessorCount", cudaDevAttrMultiProcessorCount, p.multiProcessorCount},
      {"integrated", cudaDevAttrIntegrated, p.integrated},
      {"canMapHostMemory", cudaDevAttrCanMapHostMemory, p.canMapHostMemory},
      {"concurrentKernels", cudaDevAttrConcurrentKernels, p.concurrentKernels},
      {"ECCEnabled", cudaDevAttrEccEnabled, p.ECCEnabled},
      {"pciBusID", cudaDevAttrPciBusId, p.pciBusID},
      {"pciDeviceID", cudaDevAttrPciDeviceId, p.pciDeviceID},
      {"asyncEngineCount", cudaDevAttrAsyncEngineCount, p.asyncEngineCount},
      {"unifiedAddressing", cudaDevAttrUnifiedAddressing, p.unifiedAddressing},
      {"memoryBusWidth", cudaDevAttrGlobalMemoryBusWidth, p.memoryBusWidth},
      {"l2CacheSize", cudaDevAttrL2CacheSize, p.l2CacheSize},
      {"maxThreadsPerMultiProcessor", cudaDevAttrMaxThreadsPerMultiProcessor, p.maxThreadsPerMultiProcessor},
      {"maxBlocksPerMultiProcessor", cudaDevAttrMaxBlocksPerMultiprocessor, p.maxBlocksPerMultiProcessor},
      {"major", cudaDevAttrComputeCapabilityMajor, p.major},
      {"minor", cudaDevAttrComputeCapabilityMinor, p.minor},
      {"managedMemory", cudaDevAttrManagedMemory, p.managedMemory},
      {"cooperativeLaunch", cudaDevAttrCooperativeLaunch, p.cooperativeLaunch},
      {"memoryPoolsSupported", cudaDevAttrMemoryPoolsSupported, p.memoryPoolsSupported},
      {"clusterLaunch", cudaDevAttrClusterLaunch, p.clusterLaunch},
  };
  for (const auto& pair : pairs) {
    const int value = attribute(pair.attribute);
    if (value != pair.property) {
      fprintf(stderr, "%s is %lld as a property and %d as an attribute\n", pair.name, pair.property, value);
      return 1;
    }
  }
  size_t free_bytes = 0, total = 0;
  CHECK(cudaMemGetInfo(&free_bytes, &total));
  EXPECT(total > p.totalGlobalMem / 100 * 98 && total < p.totalGlobalMem / 100 * 102);
  EXPECT(p.warpSize == 32 && p.maxThreadsPerBlock == 1024 && p.unifiedAddressing);
  EXPECT(p.major > 7 || (p.major == 7 && p.minor >= 5));
  if (p.major == 9 && p.minor == 0) {  // the CUDA programming guide's table for compute capability 9.0
    EXPECT_EQ(p.maxThreadsPerMultiProcessor, 2048);
    EXPECT_EQ(p.maxBlocksPerMultiProcessor, 32);
    EXPECT_EQ(p.regsPerMultiprocessor, 65'536);
    EXPECT_EQ(p.regsPerBlock, 65'536);
    EXPECT_EQ(p.sharedMemPerMultiprocessor, 228 << 10);
    EXPECT_EQ(p.sharedMemPerBlockOptin, 227 << 10);
    EXPECT_EQ(p.sharedMemPerBlock, 48 << 10);
    EXPECT_EQ(p.totalConstMem, 64 << 10);
    EXPECT_EQ(p.maxGridSize[0], 0x7FFFFFFF);
    EXPECT_EQ(p.maxGridSize[1], 65'535);
    EXPECT_EQ(p.maxThreadsDim[2], 64);
    EXPECT(p.cooperativeLaunch && p.clusterLaunch);
  }
  char bus[64] = "";
  CHECK(cudaDeviceGetPCIBusId(bus, sizeof bus, 0));
  int found = -1;
  CHECK(cudaDeviceGetByPCIBusId(&found, bus));
  EXPECT_EQ(found, 0);
  bool all_zero = true;
  for (char byte : p.uuid.bytes) all_zero = all_zero && byte == 0;
  EXPECT(!all_zero);
  unsigned flags = 0;
  CHECK(cudaGetDeviceFlags(&flags));
  printf("%s, compute capability %d.%d, %d multiprocessors, %zu MiB\n", p.name, p.major, p.minor, p.multiProcessorCount,
         p.totalGlobalMem >> 20);
  return ok("properties");
}
