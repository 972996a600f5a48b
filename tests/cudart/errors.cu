// SPDX-License-Identifier: Apache-2.0
// What goes wrong is said with the right error, stays the thread's last error until it is asked for, and harms nothing
// else.
#include <thread>

#include "check.cuh"

__global__ void touch(int* out) { *out = 7; }
__global__ void __launch_bounds__(64) few(int* out) { *out = 8; }

static void not_a_kernel() {}

int main() {
  int* out = zeroes<int>(1);
  touch<<<1, 2048>>>(out);  // more threads than a block can have
  EXPECT_RESULT(cudaPeekAtLastError(), cudaErrorInvalidConfiguration);
  std::thread([] { CHECK(cudaGetLastError()); }).join();  // it is this thread's
  EXPECT_RESULT(cudaPeekAtLastError(), cudaErrorInvalidConfiguration);
  CHECK(cudaDeviceSynchronize());  // a good call does not take it away
  EXPECT_RESULT(cudaGetLastError(), cudaErrorInvalidConfiguration);
  CHECK(cudaGetLastError());
  touch<<<0, 1>>>(out);
  EXPECT_RESULT(cudaGetLastError(), cudaErrorInvalidConfiguration);
  touch<<<dim3(1, 70'000), 1>>>(out);
  EXPECT_RESULT(cudaGetLastError(), cudaErrorInvalidConfiguration);
  touch<<<1, dim3(1, 1, 128)>>>(out);
  EXPECT_RESULT(cudaGetLastError(), cudaErrorInvalidConfiguration);
  touch<<<1, 1, 1 << 20>>>(out);  // shared memory
  EXPECT_RESULT(cudaGetLastError(), cudaErrorInvalidValue);
  few<<<1, 512>>>(out);  // more than it was compiled for
  EXPECT(cudaGetLastError() != cudaSuccess);
  EXPECT_EQ(back(out, 1)[0], 0);

  void* memory = nullptr;
  EXPECT_ERROR(cudaMalloc(&memory, size_t{1} << 46), cudaErrorMemoryAllocation);
  EXPECT_ERROR(cudaMalloc(static_cast<void**>(nullptr), 16), cudaErrorInvalidValue);
  EXPECT_ERROR(cudaFree(reinterpret_cast<void*>(0x1234500)), cudaErrorInvalidValue);
  EXPECT_ERROR(cudaSetDevice(999), cudaErrorInvalidDevice);
  cudaDeviceProp about{};
  EXPECT_ERROR(cudaGetDeviceProperties(&about, 999), cudaErrorInvalidDevice);
  int value = 0;
  EXPECT_ERROR(cudaDeviceGetAttribute(&value, static_cast<cudaDeviceAttr>(99'999), 0), cudaErrorInvalidValue);
  EXPECT_ERROR(cudaMemcpy(out, &value, size_t{1} << 40, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  cudaEvent_t event;
  EXPECT_ERROR(cudaEventCreateWithFlags(&event, 0xFF00), cudaErrorInvalidValue);
  EXPECT_ERROR(cudaLaunchKernel((const void*)not_a_kernel, dim3(1), dim3(1), nullptr, 0, 0),
               cudaErrorInvalidDeviceFunction);
  cudaFuncAttributes attributes{};
  EXPECT_ERROR(cudaFuncGetAttributes(&attributes, (const void*)not_a_kernel), cudaErrorInvalidDeviceFunction);
  EXPECT(!strcmp(cudaGetErrorName(cudaErrorMemoryAllocation), "cudaErrorMemoryAllocation"));
  EXPECT(!strcmp(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory"));
  EXPECT(!strcmp(cudaGetErrorName(static_cast<cudaError_t>(98'765)), "unrecognized error code"));

  touch<<<1, 1>>>(out);  // all is well again
  LAUNCHED();
  EXPECT_EQ(back(out, 1)[0], made(7, 0));
  CHECK(cudaFree(out));
  return ok("errors");
}
