// SPDX-License-Identifier: Apache-2.0
// Devices: choosing, facts, limits, the primary context under the runtime, a reset.
#include <cuda.h>

#include "program.h"

extern "C" cudaError_t cudaProfilerStop();  // its header is not in the package

static void contexts() {
  CUcontext context = nullptr, primary = nullptr;
  unsigned flags = 0;
  int active = -1, device = -1;
  // Nothing is made before it is needed: asking for the number of devices initialises the driver, no context.
  int count = 0;
  CHECK(cudaGetDeviceCount(&count));
  EXPECT(count >= 1);
  EXPECT(cuDevicePrimaryCtxGetState(0, &flags, &active) == CUDA_SUCCESS && active == 0);
  CHECK(cudaGetDevice(&device));
  EXPECT(cuCtxGetCurrent(&context) == CUDA_SUCCESS && context == nullptr);
  CHECK(cudaFree(nullptr));  // the usual way to say: initialise
  EXPECT(cuCtxGetCurrent(&context) == CUDA_SUCCESS && context != nullptr);
  EXPECT(cuDevicePrimaryCtxGetState(0, &flags, &active) == CUDA_SUCCESS && active == 1);
  EXPECT(cuDevicePrimaryCtxRetain(&primary, 0) == CUDA_SUCCESS && primary == context);
  EXPECT(cuDevicePrimaryCtxRelease(0) == CUDA_SUCCESS);
  // A thread without a context gets one by its first call; cudaSetDevice gives it at once.
  std::thread([primary] {
    CUcontext own = nullptr;
    EXPECT(cuCtxGetCurrent(&own) == CUDA_SUCCESS && own == nullptr);
    CHECK(cudaSetDevice(0));
    EXPECT(cuCtxGetCurrent(&own) == CUDA_SUCCESS && own == primary);
  }).join();
  // A context that the program made current by the driver API is used as it is.
  CUcontext other = nullptr;
#if CUDART_VERSION >= 13000
  EXPECT(cuCtxCreate(&other, nullptr, 0, 0) == CUDA_SUCCESS);
#else
  EXPECT(cuCtxCreate(&other, 0, 0) == CUDA_SUCCESS);
#endif
  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, 256));
  EXPECT(cuCtxGetCurrent(&context) == CUDA_SUCCESS && context == other);
  CHECK(cudaFree(memory));
  EXPECT(cuCtxDestroy(other) == CUDA_SUCCESS);
  CHECK(cudaSetDevice(0));
}

static void facts() {
  cudaDeviceProp p, again;
  memset(&p, 0xa5, sizeof p);
  memset(&again, 0x5a, sizeof again);
  CHECK(cudaGetDeviceProperties(&p, 0));
  CHECK(cudaGetDeviceProperties(&again, 0));
  EXPECT(memcmp(&p, &again, sizeof p) == 0);  // every byte is written
  EXPECT(p.name[0] != '\0' && p.totalGlobalMem > 0 && p.warpSize == 32 && p.major >= 1);
  EXPECT_RESULT(cudaGetDeviceProperties(&p, 1000), cudaErrorInvalidDevice);
  EXPECT_RESULT(cudaGetDeviceProperties(&p, -1), cudaErrorInvalidDevice);
  const struct {
    cudaDeviceAttr attribute;
    int field;
  } same[] = {
      {cudaDevAttrMaxThreadsPerBlock, p.maxThreadsPerBlock},
      {cudaDevAttrMaxBlockDimZ, p.maxThreadsDim[2]},
      {cudaDevAttrMaxGridDimY, p.maxGridSize[1]},
      {cudaDevAttrMultiProcessorCount, p.multiProcessorCount},
      {cudaDevAttrComputeCapabilityMajor, p.major},
      {cudaDevAttrComputeCapabilityMinor, p.minor},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, static_cast<int>(p.sharedMemPerBlockOptin)},
      {cudaDevAttrMaxRegistersPerMultiprocessor, p.regsPerMultiprocessor},
      {cudaDevAttrL2CacheSize, p.l2CacheSize},
      {cudaDevAttrCooperativeLaunch, p.cooperativeLaunch},
      {cudaDevAttrMemoryPoolsSupported, p.memoryPoolsSupported},
      {cudaDevAttrClusterLaunch, p.clusterLaunch},
      {cudaDevAttrManagedMemory, p.managedMemory},
#if CUDART_VERSION < 13000
      {cudaDevAttrClockRate, p.clockRate},
      {cudaDevAttrComputeMode, p.computeMode},
#endif
  };
  for (const auto& s : same) {
    int value = -1;
    CHECK(cudaDeviceGetAttribute(&value, s.attribute, 0));
    EXPECT(value == s.field);
  }
  int value = 0;
  EXPECT_RESULT(cudaDeviceGetAttribute(&value, cudaDevAttrWarpSize, 1000), cudaErrorInvalidDevice);
  CUuuid uuid;
  EXPECT(cuDeviceGetUuid(&uuid, 0) == CUDA_SUCCESS && memcmp(&uuid, &p.uuid, sizeof uuid) == 0);
  char bus[32] = "";
  int device = -1;
  CHECK(cudaDeviceGetPCIBusId(bus, sizeof bus, 0));
  CHECK(cudaDeviceGetByPCIBusId(&device, bus));
  EXPECT(device == 0);
  CHECK(cudaChooseDevice(&device, &p));
  EXPECT(device == 0);
  int driver = 0, runtime = 0;
  CHECK(cudaDriverGetVersion(&driver));
  CHECK(cudaRuntimeGetVersion(&runtime));
  EXPECT(runtime == CUDART_VERSION && driver >= 12000);
}

static void preferences() {
  size_t bytes = 0;
  CHECK(cudaDeviceSetLimit(cudaLimitPrintfFifoSize, 2 << 20));
  CHECK(cudaDeviceGetLimit(&bytes, cudaLimitPrintfFifoSize));
  EXPECT(bytes >= 2 << 20);
  cudaFuncCache cache;
  CHECK(cudaDeviceSetCacheConfig(cudaFuncCachePreferL1));
  CHECK(cudaDeviceGetCacheConfig(&cache));
  EXPECT(cache == cudaFuncCachePreferL1);
  int least = 1, greatest = 1;
  CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  EXPECT(least == 0 && greatest <= 0);
  unsigned flags = 0;
  CHECK(cudaGetDeviceFlags(&flags));
  EXPECT(flags & cudaDeviceMapHost);
  CHECK(cudaProfilerStop());
  int can = 1;
  cudaError_t rc = cudaDeviceCanAccessPeer(&can, 0, 0);
  EXPECT(rc == cudaSuccess && can == 0);
}

static void entry_points() {
  void* f = nullptr;
  cudaDriverEntryPointQueryResult status = cudaDriverEntryPointSymbolNotFound;
  CHECK(cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &f, CUDART_VERSION, cudaEnableDefault, &status));
  EXPECT(f != nullptr && status == cudaDriverEntryPointSuccess);
  CUcontext context = nullptr, same = nullptr;
  EXPECT(reinterpret_cast<CUresult (*)(CUcontext*)>(f)(&context) == CUDA_SUCCESS);
  EXPECT(cuCtxGetCurrent(&same) == CUDA_SUCCESS && same == context);
  CHECK(cudaGetDriverEntryPointByVersion("cuNoSuchThing", &f, CUDART_VERSION, cudaEnableDefault, &status));
  EXPECT(f == nullptr && status == cudaDriverEntryPointSymbolNotFound);
  CHECK(cudaGetDriverEntryPointByVersion("cuNoSuchThing", &f, CUDART_VERSION, cudaEnableDefault, nullptr));
  EXPECT(f == nullptr);
}

static void reset() {
  void* memory = nullptr;
  size_t before = 0, within = 0, after = 0, total = 0;
  CHECK(cudaMemGetInfo(&before, &total));
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaMalloc(&memory, 32 << 20));
  CHECK(cudaMemGetInfo(&within, nullptr));
  EXPECT(before - within >= 32 << 20);
  CHECK(cudaMemsetAsync(memory, 1, 32 << 20, stream));
  CHECK(cudaMemsetAsync(memory, 1, 64, cudaStreamPerThread));
  CHECK(cudaDeviceReset());
  CHECK(cudaMemGetInfo(&after, nullptr));
  EXPECT(after >= before);
  EXPECT_RESULT(cudaStreamQuery(stream), cudaErrorInvalidResourceHandle);
  EXPECT_RESULT(cudaFree(memory), cudaErrorInvalidValue);
  cudaGetLastError();
  CHECK(cudaMalloc(&memory, 1 << 20));  // and it goes on
  CHECK(cudaMemsetAsync(memory, 1, 64, cudaStreamPerThread));
  CHECK(cudaStreamSynchronize(cudaStreamPerThread));
  CHECK(cudaFree(memory));
}

int main() {
  contexts();
  facts();
  preferences();
  entry_points();
  reset();
  return pass("device");
}
