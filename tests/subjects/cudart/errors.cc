// SPDX-License-Identifier: Apache-2.0
// The last error: what records it, what clears it, whose it is; names and texts.
#include "program.h"

int main() {
  EXPECT_RESULT(cudaGetLastError(), cudaSuccess);
  // A failure stays until it is asked for; a success in between does not clear it.
  EXPECT_RESULT(cudaSetDevice(99), cudaErrorInvalidDevice);
  int device = -1;
  CHECK(cudaGetDevice(&device));
  EXPECT(device == 0);
  EXPECT_RESULT(cudaPeekAtLastError(), cudaErrorInvalidDevice);
  EXPECT_RESULT(cudaGetLastError(), cudaErrorInvalidDevice);
  EXPECT_RESULT(cudaGetLastError(), cudaSuccess);
  EXPECT_RESULT(cudaPeekAtLastError(), cudaSuccess);
  // The latest counts.
  EXPECT_RESULT(cudaMalloc(nullptr, 16), cudaErrorInvalidValue);
  EXPECT_RESULT(cudaSetDevice(-1), cudaErrorInvalidDevice);
  EXPECT_RESULT(cudaGetLastError(), cudaErrorInvalidDevice);

  // "Not ready" is no error (CUDA C++ Programming Guide, Error Checking).
  cudaStream_t stream;
  cudaEvent_t event;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaEventCreate(&event));
  Gate gate;
  gate.close(stream);
  CHECK(cudaEventRecord(event, stream));
  EXPECT_RESULT(cudaStreamQuery(stream), cudaErrorNotReady);
  EXPECT_RESULT(cudaEventQuery(event), cudaErrorNotReady);
  EXPECT_RESULT(cudaGetLastError(), cudaSuccess);
  gate.open();
  CHECK(cudaStreamSynchronize(stream));
  CHECK(cudaEventQuery(event));

  // Each thread has its own.
  EXPECT_RESULT(cudaFree(reinterpret_cast<void*>(0x1234)), cudaErrorInvalidValue);
  std::thread([] {
    EXPECT_RESULT(cudaGetLastError(), cudaSuccess);
    EXPECT_RESULT(cudaSetDevice(42), cudaErrorInvalidDevice);
  }).join();
  EXPECT_RESULT(cudaGetLastError(), cudaErrorInvalidValue);

  // Wrong arguments, by their own codes.
  char host[64];
  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, 64));
  EXPECT_RESULT(cudaMemcpy(memory, host, 64, static_cast<cudaMemcpyKind>(9)), cudaErrorInvalidMemcpyDirection);
  EXPECT_RESULT(cudaMemcpy2D(memory, 4, host, 8, 8, 2, cudaMemcpyHostToDevice), cudaErrorInvalidPitchValue);
  EXPECT_RESULT(cudaMemcpyToSymbol(host, host, 4, 0, cudaMemcpyHostToDevice), cudaErrorInvalidSymbol);
  EXPECT_RESULT(cudaLaunchKernel(host, dim3(1), dim3(1), nullptr, 0, nullptr), cudaErrorInvalidDeviceFunction);
  EXPECT_RESULT(cudaLaunchKernel(nullptr, dim3(1), dim3(1), nullptr, 0, nullptr), cudaErrorInvalidDeviceFunction);
  EXPECT_RESULT(cudaStreamDestroy(nullptr), cudaErrorInvalidResourceHandle);
  EXPECT_RESULT(cudaEventRecord(nullptr, stream), cudaErrorInvalidResourceHandle);
  EXPECT_RESULT(cudaGetLastError(), cudaErrorInvalidResourceHandle);
  EXPECT_RESULT(cudaMalloc(&memory, size_t{1} << 60), cudaErrorMemoryAllocation);
  EXPECT_RESULT(cudaGetLastError(), cudaErrorMemoryAllocation);

  // IPC handles are refused; a refusal is an error as any other.
  cudaIpcMemHandle_t handle;
  EXPECT_RESULT(cudaIpcGetMemHandle(&handle, memory), cudaErrorNotSupported);
  EXPECT_RESULT(cudaGetLastError(), cudaErrorNotSupported);

  EXPECT(strcmp(cudaGetErrorName(cudaErrorMemoryAllocation), "cudaErrorMemoryAllocation") == 0);
  EXPECT(strcmp(cudaGetErrorName(cudaErrorStreamCaptureImplicit), "cudaErrorStreamCaptureImplicit") == 0);
  EXPECT(strcmp(cudaGetErrorString(cudaSuccess), "no error") == 0);
  EXPECT(strcmp(cudaGetErrorString(cudaErrorInvalidConfiguration), "invalid configuration argument") == 0);
  EXPECT(strcmp(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory") == 0);
  EXPECT(strcmp(cudaGetErrorName(static_cast<cudaError_t>(54321)), "unrecognized error code") == 0);
  EXPECT(cudaGetErrorString(static_cast<cudaError_t>(54321)) != nullptr);
  return pass("errors");
}
