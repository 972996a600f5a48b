// SPDX-License-Identifier: Apache-2.0
// What the programs of this folder share: checks that name the line and the runtime's error, and buffers.
//
// A program includes only the vendor's headers and is linked to the shared runtime, so it runs unchanged on a real
// driver. It prints `ok <name>` and exits with 0 when every check held, 1 with what differed, 3 with `not here: <what>`
// where the machine lacks something that the program is about. With DEVPROXY_TEST_NO_KERNELS (the recording device:
// calls are checked, copies are real, no kernel is executed) values that a kernel makes are not compared, and the last
// line says so.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define EXPECT_RESULT(call, wanted)                                                                       \
  do {                                                                                                    \
    const cudaError_t result_ = (call), wanted_ = (wanted);                                               \
    if (result_ != wanted_) {                                                                             \
      fprintf(stderr, "%s:%d: %s = %d (%s), expected %d (%s)\n", __FILE__, __LINE__, #call, (int)result_, \
              cudaGetErrorName(result_), (int)wanted_, cudaGetErrorName(wanted_));                        \
      exit(1);                                                                                            \
    }                                                                                                     \
  } while (0)

#define CHECK(call) EXPECT_RESULT(call, cudaSuccess)

// Behind every <<<>>>: its result is the thread's last error.
#define LAUNCHED() CHECK(cudaGetLastError())

// The call fails with just this, and it is the thread's last error, once.
#define EXPECT_ERROR(call, wanted)                  \
  do {                                              \
    EXPECT_RESULT(call, wanted);                    \
    EXPECT_RESULT(cudaPeekAtLastError(), wanted);   \
    EXPECT_RESULT(cudaGetLastError(), wanted);      \
    EXPECT_RESULT(cudaGetLastError(), cudaSuccess); \
  } while (0)

#define EXPECT(condition)                                                      \
  do {                                                                         \
    if (!(condition)) {                                                        \
      fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
      exit(1);                                                                 \
    }                                                                          \
  } while (0)

#define EXPECT_EQ(a, b)                                                                                   \
  do {                                                                                                    \
    const long long a_ = (long long)(a), b_ = (long long)(b);                                             \
    if (a_ != b_) {                                                                                       \
      fprintf(stderr, "%s:%d: %s is %lld (0x%llx), expected %lld (0x%llx)\n", __FILE__, __LINE__, #a, a_, \
              (unsigned long long)a_, b_, (unsigned long long)b_);                                        \
      exit(1);                                                                                            \
    }                                                                                                     \
  } while (0)

inline bool kernels_run() {
  static const bool run = !getenv("DEVPROXY_TEST_NO_KERNELS");
  return run;
}

// Of what a kernel makes.
#define EXPECT_MADE(condition)            \
  do {                                    \
    if (kernels_run()) EXPECT(condition); \
  } while (0)
#define EXPECT_MADE_EQ(a, b)            \
  do {                                  \
    if (kernels_run()) EXPECT_EQ(a, b); \
  } while (0)

// What a buffer holds once a kernel has written it; without kernels, what was there before.
template <class T>
T made(T by_kernel, T before) {
  return kernels_run() ? by_kernel : before;
}

inline int ok(const char* name) {
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
  printf("ok %s%s\n", name, kernels_run() ? "" : " (without kernels)");
  fflush(stdout);
  return 0;
}

[[noreturn]] inline void not_here(const char* what) {
  printf("not here: %s\n", what);
  fflush(stdout);
  _Exit(3);
}

template <class T>
T* device(size_t count) {
  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, count * sizeof(T)));
  return static_cast<T*>(memory);
}

template <class T>
T* device_of(const std::vector<T>& values) {
  T* memory = device<T>(values.size());
  CHECK(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return memory;
}

template <class T>
T* zeroes(size_t count) {
  T* memory = device<T>(count);
  CHECK(cudaMemset(memory, 0, count * sizeof(T)));
  CHECK(cudaDeviceSynchronize());  // cudaMemset may be asynchronous, and a non-blocking stream does not wait for it
  return memory;
}

template <class T>
std::vector<T> back(const T* memory, size_t count) {
  std::vector<T> values(count);
  CHECK(cudaMemcpy(values.data(), memory, count * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

#define EXPECT_ALL(values, wanted)                                                                         \
  do {                                                                                                     \
    const auto& all_ = (values);                                                                           \
    for (size_t i_ = 0; i_ < all_.size(); ++i_)                                                            \
      if (all_[i_] != (wanted)) {                                                                          \
        fprintf(stderr, "%s:%d: %s[%zu] of %zu is %lld, expected %lld\n", __FILE__, __LINE__, #values, i_, \
                all_.size(), (long long)all_[i_], (long long)(wanted));                                    \
        exit(1);                                                                                           \
      }                                                                                                    \
  } while (0)

inline int attribute(cudaDeviceAttr which) {
  int value = 0, device_number = 0;
  CHECK(cudaGetDevice(&device_number));
  CHECK(cudaDeviceGetAttribute(&value, which, device_number));
  return value;
}

inline int compute_capability() {
  return attribute(cudaDevAttrComputeCapabilityMajor) * 10 + attribute(cudaDevAttrComputeCapabilityMinor);
}

#ifdef __CUDACC__
// The number of this thread in the grid, and how many there are, where both are one-dimensional.
__device__ inline size_t here() { return blockIdx.x * size_t{blockDim.x} + threadIdx.x; }
__device__ inline size_t threads() { return size_t{gridDim.x} * blockDim.x; }
#endif
