// SPDX-License-Identifier: Apache-2.0
// Launches as nvcc compiles them, from two translation units. With UNITS_LINKED they share device code (-rdc=true).
#include "../program.h"
#include "units.cuh"

__device__ int counter = 7;
__constant__ float scale[4];

__global__ void add(float* a, const float* b, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) a[i] += b[i] * scale[0] + counter;
}
template <class T>
__global__ void fill(T* a, T v, char tail) {
  a[threadIdx.x] = v + tail;
}
__global__ void nothing() {}
#ifdef UNITS_LINKED
__global__ void through_the_other(int* p) { *p = of_the_other(shared_variable); }
#endif

int main(int argc, char** argv) {
  const cudaError_t wanted = argc > 1 ? static_cast<cudaError_t>(atoi(argv[1])) : cudaSuccess;
  float *a = nullptr, *b = nullptr;
  CHECK(cudaMalloc(&a, 4096));
  CHECK(cudaMalloc(&b, 4096));
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  add<<<dim3(4, 2), dim3(64, 2, 2), 512, stream>>>(a, b, 1024);
  EXPECT_RESULT(cudaGetLastError(), wanted);
  if (wanted != cudaSuccess) return pass("units");
  fill<double><<<1, 32>>>(reinterpret_cast<double*>(a), 2.0, 'x');
  fill<short><<<2, 16>>>(reinterpret_cast<short*>(b), short{3}, 'y');
  nothing<<<1, 1>>>();
  CHECK(cudaGetLastError());
  launch_other(reinterpret_cast<int*>(a), stream);
#ifdef UNITS_LINKED
  through_the_other<<<1, 1>>>(reinterpret_cast<int*>(a));
  CHECK(cudaGetLastError());
#endif
  fill<short><<<1, 2000>>>(reinterpret_cast<short*>(b), short{3}, 'y');
  EXPECT_RESULT(cudaGetLastError(), cudaErrorInvalidConfiguration);
  const float values[4] = {1, 2, 3, 4};
  float back[4] = {};
  int count = 0;
  size_t bytes = 0;
  CHECK(cudaMemcpyToSymbol(scale, values, sizeof values));
  CHECK(cudaMemcpyFromSymbol(back, scale, sizeof back));
  EXPECT(memcmp(values, back, sizeof back) == 0);
  CHECK(cudaMemcpyFromSymbol(&count, counter, sizeof count));
  EXPECT(count == 7);  // as the image has it
  CHECK(cudaGetSymbolSize(&bytes, scale));
  EXPECT(bytes == sizeof scale);
  cudaFuncAttributes attributes;
  CHECK(cudaFuncGetAttributes(&attributes, add));
  EXPECT(attributes.numRegs > 0 && attributes.binaryVersion == 90);
  int blocks = 0;
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, add, 256, 0));
  EXPECT(blocks > 0);
  void* arguments[] = {&a, &b, &count};
  CHECK(cudaLaunchKernel(reinterpret_cast<const void*>(add), dim3(1), dim3(1), arguments, 0, stream));
  CHECK(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(add), dim3(2), dim3(32), arguments, 0, stream));
  CHECK(cudaDeviceSynchronize());
  return pass("units");
}
