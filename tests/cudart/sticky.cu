// SPDX-License-Identifier: Apache-2.0
// A kernel that touches what is not there: every call of the process says so from then on, and the process can end
// well.
#include "check.cuh"

__global__ void astray(volatile int* nowhere) { *nowhere = 1; }

int main() {
  int* memory = zeroes<int>(16);
  astray<<<1, 1>>>(memory);
  LAUNCHED();
  CHECK(cudaDeviceSynchronize());
  astray<<<1, 1>>>(reinterpret_cast<int*>(0x10));
  LAUNCHED();
  if (kernels_run()) {
    EXPECT_RESULT(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
    for (int k = 0; k < 2; ++k) {
      void* more = nullptr;
      EXPECT_RESULT(cudaMalloc(&more, 64), cudaErrorIllegalAddress);
      EXPECT_RESULT(cudaGetLastError(), cudaErrorIllegalAddress);
      EXPECT_RESULT(cudaMemcpy(&k, memory, 4, cudaMemcpyDeviceToHost), cudaErrorIllegalAddress);
      EXPECT_RESULT(cudaStreamQuery(0), cudaErrorIllegalAddress);
      astray<<<1, 1>>>(memory);
      EXPECT_RESULT(cudaGetLastError(), cudaErrorIllegalAddress);
    }
    printf("ok sticky\n");
    return 0;
  }
  return ok("sticky");
}
