// SPDX-License-Identifier: Apache-2.0
// The last error of a thread, and the texts of results.
#include <stdio.h>

#include "cudart_decl.gen.h"
#include "devproxy/interceptors/cudart/stub.h"

namespace devproxy::sa::cudart {

bool is_sticky(cudaError_t error);  // common.cc

namespace error {

namespace {

// Texts of results that the driver does not have; ours.
struct Text {
  cudaError_t error;
  const char* text;
};
constexpr Text kTexts[] = {
    {cudaErrorInvalidConfiguration, "invalid configuration argument"},
    {cudaErrorInvalidPitchValue, "invalid pitch argument"},
    {cudaErrorInvalidSymbol, "invalid device symbol"},
    {cudaErrorInvalidDevicePointer, "invalid device pointer"},
    {cudaErrorInvalidTexture, "invalid texture reference"},
    {cudaErrorInvalidChannelDescriptor, "invalid channel descriptor"},
    {cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"},
    {cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorMissingConfiguration, "__global__ function call is not configured"},
    {cudaErrorInvalidDeviceFunction, "invalid device function"},
    {cudaErrorSetOnActiveProcess, "cannot set while device is active in this process"},
    {cudaErrorInvalidPtx, "a PTX JIT compilation failed"},
    {cudaErrorUnsupportedPtxVersion, "the provided PTX was compiled with an unsupported toolchain"},
    {cudaErrorCooperativeLaunchTooLarge, "too many blocks in cooperative launch"},
    {cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureImplicit, "operation would make the legacy stream depend on a capturing blocking stream"},
};

}  // namespace

cudaError_t cudaGetLastError() {
  const cudaError_t last = t_thread.last;
  if (!is_sticky(last)) t_thread.last = cudaSuccess;
  return last;
}

cudaError_t cudaPeekAtLastError() { return t_thread.last; }

const char* cudaGetErrorName(cudaError_t error) {
  for (size_t i = 0; i < kResultNameCount; ++i)
    if (kResultNames[i].value == static_cast<int>(error)) return kResultNames[i].name;
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  for (const Text& t : kTexts)
    if (t.error == error) return t.text;
  const char* text = nullptr;
  if (cuGetErrorString(static_cast<CUresult>(error), &text) == CUDA_SUCCESS && text != nullptr) return text;
  return error::cudaGetErrorName(error);
}

}  // namespace error
}  // namespace devproxy::sa::cudart
