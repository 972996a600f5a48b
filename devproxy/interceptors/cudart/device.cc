// SPDX-License-Identifier: Apache-2.0
// Devices, contexts, limits. The runtime's device is the driver's primary context of that device; a thread gets one at
// its first call that needs it, and cudaSetDevice gives it at once (since CUDA 12).
//
// Locks: g_primary_mu is a leaf but for the driver's own.
#include <string.h>

#include <atomic>
#include <mutex>

#include "cudart_decl.gen.h"
#include "devproxy/interceptors/cudart/registration.h"
#include "devproxy/interceptors/cudart/stub.h"

namespace devproxy::sa::cudart {

bool g_driver_ready = false;

namespace {
std::mutex g_primary_mu;
std::atomic<CUcontext> g_primary[kMaxDevices];
}  // namespace

cudaError_t initialise_driver() {
  const CUresult rc = cuInit(0);
  // A child of an initialised parent is refused by each driver call, which then says so itself.
  if (rc == CUDA_SUCCESS) __atomic_store_n(&g_driver_ready, true, __ATOMIC_RELEASE);
  return result(rc);
}

cudaError_t primary_context(int device, CUcontext* out) {
  int count = 0;
  if (const CUresult rc = cuDeviceGetCount(&count); rc != CUDA_SUCCESS) return result(rc);
  if (device < 0 || device >= count || device >= kMaxDevices) return cudaErrorInvalidDevice;
  *out = g_primary[device].load(std::memory_order_acquire);
  if (*out != nullptr) return cudaSuccess;
  const std::lock_guard lock(g_primary_mu);
  *out = g_primary[device].load(std::memory_order_acquire);
  if (*out != nullptr) return cudaSuccess;
  if (const CUresult rc = cuDevicePrimaryCtxRetain(out, device); rc != CUDA_SUCCESS) return result(rc);
  g_primary[device].store(*out, std::memory_order_release);
  return cudaSuccess;
}

namespace {

cudaError_t make_current(int device) {
  CUcontext context = nullptr;
  if (const cudaError_t rc = primary_context(device, &context); rc != cudaSuccess) return rc;
  return result(cuCtxSetCurrent(context));
}

}  // namespace

cudaError_t make_context() {
  if (const cudaError_t rc = enter_driver(); rc != cudaSuccess) return rc;
  return make_current(t_thread.device);
}

int current_device() {
  CUcontext context = nullptr;
  CUdevice device = 0;
  if (cuCtxGetCurrent(&context) == CUDA_SUCCESS && context != nullptr && cuCtxGetDevice(&device) == CUDA_SUCCESS)
    return device;
  return t_thread.device;
}

namespace device {

// -- which device -----------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  if (const cudaError_t rc = enter_driver(); rc != cudaSuccess) return rc;
  if (const CUresult rc = cuDeviceGetCount(count); rc != CUDA_SUCCESS) return result(rc);
  return *count == 0 ? cudaErrorNoDevice : cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (const cudaError_t rc = make_current(device); rc != cudaSuccess) return rc;
  t_thread.device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  CUcontext context = nullptr;
  if (const CUresult rc = cuCtxGetCurrent(&context); rc != CUDA_SUCCESS) return result(rc);
  if (context != nullptr) {  // asked more often than anything else: frameworks do it around every call
    *device = device_of(context);
    return cudaSuccess;
  }
  int count = 0;
  if (const CUresult rc = cuDeviceGetCount(&count); rc != CUDA_SUCCESS) return result(rc);
  if (count == 0) return cudaErrorNoDevice;
  *device = t_thread.device;
  return cudaSuccess;
}

cudaError_t cudaInitDevice(int device, unsigned int deviceFlags, unsigned int flags) {
  if (flags & ~static_cast<unsigned>(cudaInitDeviceFlagsAreValid)) return cudaErrorInvalidValue;
  CUcontext context = nullptr;
  if (flags & cudaInitDeviceFlagsAreValid)
    if (const CUresult rc = cuDevicePrimaryCtxSetFlags(device, deviceFlags & ~static_cast<unsigned>(cudaDeviceMapHost));
        rc != CUDA_SUCCESS)
      return result(rc);
  return primary_context(device, &context);
}

cudaError_t cudaSetDeviceFlags(unsigned int flags) {
  if (flags & ~static_cast<unsigned>(cudaDeviceMask)) return cudaErrorInvalidValue;
  // The driver always maps host memory and has no flag for it.
  return result(cuDevicePrimaryCtxSetFlags(current_device(), flags & ~static_cast<unsigned>(cudaDeviceMapHost)));
}

cudaError_t cudaGetDeviceFlags(unsigned int* flags) {
  CUcontext context = nullptr;
  int active = 0;
  CUresult rc = cuCtxGetCurrent(&context);
  if (rc == CUDA_SUCCESS)
    rc = context != nullptr ? cuCtxGetFlags(flags) : cuDevicePrimaryCtxGetState(t_thread.device, flags, &active);
  if (rc == CUDA_SUCCESS) *flags |= cudaDeviceMapHost;
  return result(rc);
}

cudaError_t cudaDeviceReset() {
  const int device = current_device();
  if (device >= kMaxDevices || g_primary[device].load(std::memory_order_acquire) == nullptr) return cudaSuccess;
  if (const cudaError_t rc = make_current(device); rc != cudaSuccess) return rc;
  if (const CUresult rc = cuCtxSynchronize(); rc != CUDA_SUCCESS) return result(rc);
  // Device code goes as well, and comes back at its next use, as before the first.
  if (const cudaError_t rc = unload_all(); rc != cudaSuccess) return rc;
  return result(cuDevicePrimaryCtxReset(device));
}

cudaError_t cudaDeviceSynchronize() { return result(cuCtxSynchronize()); }

// -- facts ------------------------------------------------------------------------------------------------------------

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attr, int device) {
  // The two enums number the same attributes alike.
  return result(cuDeviceGetAttribute(value, static_cast<CUdevice_attribute>(attr), device));
}

namespace {

int attribute(int device, CUdevice_attribute which) {
  int value = 0;
  return cuDeviceGetAttribute(&value, which, device) == CUDA_SUCCESS ? value : 0;
}

// Fields that are one attribute each.
struct IntField {
  size_t offset;
  CUdevice_attribute attribute;
};
#define DP_INT(field, name) {offsetof(cudaDeviceProp, field), CU_DEVICE_ATTRIBUTE_##name}
constexpr IntField kInts[] = {
    DP_INT(regsPerBlock, MAX_REGISTERS_PER_BLOCK),
    DP_INT(warpSize, WARP_SIZE),
    DP_INT(maxThreadsPerBlock, MAX_THREADS_PER_BLOCK),
    DP_INT(maxThreadsDim[0], MAX_BLOCK_DIM_X),
    DP_INT(maxThreadsDim[1], MAX_BLOCK_DIM_Y),
    DP_INT(maxThreadsDim[2], MAX_BLOCK_DIM_Z),
    DP_INT(maxGridSize[0], MAX_GRID_DIM_X),
    DP_INT(maxGridSize[1], MAX_GRID_DIM_Y),
    DP_INT(maxGridSize[2], MAX_GRID_DIM_Z),
    DP_INT(major, COMPUTE_CAPABILITY_MAJOR),
    DP_INT(minor, COMPUTE_CAPABILITY_MINOR),
    DP_INT(multiProcessorCount, MULTIPROCESSOR_COUNT),
    DP_INT(integrated, INTEGRATED),
    DP_INT(canMapHostMemory, CAN_MAP_HOST_MEMORY),
    DP_INT(maxTexture1D, MAXIMUM_TEXTURE1D_WIDTH),
    DP_INT(maxTexture1DMipmap, MAXIMUM_TEXTURE1D_MIPMAPPED_WIDTH),
    DP_INT(maxTexture2D[0], MAXIMUM_TEXTURE2D_WIDTH),
    DP_INT(maxTexture2D[1], MAXIMUM_TEXTURE2D_HEIGHT),
    DP_INT(maxTexture2DMipmap[0], MAXIMUM_TEXTURE2D_MIPMAPPED_WIDTH),
    DP_INT(maxTexture2DMipmap[1], MAXIMUM_TEXTURE2D_MIPMAPPED_HEIGHT),
    DP_INT(maxTexture2DLinear[0], MAXIMUM_TEXTURE2D_LINEAR_WIDTH),
    DP_INT(maxTexture2DLinear[1], MAXIMUM_TEXTURE2D_LINEAR_HEIGHT),
    DP_INT(maxTexture2DLinear[2], MAXIMUM_TEXTURE2D_LINEAR_PITCH),
    DP_INT(maxTexture2DGather[0], MAXIMUM_TEXTURE2D_GATHER_WIDTH),
    DP_INT(maxTexture2DGather[1], MAXIMUM_TEXTURE2D_GATHER_HEIGHT),
    DP_INT(maxTexture3D[0], MAXIMUM_TEXTURE3D_WIDTH),
    DP_INT(maxTexture3D[1], MAXIMUM_TEXTURE3D_HEIGHT),
    DP_INT(maxTexture3D[2], MAXIMUM_TEXTURE3D_DEPTH),
    DP_INT(maxTexture3DAlt[0], MAXIMUM_TEXTURE3D_WIDTH_ALTERNATE),
    DP_INT(maxTexture3DAlt[1], MAXIMUM_TEXTURE3D_HEIGHT_ALTERNATE),
    DP_INT(maxTexture3DAlt[2], MAXIMUM_TEXTURE3D_DEPTH_ALTERNATE),
    DP_INT(maxTextureCubemap, MAXIMUM_TEXTURECUBEMAP_WIDTH),
    DP_INT(maxTexture1DLayered[0], MAXIMUM_TEXTURE1D_LAYERED_WIDTH),
    DP_INT(maxTexture1DLayered[1], MAXIMUM_TEXTURE1D_LAYERED_LAYERS),
    DP_INT(maxTexture2DLayered[0], MAXIMUM_TEXTURE2D_LAYERED_WIDTH),
    DP_INT(maxTexture2DLayered[1], MAXIMUM_TEXTURE2D_LAYERED_HEIGHT),
    DP_INT(maxTexture2DLayered[2], MAXIMUM_TEXTURE2D_LAYERED_LAYERS),
    DP_INT(maxTextureCubemapLayered[0], MAXIMUM_TEXTURECUBEMAP_LAYERED_WIDTH),
    DP_INT(maxTextureCubemapLayered[1], MAXIMUM_TEXTURECUBEMAP_LAYERED_LAYERS),
    DP_INT(maxSurface1D, MAXIMUM_SURFACE1D_WIDTH),
    DP_INT(maxSurface2D[0], MAXIMUM_SURFACE2D_WIDTH),
    DP_INT(maxSurface2D[1], MAXIMUM_SURFACE2D_HEIGHT),
    DP_INT(maxSurface3D[0], MAXIMUM_SURFACE3D_WIDTH),
    DP_INT(maxSurface3D[1], MAXIMUM_SURFACE3D_HEIGHT),
    DP_INT(maxSurface3D[2], MAXIMUM_SURFACE3D_DEPTH),
    DP_INT(maxSurface1DLayered[0], MAXIMUM_SURFACE1D_LAYERED_WIDTH),
    DP_INT(maxSurface1DLayered[1], MAXIMUM_SURFACE1D_LAYERED_LAYERS),
    DP_INT(maxSurface2DLayered[0], MAXIMUM_SURFACE2D_LAYERED_WIDTH),
    DP_INT(maxSurface2DLayered[1], MAXIMUM_SURFACE2D_LAYERED_HEIGHT),
    DP_INT(maxSurface2DLayered[2], MAXIMUM_SURFACE2D_LAYERED_LAYERS),
    DP_INT(maxSurfaceCubemap, MAXIMUM_SURFACECUBEMAP_WIDTH),
    DP_INT(maxSurfaceCubemapLayered[0], MAXIMUM_SURFACECUBEMAP_LAYERED_WIDTH),
    DP_INT(maxSurfaceCubemapLayered[1], MAXIMUM_SURFACECUBEMAP_LAYERED_LAYERS),
    DP_INT(concurrentKernels, CONCURRENT_KERNELS),
    DP_INT(ECCEnabled, ECC_ENABLED),
    DP_INT(pciBusID, PCI_BUS_ID),
    DP_INT(pciDeviceID, PCI_DEVICE_ID),
    DP_INT(pciDomainID, PCI_DOMAIN_ID),
    DP_INT(tccDriver, TCC_DRIVER),
    DP_INT(asyncEngineCount, ASYNC_ENGINE_COUNT),
    DP_INT(unifiedAddressing, UNIFIED_ADDRESSING),
    DP_INT(memoryBusWidth, GLOBAL_MEMORY_BUS_WIDTH),
    DP_INT(l2CacheSize, L2_CACHE_SIZE),
    DP_INT(persistingL2CacheMaxSize, MAX_PERSISTING_L2_CACHE_SIZE),
    DP_INT(maxThreadsPerMultiProcessor, MAX_THREADS_PER_MULTIPROCESSOR),
    DP_INT(streamPrioritiesSupported, STREAM_PRIORITIES_SUPPORTED),
    DP_INT(globalL1CacheSupported, GLOBAL_L1_CACHE_SUPPORTED),
    DP_INT(localL1CacheSupported, LOCAL_L1_CACHE_SUPPORTED),
    DP_INT(regsPerMultiprocessor, MAX_REGISTERS_PER_MULTIPROCESSOR),
    DP_INT(managedMemory, MANAGED_MEMORY),
    DP_INT(isMultiGpuBoard, MULTI_GPU_BOARD),
    DP_INT(multiGpuBoardGroupID, MULTI_GPU_BOARD_GROUP_ID),
    DP_INT(hostNativeAtomicSupported, HOST_NATIVE_ATOMIC_SUPPORTED),
    DP_INT(pageableMemoryAccess, PAGEABLE_MEMORY_ACCESS),
    DP_INT(concurrentManagedAccess, CONCURRENT_MANAGED_ACCESS),
    DP_INT(computePreemptionSupported, COMPUTE_PREEMPTION_SUPPORTED),
    DP_INT(canUseHostPointerForRegisteredMem, CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM),
    DP_INT(cooperativeLaunch, COOPERATIVE_LAUNCH),
    DP_INT(pageableMemoryAccessUsesHostPageTables, PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES),
    DP_INT(directManagedMemAccessFromHost, DIRECT_MANAGED_MEM_ACCESS_FROM_HOST),
    DP_INT(maxBlocksPerMultiProcessor, MAX_BLOCKS_PER_MULTIPROCESSOR),
    DP_INT(accessPolicyMaxWindowSize, MAX_ACCESS_POLICY_WINDOW_SIZE),
};
constexpr IntField kNewInts[] = {
    // Not in the struct before CUDA 12.
    DP_INT(hostRegisterSupported, HOST_REGISTER_SUPPORTED),
    DP_INT(sparseCudaArraySupported, SPARSE_CUDA_ARRAY_SUPPORTED),
    DP_INT(hostRegisterReadOnlySupported, READ_ONLY_HOST_REGISTER_SUPPORTED),
    DP_INT(timelineSemaphoreInteropSupported, TIMELINE_SEMAPHORE_INTEROP_SUPPORTED),
    DP_INT(memoryPoolsSupported, MEMORY_POOLS_SUPPORTED),
    DP_INT(gpuDirectRDMASupported, GPU_DIRECT_RDMA_SUPPORTED),
    DP_INT(gpuDirectRDMAFlushWritesOptions, GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS),
    DP_INT(gpuDirectRDMAWritesOrdering, GPU_DIRECT_RDMA_WRITES_ORDERING),
    DP_INT(memoryPoolSupportedHandleTypes, MEMPOOL_SUPPORTED_HANDLE_TYPES),
    DP_INT(deferredMappingCudaArraySupported, DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED),
    DP_INT(ipcEventSupported, IPC_EVENT_SUPPORTED),
    DP_INT(clusterLaunch, CLUSTER_LAUNCH),
    DP_INT(unifiedFunctionPointers, UNIFIED_FUNCTION_POINTERS),
#if CUDART_VERSION >= 13000
    DP_INT(deviceNumaConfig, NUMA_CONFIG),
    DP_INT(deviceNumaId, NUMA_ID),
    DP_INT(mpsEnabled, MPS_ENABLED),
    DP_INT(hostNumaId, HOST_NUMA_ID),
    DP_INT(gpuPciDeviceID, GPU_PCI_DEVICE_ID),
    DP_INT(gpuPciSubsystemID, GPU_PCI_SUBSYSTEM_ID),
    DP_INT(hostNumaMultinodeIpcSupported, HOST_NUMA_MULTINODE_IPC_SUPPORTED),
#endif
};
#if CUDART_VERSION < 13000
constexpr IntField kOldInts[] = {
    // Gone from the struct with CUDA 13.
    DP_INT(clockRate, CLOCK_RATE),
    DP_INT(deviceOverlap, GPU_OVERLAP),
    DP_INT(kernelExecTimeoutEnabled, KERNEL_EXEC_TIMEOUT),
    DP_INT(computeMode, COMPUTE_MODE),
    DP_INT(maxTexture1DLinear, MAXIMUM_TEXTURE1D_LINEAR_WIDTH),
    DP_INT(memoryClockRate, MEMORY_CLOCK_RATE),
    DP_INT(singleToDoublePrecisionPerfRatio, SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO),
    DP_INT(cooperativeMultiDeviceLaunch, COOPERATIVE_MULTI_DEVICE_LAUNCH),
};
#endif
#undef DP_INT

template <size_t N>
void fill(char* prop, int device, const IntField (&fields)[N]) {
  for (const IntField& f : fields) {
    const int value = attribute(device, f.attribute);
    memcpy(prop + f.offset, &value, sizeof value);
  }
}

// The part of the struct that every program's struct has, which for one built with CUDA 11 is all of it.
cudaError_t fill_old(cudaDeviceProp* prop, int device) {
  int count = 0;
  if (const CUresult rc = cuDeviceGetCount(&count); rc != CUDA_SUCCESS) return result(rc);
  if (device < 0 || device >= count) return cudaErrorInvalidDevice;
  memset(prop, 0, offsetof(cudaDeviceProp, hostRegisterSupported));
  CUresult rc = cuDeviceGetName(prop->name, sizeof prop->name, device);
  if (rc == CUDA_SUCCESS) rc = cuDeviceTotalMem(&prop->totalGlobalMem, device);
  if (rc == CUDA_SUCCESS) rc = cuDeviceGetUuid_v2(&prop->uuid, device);
  if (rc != CUDA_SUCCESS) return result(rc);
  auto* raw = reinterpret_cast<char*>(prop);
  fill(raw, device, kInts);
#if CUDART_VERSION < 13000
  fill(raw, device, kOldInts);
#endif
  const auto size = [device](CUdevice_attribute which) { return static_cast<size_t>(attribute(device, which)); };
  prop->sharedMemPerBlock = size(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
  prop->memPitch = size(CU_DEVICE_ATTRIBUTE_MAX_PITCH);
  prop->totalConstMem = size(CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY);
  prop->textureAlignment = size(CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT);
  prop->texturePitchAlignment = size(CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT);
  prop->surfaceAlignment = size(CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT);
  prop->sharedMemPerMultiprocessor = size(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
  prop->sharedMemPerBlockOptin = size(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  prop->reservedSharedMemPerBlock = size(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK);
  return cudaSuccess;
}

cudaError_t fill_new(cudaDeviceProp* prop, int device) {
  if (const cudaError_t rc = fill_old(prop, device); rc != cudaSuccess) return rc;
  constexpr size_t kOld = offsetof(cudaDeviceProp, hostRegisterSupported);
  auto* raw = reinterpret_cast<char*>(prop);
  memset(raw + kOld, 0, sizeof *prop - kOld);
  fill(raw, device, kNewInts);
  return cudaSuccess;
}

}  // namespace

#if CUDART_VERSION >= 13000
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int device) { return fill_new(prop, device); }
#else
// The unversioned name of libcudart.so.12 is for programs built with CUDA 11, whose struct ends earlier.
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int device) { return fill_old(prop, device); }
cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp* prop, int device) { return fill_new(prop, device); }
#endif

cudaError_t cudaChooseDevice(int* device, const cudaDeviceProp* prop) {
  int count = 0, best = -1;
  if (const CUresult rc = cuDeviceGetCount(&count); rc != CUDA_SUCCESS) return result(rc);
  if (count == 0) return cudaErrorNoDevice;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp has;
    if (const cudaError_t rc = fill_new(&has, i); rc != cudaSuccess) return rc;
    const int score = (has.major > prop->major || (has.major == prop->major && has.minor >= prop->minor)) +
                      (has.totalGlobalMem >= prop->totalGlobalMem) +
                      (has.multiProcessorCount >= prop->multiProcessorCount);
    if (score <= best) continue;
    best = score;
    *device = i;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* pciBusId) {
  return result(cuDeviceGetByPCIBusId(device, pciBusId));
}

cudaError_t cudaDeviceGetPCIBusId(char* pciBusId, int len, int device) {
  return result(cuDeviceGetPCIBusId(pciBusId, len, device));
}

// -- limits and preferences -------------------------------------------------------------------------------------------

cudaError_t cudaDeviceSetLimit(cudaLimit limit, size_t value) {
  return result(cuCtxSetLimit(static_cast<CUlimit>(limit), value));
}

cudaError_t cudaDeviceGetLimit(size_t* pValue, cudaLimit limit) {
  return result(cuCtxGetLimit(pValue, static_cast<CUlimit>(limit)));
}

cudaError_t cudaDeviceGetCacheConfig(cudaFuncCache* pCacheConfig) {
  CUfunc_cache config = CU_FUNC_CACHE_PREFER_NONE;
  const CUresult rc = cuCtxGetCacheConfig(&config);
  *pCacheConfig = static_cast<cudaFuncCache>(config);
  return result(rc);
}

cudaError_t cudaDeviceSetCacheConfig(cudaFuncCache cacheConfig) {
  return result(cuCtxSetCacheConfig(static_cast<CUfunc_cache>(cacheConfig)));
}

cudaError_t cudaDeviceGetSharedMemConfig(cudaSharedMemConfig* pConfig) {
  *pConfig = cudaSharedMemBankSizeFourByte;
  return cudaSuccess;
}

cudaError_t cudaDeviceSetSharedMemConfig(cudaSharedMemConfig config) {
  return static_cast<unsigned>(config) > cudaSharedMemBankSizeEightByte ? cudaErrorInvalidValue : cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* leastPriority, int* greatestPriority) {
  return result(cuCtxGetStreamPriorityRange(leastPriority, greatestPriority));
}

// -- peers ------------------------------------------------------------------------------------------------------------

cudaError_t cudaDeviceCanAccessPeer(int* canAccessPeer, int device, int peerDevice) {
  return result(cuDeviceCanAccessPeer(canAccessPeer, device, peerDevice));
}

cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr attr, int srcDevice, int dstDevice) {
  return result(cuDeviceGetP2PAttribute(value, static_cast<CUdevice_P2PAttribute>(attr), srcDevice, dstDevice));
}

#if CUDART_VERSION >= 13000
cudaError_t cudaDeviceGetHostAtomicCapabilities(unsigned int* capabilities, const cudaAtomicOperation* operations,
                                                unsigned int count, int device) {
  static_assert(sizeof(cudaAtomicOperation) == sizeof(CUatomicOperation));
  return result(cuDeviceGetHostAtomicCapabilities(capabilities, reinterpret_cast<const CUatomicOperation*>(operations),
                                                  count, device));
}

cudaError_t cudaDeviceGetP2PAtomicCapabilities(unsigned int* capabilities, const cudaAtomicOperation* operations,
                                               unsigned int count, int srcDevice, int dstDevice) {
  return result(cuDeviceGetP2PAtomicCapabilities(capabilities, reinterpret_cast<const CUatomicOperation*>(operations),
                                                 count, srcDevice, dstDevice));
}
#endif

cudaError_t cudaDeviceEnablePeerAccess(int peerDevice, unsigned int flags) {
  CUcontext peer = nullptr;
  if (const cudaError_t rc = primary_context(peerDevice, &peer); rc != cudaSuccess) return rc;
  return result(cuCtxEnablePeerAccess(peer, flags));
}

cudaError_t cudaDeviceDisablePeerAccess(int peerDevice) {
  CUcontext peer = nullptr;
  if (const cudaError_t rc = primary_context(peerDevice, &peer); rc != cudaSuccess) return rc;
  return result(cuCtxDisablePeerAccess(peer));
}

// -- versions, profiler -----------------------------------------------------------------------------------------------

cudaError_t cudaDriverGetVersion(int* driverVersion) { return result(cuDriverGetVersion(driverVersion)); }

cudaError_t cudaRuntimeGetVersion(int* runtimeVersion) {
  *runtimeVersion = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// -- CUDA 12's old names ----------------------------------------------------------------------------------------------

#if CUDART_VERSION < 13000
cudaError_t cudaThreadExit() { return device::cudaDeviceReset(); }
cudaError_t cudaThreadSynchronize() { return device::cudaDeviceSynchronize(); }
cudaError_t cudaThreadSetLimit(cudaLimit limit, size_t value) { return device::cudaDeviceSetLimit(limit, value); }
cudaError_t cudaThreadGetLimit(size_t* pValue, cudaLimit limit) { return device::cudaDeviceGetLimit(pValue, limit); }
cudaError_t cudaThreadGetCacheConfig(cudaFuncCache* c) { return device::cudaDeviceGetCacheConfig(c); }
cudaError_t cudaThreadSetCacheConfig(cudaFuncCache c) { return device::cudaDeviceSetCacheConfig(c); }
#endif

}  // namespace device
}  // namespace devproxy::sa::cudart
