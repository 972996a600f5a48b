// SPDX-License-Identifier: Apache-2.0
// The CUDA driver API as the plugin uses it: one table, resolved at run time against libcuda.so.1, and one way to turn
// a CUresult into the exception that PyTorch's own CUDA build throws.
#pragma once

#include <cuda.h>

#include <string>

namespace devproxy::aten {

// clang-format off
#define DEVPROXY_DRIVER_CALLS(X)                                                                          \
  X(cuInit) X(cuDriverGetVersion) X(cuGetErrorString) X(cuDeviceGet) X(cuDeviceGetCount)                  \
  X(cuDeviceGetName) X(cuDeviceGetUuid) X(cuDeviceTotalMem) X(cuDeviceGetAttribute)                       \
  X(cuDeviceCanAccessPeer) X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxGetState) X(cuCtxSetCurrent)   \
  X(cuCtxSynchronize) X(cuCtxGetStreamPriorityRange) X(cuMemGetInfo) X(cuMemAllocAsync)                   \
  X(cuMemFreeAsync) X(cuMemHostAlloc) X(cuMemFreeHost) X(cuPointerGetAttribute) X(cuMemcpyHtoDAsync)      \
  X(cuMemcpyDtoHAsync) X(cuMemcpyDtoDAsync) X(cuMemcpyPeerAsync) X(cuMemsetD8Async)                       \
  X(cuStreamCreateWithPriority) X(cuStreamWaitEvent) X(cuStreamQuery) X(cuStreamSynchronize)              \
  X(cuEventCreate) X(cuEventDestroy) X(cuEventRecord) X(cuEventQuery) X(cuEventSynchronize)               \
  X(cuEventElapsedTime) X(cuModuleLoadData) X(cuModuleGetFunction) X(cuLaunchKernel)                      \
  X(cuMemAlloc) X(cuMemFree) X(cuStreamBeginCapture) X(cuStreamEndCapture) X(cuStreamIsCapturing)         \
  X(cuStreamGetCaptureInfo) X(cuThreadExchangeStreamCaptureMode) X(cuGraphGetNodes) X(cuGraphDestroy)     \
  X(cuGraphInstantiate) X(cuGraphLaunch) X(cuGraphExecDestroy) X(cuGraphDebugDotPrint)                    \
  X(cuDeviceGetDefaultMemPool) X(cuMemPoolSetAttribute) X(cuMemPoolTrimTo) X(cuCtxGetDevice)              \
  X(cuStreamGetPriority) X(cuMemHostRegister) X(cuMemHostUnregister)
// clang-format on

struct Driver {
// cuda.h renames calls to their newest version by macro; the expansion happens before the pasting here.
#define DEVPROXY_DECLARE(name) decltype(&::name) name;
  DEVPROXY_DRIVER_CALLS(DEVPROXY_DECLARE)
#undef DEVPROXY_DECLARE
};

// The table. Throws c10::Error if libcuda.so.1 is not loaded or lacks a call.
const Driver& driver();

// Whether libcuda.so.1 could be loaded; never throws.
bool driver_present() noexcept;

// Throws for anything but CUDA_SUCCESS: c10::AcceleratorError "CUDA error: <cuGetErrorString>" with what was tried.
[[noreturn]] void throw_cuda_error(CUresult result, const char* what);
inline void check(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS) [[unlikely]]
    throw_cuda_error(result, what);
}
std::string error_text(CUresult result);
// A line on stderr, as all of devproxy's warnings.
void warn(const std::string& line);
// A sentence about the other jobs with memory of that GPU, with a space before it; "" where there are none.
std::string other_holders(int device);

}  // namespace devproxy::aten
