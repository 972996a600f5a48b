// SPDX-License-Identifier: Apache-2.0
// A library with device code of its own, opened and closed by plugins.cu.
#include "../program.h"

__global__ void of_a_plugin(int* p) { *p = 4; }

extern "C" void run_plugin() {
  int* p = nullptr;
  CHECK(cudaMalloc(&p, 64));
  of_a_plugin<<<1, 7>>>(p);
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaFree(p));
}
