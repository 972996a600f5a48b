// SPDX-License-Identifier: Apache-2.0
// Launches, function attributes, occupancy. A launch is a look-up and the driver's call.
#include <limits.h>
#include <string.h>

#include "cudart_decl.gen.h"
#include "devproxy/interceptors/cudart/registration.h"
#include "devproxy/interceptors/cudart/stub.h"

namespace devproxy::sa::cudart::execution {

namespace {

// The driver has one result for all bad arguments of a launch; the runtime tells the shape of the grid apart.
cudaError_t launch_failure(CUresult rc, const dim3& grid, const dim3& block, int device) {
  if (rc != CUDA_ERROR_INVALID_VALUE) return result(rc);
  const auto most = [device](CUdevice_attribute which) {
    int value = 0;
    return cuDeviceGetAttribute(&value, which, device) == CUDA_SUCCESS ? static_cast<unsigned>(value) : UINT_MAX;
  };
  const unsigned grids[] = {grid.x, grid.y, grid.z}, blocks[] = {block.x, block.y, block.z};
  for (int i = 0; i < 3; ++i) {
    if (grids[i] == 0 || grids[i] > most(static_cast<CUdevice_attribute>(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + i)))
      return cudaErrorInvalidConfiguration;
    if (blocks[i] == 0 || blocks[i] > most(static_cast<CUdevice_attribute>(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + i)))
      return cudaErrorInvalidConfiguration;
  }
  const unsigned long long threads = 1ull * block.x * block.y * block.z;
  return threads > most(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK) ? cudaErrorInvalidConfiguration
                                                                   : cudaErrorInvalidValue;
}

struct Target {
  CUfunction function = nullptr;
  int device = 0;
};

// Enters and looks up.
inline cudaError_t aim(const void* func, Target* out) {
  CUcontext context = nullptr;
  if (__builtin_expect(cuCtxGetCurrent(&context) != CUDA_SUCCESS || context == nullptr, 0)) {
    if (const cudaError_t rc = make_context(); rc != cudaSuccess) return rc;
    if (const CUresult rc = cuCtxGetCurrent(&context); rc != CUDA_SUCCESS) return result(rc);
  }
  out->device = device_of(context);
  return function_of(func, out->device, &out->function);
}

inline cudaError_t launch(const void* func, const dim3& grid, const dim3& block, void** args, size_t shared,
                          cudaStream_t stream) {
  Target to;
  if (const cudaError_t rc = aim(func, &to); __builtin_expect(rc != cudaSuccess, 0)) return rc;
  if (__builtin_expect(shared > UINT_MAX, 0)) return cudaErrorInvalidValue;
  const CUresult rc = cuLaunchKernel(to.function, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                                     static_cast<unsigned>(shared), stream_of(stream), args, nullptr);
  return __builtin_expect(rc == CUDA_SUCCESS, 1) ? cudaSuccess : launch_failure(rc, grid, block, to.device);
}

// Precondition: the dynamic shared memory fits 32 bits.
CUlaunchConfig drivers_config(const cudaLaunchConfig_t& config) {
  // The two structs of an attribute are the same bytes: driver_types.h takes its values from cuda.h's.
  static_assert(sizeof(cudaLaunchAttribute) == sizeof(CUlaunchAttribute));
  static_assert(offsetof(cudaLaunchAttribute, val) == offsetof(CUlaunchAttribute, value));
  CUlaunchConfig wanted{};
  wanted.gridDimX = config.gridDim.x;
  wanted.gridDimY = config.gridDim.y;
  wanted.gridDimZ = config.gridDim.z;
  wanted.blockDimX = config.blockDim.x;
  wanted.blockDimY = config.blockDim.y;
  wanted.blockDimZ = config.blockDim.z;
  wanted.sharedMemBytes = static_cast<unsigned>(config.dynamicSmemBytes);
  wanted.hStream = stream_of(config.stream);
  wanted.attrs = reinterpret_cast<CUlaunchAttribute*>(config.attrs);
  wanted.numAttrs = config.numAttrs;
  return wanted;
}

cudaError_t launch_ex(const cudaLaunchConfig_t& config, const void* func, void** args) {
  Target to;
  if (const cudaError_t rc = aim(func, &to); rc != cudaSuccess) return rc;
  if (config.dynamicSmemBytes > UINT_MAX) return cudaErrorInvalidValue;
  const CUlaunchConfig wanted = drivers_config(config);
  const CUresult rc = cuLaunchKernelEx(&wanted, to.function, args, nullptr);
  return rc == CUDA_SUCCESS ? cudaSuccess : launch_failure(rc, config.gridDim, config.blockDim, to.device);
}

}  // namespace

// -- launches ---------------------------------------------------------------------------------------------------------

cudaError_t cudaLaunchKernel(const void* func, dim3 gridDim, dim3 blockDim, void** args, size_t sharedMem,
                             cudaStream_t stream) {
  return launch(func, gridDim, blockDim, args, sharedMem, stream);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 gridDim, dim3 blockDim, void** args, size_t sharedMem,
                               cudaStream_t stream) {
  return launch(kernel, gridDim, blockDim, args, sharedMem, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* func, void** args) {
  return launch_ex(*config, func, args);
}

cudaError_t cudaLaunchCooperativeKernel(const void* func, dim3 gridDim, dim3 blockDim, void** args, size_t sharedMem,
                                        cudaStream_t stream) {
  cudaLaunchAttribute together{};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = gridDim;
  config.blockDim = blockDim;
  config.dynamicSmemBytes = sharedMem;
  config.stream = stream;
  config.attrs = &together;
  config.numAttrs = 1;
  return launch_ex(config, func, args);
}

unsigned int __cudaPushCallConfiguration(dim3 gridDim, dim3 blockDim, size_t sharedMem, CUstream_st* stream) {
  Thread& t = t_thread;
  if (t.depth == kConfigurations) return 1;  // then the compiler's code does not launch
  t.configurations[t.depth++] = {gridDim, blockDim, sharedMem, stream};
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* gridDim, dim3* blockDim, size_t* sharedMem, void* stream) {
  Thread& t = t_thread;
  if (t.depth == 0) return cudaErrorMissingConfiguration;
  const Configuration& c = t.configurations[--t.depth];
  *gridDim = c.grid;
  *blockDim = c.block;
  *sharedMem = c.shared;
  *static_cast<cudaStream_t*>(stream) = c.stream;
  return cudaSuccess;
}

cudaError_t cudaGetKernel(cudaKernel_t* kernelPtr, const void* entryFuncAddr) {
  Kernel* kernel = g_kernels.find(entryFuncAddr);
  if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
  LoadedKernel* loaded = nullptr;
  if (const cudaError_t rc = load_kernel(kernel, &loaded); rc != cudaSuccess) return rc;
  *kernelPtr = loaded->kernel;
  return cudaSuccess;
}

// The compiler's code asks once per kernel, keeps the answer for its launches whatever it is, and hands it to nobody
// else: so it is the host address itself, which no failure to load can spoil, and a launch reports that failure.
cudaError_t __cudaGetKernel(cudaKernel_t* kernelPtr, const void* entryFuncAddr) {
  if (g_kernels.find(entryFuncAddr) == nullptr) return cudaErrorInvalidDeviceFunction;
  *kernelPtr = static_cast<cudaKernel_t>(const_cast<void*>(entryFuncAddr));
  return cudaSuccess;
}

cudaError_t cudaGetFuncBySymbol(cudaFunction_t* functionPtr, const void* symbolPtr) {
  return function_of(symbolPtr, current_device(), functionPtr);
}

// -- attributes -------------------------------------------------------------------------------------------------------

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attr, const void* func) {
  Target to;
  if (const cudaError_t rc = aim(func, &to); rc != cudaSuccess) return rc;
  CUresult rc = CUDA_SUCCESS;
  // What the device does not know of a function is zero: clusters before Hopper, compilers on the software GPU.
  const auto get = [&](CUfunction_attribute which) {
    int value = 0;
    const CUresult here = cuFuncGetAttribute(&value, which, to.function);
    if (here == CUDA_SUCCESS) return value;
    if (here != CUDA_ERROR_INVALID_VALUE && rc == CUDA_SUCCESS) rc = here;
    return 0;
  };
  const auto size = [&](CUfunction_attribute which) { return static_cast<size_t>(get(which)); };
  memset(attr, 0, sizeof *attr);
  attr->sharedSizeBytes = size(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
  attr->constSizeBytes = size(CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES);
  attr->localSizeBytes = size(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
  attr->maxThreadsPerBlock = get(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
  attr->numRegs = get(CU_FUNC_ATTRIBUTE_NUM_REGS);
  attr->ptxVersion = get(CU_FUNC_ATTRIBUTE_PTX_VERSION);
  attr->binaryVersion = get(CU_FUNC_ATTRIBUTE_BINARY_VERSION);
  attr->cacheModeCA = get(CU_FUNC_ATTRIBUTE_CACHE_MODE_CA);
  attr->maxDynamicSharedSizeBytes = get(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
  attr->preferredShmemCarveout = get(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT);
  attr->clusterDimMustBeSet = get(CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET);
  attr->requiredClusterWidth = get(CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH);
  attr->requiredClusterHeight = get(CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT);
  attr->requiredClusterDepth = get(CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH);
  attr->clusterSchedulingPolicyPreference = get(CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE);
  attr->nonPortableClusterSizeAllowed = get(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED);
  return result(rc);
}

cudaError_t cudaFuncSetAttribute(const void* func, cudaFuncAttribute attr, int value) {
  Target to;
  if (const cudaError_t rc = aim(func, &to); rc != cudaSuccess) return rc;
  return result(cuFuncSetAttribute(to.function, static_cast<CUfunction_attribute>(attr), value));
}

cudaError_t cudaFuncSetCacheConfig(const void* func, cudaFuncCache cacheConfig) {
  Target to;
  if (const cudaError_t rc = aim(func, &to); rc != cudaSuccess) return rc;
  return result(cuFuncSetCacheConfig(to.function, static_cast<CUfunc_cache>(cacheConfig)));
}

cudaError_t cudaFuncSetSharedMemConfig(const void* func, cudaSharedMemConfig config) {
  Target to;
  if (const cudaError_t rc = aim(func, &to); rc != cudaSuccess) return rc;
  return static_cast<unsigned>(config) > cudaSharedMemBankSizeEightByte ? cudaErrorInvalidValue : cudaSuccess;
}

cudaError_t cudaFuncGetName(const char** name, const void* func) {
  Target to;
  if (const cudaError_t rc = aim(func, &to); rc != cudaSuccess) return rc;
  return result(cuFuncGetName(name, to.function));
}

cudaError_t cudaFuncGetParamInfo(const void* func, size_t paramIndex, size_t* paramOffset, size_t* paramSize) {
  Target to;
  if (const cudaError_t rc = aim(func, &to); rc != cudaSuccess) return rc;
  return result(cuFuncGetParamInfo(to.function, paramIndex, paramOffset, paramSize));
}

#if CUDART_VERSION < 13000
cudaError_t cudaSetDoubleForDevice(double*) { return cudaSuccess; }
cudaError_t cudaSetDoubleForHost(double*) { return cudaSuccess; }
#endif

// -- occupancy --------------------------------------------------------------------------------------------------------

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* numBlocks, const void* func, int blockSize,
                                                                   size_t dynamicSMemSize, unsigned int flags) {
  Target to;
  if (const cudaError_t rc = aim(func, &to); rc != cudaSuccess) return rc;
  return result(
      cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(numBlocks, to.function, blockSize, dynamicSMemSize, flags));
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* numBlocks, const void* func, int blockSize,
                                                          size_t dynamicSMemSize) {
  return execution::cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(numBlocks, func, blockSize, dynamicSMemSize,
                                                                           cudaOccupancyDefault);
}

cudaError_t cudaOccupancyAvailableDynamicSMemPerBlock(size_t* dynamicSmemSize, const void* func, int numBlocks,
                                                      int blockSize) {
  Target to;
  if (const cudaError_t rc = aim(func, &to); rc != cudaSuccess) return rc;
  return result(cuOccupancyAvailableDynamicSMemPerBlock(dynamicSmemSize, to.function, numBlocks, blockSize));
}

cudaError_t cudaOccupancyMaxPotentialClusterSize(int* clusterSize, const void* func,
                                                 const cudaLaunchConfig_t* launchConfig) {
  Target to;
  if (const cudaError_t rc = aim(func, &to); rc != cudaSuccess) return rc;
  if (launchConfig->dynamicSmemBytes > UINT_MAX) return cudaErrorInvalidValue;
  const CUlaunchConfig config = drivers_config(*launchConfig);
  return result(cuOccupancyMaxPotentialClusterSize(clusterSize, to.function, &config));
}

cudaError_t cudaOccupancyMaxActiveClusters(int* numClusters, const void* func, const cudaLaunchConfig_t* launchConfig) {
  Target to;
  if (const cudaError_t rc = aim(func, &to); rc != cudaSuccess) return rc;
  if (launchConfig->dynamicSmemBytes > UINT_MAX) return cudaErrorInvalidValue;
  const CUlaunchConfig config = drivers_config(*launchConfig);
  return result(cuOccupancyMaxActiveClusters(numClusters, to.function, &config));
}

}  // namespace devproxy::sa::cudart::execution
