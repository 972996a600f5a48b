// SPDX-License-Identifier: Apache-2.0
// One kernel for several architectures in one fat binary: the best that this device can run is chosen.
// build: -gencode arch=compute_75,code=sm_75 -gencode arch=compute_80,code=sm_80
// build: -gencode arch=compute_90,code=[sm_90,compute_90]
#include "check.cuh"

__global__ void which(int* out) {
#ifdef __CUDA_ARCH__
  *out = __CUDA_ARCH__ / 10;
#endif
}

int main() {
  int* out = zeroes<int>(1);
  which<<<1, 1>>>(out);
  LAUNCHED();
  const int device_is = compute_capability(), want = device_is >= 90 ? 90 : device_is >= 80 ? 80 : 75;
  EXPECT_EQ(back(out, 1)[0], made(want, 0));
  cudaFuncAttributes a{};
  CHECK(cudaFuncGetAttributes(&a, which));
  EXPECT_EQ(a.ptxVersion, want);
  CHECK(cudaFree(out));
  return ok("architectures");
}
