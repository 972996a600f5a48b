// SPDX-License-Identifier: Apache-2.0
// A managed variable: refused by name when the program starts, and its module's kernels never run.
#include "../program.h"

__managed__ int number = 5;
__global__ void reads(int* p) { *p = number; }

int main() {
  reads<<<1, 1>>>(nullptr);
  EXPECT_RESULT(cudaGetLastError(), cudaErrorNotSupported);
  return pass("managed");
}
