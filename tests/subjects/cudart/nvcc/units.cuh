// SPDX-License-Identifier: Apache-2.0
// What the two units of the program know of each other.
#pragma once

void launch_other(int* p, cudaStream_t stream);
#ifdef UNITS_LINKED
extern __device__ int shared_variable;
__device__ int of_the_other(int);
#endif
