// SPDX-License-Identifier: Apache-2.0
// The second translation unit of units.cu.
#include "../program.h"
#include "units.cuh"

#ifdef UNITS_LINKED
__device__ int shared_variable = 3;
__device__ int of_the_other(int x) { return x * 2; }
#endif
static __global__ void other(int* p) { *p = 1; }

void launch_other(int* p, cudaStream_t stream) {
  other<<<5, 1, 0, stream>>>(p);
  CHECK(cudaGetLastError());
}
