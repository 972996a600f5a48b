// SPDX-License-Identifier: Apache-2.0
/* What every program of the driver-API suite uses: checks that name the line and the driver's error, and set-up.
 *
 * A program includes only the vendor's <cuda.h> and links to libcuda.so.1, so it runs unchanged on a real driver (with
 * kernels built for it). It prints "PASS <name>" as its last line and exits 0 when every check held. */
#ifndef DEVPROXY_TESTS_PROGRAM_H_
#define DEVPROXY_TESTS_PROGRAM_H_

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <cuda.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static inline const char* error_name(CUresult r) {
  const char* name = "unknown error";
  cuGetErrorName(r, &name);
  return name;
}

#define EXPECT_RESULT(call, wanted)                                                                       \
  do {                                                                                                    \
    const CUresult result_ = (call);                                                                      \
    if (result_ != (wanted)) {                                                                            \
      fprintf(stderr, "%s:%d: %s = %d (%s), expected %d (%s)\n", __FILE__, __LINE__, #call, (int)result_, \
              error_name(result_), (int)(wanted), error_name(wanted));                                    \
      exit(1);                                                                                            \
    }                                                                                                     \
  } while (0)

#define CHECK(call) EXPECT_RESULT(call, CUDA_SUCCESS)

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

static inline int pass(const char* name) {
  printf("PASS %s\n", name);
  fflush(stdout);
  return 0;
}

/* Driver up, device 0, its primary context current. */
static inline CUdevice start(void) {
  CUdevice dev;
  CUcontext ctx;
  CHECK(cuInit(0));
  CHECK(cuDeviceGet(&dev, 0));
  CHECK(cuDevicePrimaryCtxRetain(&ctx, dev));
  CHECK(cuCtxSetCurrent(ctx));
  return dev;
}

/* The path of the kernels' module (tests/subjects/driver/kernels.c); the harness sets it. */
static inline const char* kernels_path(void) {
  const char* path = getenv("TEST_KERNELS");
  if (!path) {
    fprintf(stderr, "TEST_KERNELS is not set: give the path of the kernels' module\n");
    exit(2);
  }
  return path;
}

static inline CUmodule load_kernels(void) {
  CUmodule mod;
  CHECK(cuModuleLoad(&mod, kernels_path()));
  return mod;
}

static inline CUfunction kernel(CUmodule mod, const char* name) {
  CUfunction f;
  CHECK(cuModuleGetFunction(&f, mod, name));
  return f;
}

static inline CUresult launch1(CUfunction f, CUstream s, void** params) {
  return cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, s, params, NULL);
}

/* words[i] = value for i < count */
static inline void launch_fill(CUfunction f, CUstream s, CUdeviceptr dst, uint32_t value, uint64_t count) {
  void* params[] = {&dst, &value, &count};
  CHECK(launch1(f, s, params));
}

/* The same after a busy wait of `us` microseconds on the device. */
static inline void launch_slow_fill(CUfunction f, CUstream s, CUdeviceptr dst, uint32_t value, uint64_t count,
                                    uint64_t us) {
  void* params[] = {&dst, &value, &count, &us};
  CHECK(launch1(f, s, params));
}

/* dst[i] = src[i] for 32-bit words */
static inline void launch_copy(CUfunction f, CUstream s, CUdeviceptr dst, CUdeviceptr src, uint64_t count) {
  void* params[] = {&dst, &src, &count};
  CHECK(launch1(f, s, params));
}

/* words[i] = words[i] * factor + add */
static inline void launch_affine(CUfunction f, CUstream s, CUdeviceptr words, uint32_t factor, uint32_t add,
                                 uint64_t count) {
  void* params[] = {&words, &factor, &add, &count};
  CHECK(launch1(f, s, params));
}

static inline void launch_slow(CUfunction f, CUstream s, uint64_t us) {
  void* params[] = {&us};
  CHECK(launch1(f, s, params));
}

/* A gate in a stream: what comes behind close_gate() waits until open_gate(). No test depends on how long a kernel
 * takes. */
typedef struct {
  _Atomic int open;
} Gate;

static inline void gate_function(void* gate) {
  while (!atomic_load(&((Gate*)gate)->open)) usleep(200);
}

static inline void close_gate(Gate* gate, CUstream s) {
  atomic_store(&gate->open, 0);
  CHECK(cuLaunchHostFunc(s, gate_function, gate));
}

static inline void open_gate(Gate* gate) { atomic_store(&gate->open, 1); }

static inline void expect_words(const uint32_t* words, uint32_t value, size_t count) {
  for (size_t i = 0; i < count; ++i)
    if (words[i] != value) {
      fprintf(stderr, "word %zu of %zu is 0x%x, expected 0x%x\n", i, count, words[i], value);
      exit(1);
    }
}

static inline void expect_device_words(CUdeviceptr src, uint32_t value, size_t count) {
  uint32_t* words = malloc(count * 4);
  CHECK(cuMemcpyDtoH(words, src, count * 4));
  expect_words(words, value, count);
  free(words);
}

#endif
