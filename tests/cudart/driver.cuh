// SPDX-License-Identifier: Apache-2.0
// The driver API within a program of the runtime: each call is looked up by name and version, as PyTorch does it.
#pragma once

#include <cuda.h>

#include "check.cuh"

#define EXPECT_CU(call, wanted)                                                                            \
  do {                                                                                                     \
    const int result_ = (call);                                                                            \
    if (result_ != (wanted)) {                                                                             \
      fprintf(stderr, "%s:%d: %s = %d, expected %d\n", __FILE__, __LINE__, #call, result_, (int)(wanted)); \
      exit(1);                                                                                             \
    }                                                                                                      \
  } while (0)
#define CHECK_CU(call) EXPECT_CU(call, CUDA_SUCCESS)

// Of the version whose types cuda.h declares.
template <class Function>
Function* driver_call(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult how{};
  CHECK(cudaGetDriverEntryPointByVersion(name, &found, CUDA_VERSION, cudaEnableDefault, &how));
  if (how != cudaDriverEntryPointSuccess || !found) {
    fprintf(stderr, "the driver has no %s\n", name);
    exit(1);
  }
  return reinterpret_cast<Function*>(found);
}

// DRIVER(cuMemCreate): a local p_cuMemCreate.
#define DRIVER(name) auto* const p_##name = driver_call<decltype(name)>(#name)
