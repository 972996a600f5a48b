// SPDX-License-Identifier: Apache-2.0
// Every driver call that devproxy makes on a real GPU: one list, one table of function pointers. Nothing else in this
// repository calls the genuine libcuda, and it is never linked, only opened: the same binary runs where there is none.
#pragma once

#include <cuda.h>

#include <memory>
#include <string>

#include "devproxy/csrc/base/status.h"

namespace devproxy::hal::cuda {

// X(name): the version is the one that the header's own macros choose (cuMemcpy2DAsync means cuMemcpy2DAsync_v2), so
// name and signature cannot disagree.
// clang-format off
#define DP_CUDA_CALLS(X) \
  X(cuInit) X(cuDriverGetVersion) X(cuGetErrorName) X(cuGetErrorString) X(cuDeviceGet) X(cuDeviceGetCount) \
  X(cuDeviceGetName) X(cuDeviceGetUuid) X(cuDeviceTotalMem) X(cuDeviceGetAttribute) X(cuCtxDestroy) \
  X(cuCtxSetCurrent) X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease) X(cuDevicePrimaryCtxSetFlags) \
  X(cuMemGetAllocationGranularity) X(cuMemGetInfo) X(cuMemAddressReserve) X(cuMemAddressFree) X(cuMemCreate) \
  X(cuMemRelease) X(cuMemMap) X(cuMemUnmap) X(cuMemSetAccess) X(cuMemHostAlloc) X(cuMemFreeHost) \
  X(cuMemHostGetDevicePointer) X(cuMemHostRegister) X(cuMemHostUnregister) X(cuStreamCreateWithPriority) \
  X(cuStreamDestroy) X(cuStreamQuery) X(cuStreamSynchronize) X(cuStreamWaitEvent) X(cuStreamWriteValue64) \
  X(cuLaunchHostFunc) X(cuEventCreate) X(cuEventDestroy) X(cuEventRecord) X(cuEventQuery) X(cuEventSynchronize) \
  X(cuMemcpyHtoDAsync) X(cuMemcpyDtoHAsync) X(cuMemcpyDtoDAsync) X(cuMemcpy2DAsync) X(cuMemsetD8Async) \
  X(cuMemsetD16Async) X(cuMemsetD32Async) X(cuMemsetD2D8Async) X(cuMemsetD2D16Async) X(cuMemsetD2D32Async) \
  X(cuModuleLoadDataEx) X(cuModuleUnload) X(cuModuleGetFunction) X(cuModuleGetGlobal) X(cuFuncGetAttribute) \
  X(cuFuncSetAttribute) X(cuFuncGetParamInfo) X(cuLaunchKernel)
// clang-format on

// X(name): what a driver may lack. The server starts without it, and who uses it is refused by name.
// clang-format off
#define DP_CUDA_OPTIONAL_CALLS(X) \
  X(cuLaunchKernelEx) X(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags) \
  X(cuOccupancyAvailableDynamicSMemPerBlock) X(cuOccupancyMaxActiveClusters) X(cuOccupancyMaxPotentialClusterSize) \
  X(cuCtxSetLimit) X(cuCtxGetLimit) X(cuCtxSynchronize) X(cuLinkCreate) X(cuLinkAddData) X(cuLinkComplete) \
  X(cuLinkDestroy) X(cuTensorMapEncodeTiled) X(cuTensorMapEncodeIm2col) X(cuTensorMapReplaceAddress) \
  X(cuArray3DCreate) X(cuArrayDestroy) X(cuMemcpy3DAsync) X(cuTexObjectCreate) X(cuTexObjectDestroy) \
  X(cuSurfObjectCreate) X(cuSurfObjectDestroy) X(cuStreamSetAttribute) X(cuCtxResetPersistingL2Cache) \
  X(cuModuleGetFunctionCount) X(cuModuleEnumerateFunctions) X(cuFuncGetName)
// clang-format on

// X(field, symbol, signature): here an older version is wanted than the header's, because it does the same and every
// driver since CUDA 12.4 (cuFuncGetParamInfo) has it.
#define DP_CUDA_PINNED_CALLS(X)                                                         \
  X(create_context, "cuCtxCreate_v2", CUresult (*)(CUcontext*, unsigned int, CUdevice)) \
  X(event_elapsed, "cuEventElapsedTime", CUresult (*)(float*, CUevent, CUevent))

// The driver call that this thread is inside; for the text of a crash.
extern thread_local const char* t_inside;

template <class F>
struct Entry;
template <class... P>
struct Entry<CUresult (*)(P...)> {
  CUresult (*function)(P...) = nullptr;
  const char* symbol = nullptr;
  // CUDA_ERROR_NOT_SUPPORTED where this driver lacks it; status() then says so.
  CUresult operator()(P... args) const {
    if (!function) return CUDA_ERROR_NOT_SUPPORTED;
    const char* const outer = t_inside;
    t_inside = symbol;
    const CUresult result = function(args...);
    t_inside = outer;
    return result;
  }
};

class Driver {
 public:
  // Opens the genuine driver. path: an absolute path, or empty for the places where distributions and container
  // runtimes put it. Our own libcuda.so.1 is refused, wherever it is found.
  static StatusOr<std::shared_ptr<const Driver>> open(const std::string& path);
  Driver() = default;
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

#define DP_FIELD(name) Entry<decltype(&::name)> name;
  DP_CUDA_CALLS(DP_FIELD)
  DP_CUDA_OPTIONAL_CALLS(DP_FIELD)
#undef DP_FIELD
#define DP_FIELD(field, symbol, type) Entry<type> field;
  DP_CUDA_PINNED_CALLS(DP_FIELD)
#undef DP_FIELD

  const std::string& path() const { return path_; }
  // "CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access was encountered"
  std::string text(CUresult result) const;
  // "`doing`: <entry's symbol> failed: <text>"; success where result is.
  template <class F>
  Status status(CUresult result, const Entry<F>& entry, const std::string& doing) const {
    if (result == CUDA_SUCCESS) return {};
    if (!entry.function)
      return {kNotSupported, doing + ": the driver has no " + entry.symbol + ": it is too old for this"};
    return {static_cast<int32_t>(result), doing + ": " + entry.symbol + " failed: " + text(result)};
  }

 private:
  void* library_ = nullptr;  // never closed: the driver keeps threads
  std::string path_;
};

}  // namespace devproxy::hal::cuda
