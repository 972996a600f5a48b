// SPDX-License-Identifier: Apache-2.0
// What every program of the runtime-API suite uses: checks that name the line and the error.
//
// A program includes only the vendor's header and links to libcudart, so it runs unchanged on a real runtime. It prints
// "PASS <name>" as its last line and exits 0 when every check held.
#ifndef DEVPROXY_TESTS_PROGRAMS_CUDART_PROGRAM_H_
#define DEVPROXY_TESTS_PROGRAMS_CUDART_PROGRAM_H_

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#define EXPECT_RESULT(call, wanted)                                                                          \
  do {                                                                                                       \
    const cudaError_t result_ = (call);                                                                      \
    if (result_ != (wanted)) {                                                                               \
      fprintf(stderr, "%s:%d: %s = %s, expected %s\n", __FILE__, __LINE__, #call, cudaGetErrorName(result_), \
              cudaGetErrorName(wanted));                                                                     \
      exit(1);                                                                                               \
    }                                                                                                        \
  } while (0)

#define CHECK(call) EXPECT_RESULT(call, cudaSuccess)

#define EXPECT(condition)                                                      \
  do {                                                                         \
    if (!(condition)) {                                                        \
      fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
      exit(1);                                                                 \
    }                                                                          \
  } while (0)

inline int pass(const char* name) {
  printf("PASS %s\n", name);
  fflush(stdout);
  return 0;
}

// A gate in a stream: what comes behind close() waits until open().
class Gate {
 public:
  void close(cudaStream_t stream) {
    open_ = false;
    CHECK(cudaLaunchHostFunc(stream, wait, this));
  }
  void open() { open_ = true; }

 private:
  static void wait(void* self) {
    while (!static_cast<Gate*>(self)->open_) usleep(200);
  }
  std::atomic<bool> open_{true};
};

#endif
