// SPDX-License-Identifier: Apache-2.0
// What the generated exports of libcudart need: entering, the last error, the per-thread default stream, refusals.
//
// The library is a guest in the job's process: nothing here exits, throws, or runs at static destruction. It holds no
// link to the client library; all it knows of devices comes through the driver's exported functions.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>

namespace devproxy::sa::cudart {

inline constexpr int kMaxDevices = 64;  // devproxy/machine.py: MOST_GPUS
inline constexpr int kConfigurations = 8;

struct ResultName {
  int value;
  const char* name;
};
struct RefusedExport {
  const char* name;
  const char* reason;
};
// Generated, per major.
extern const char kSoname[];
extern const ResultName kResultNames[];
extern const size_t kResultNameCount;
extern const RefusedExport kRefused[];
extern const size_t kRefusedCount;

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};

// What one thread of the job owns here.
struct Thread {
  cudaError_t last = cudaSuccess;
  int device = 0;            // what cudaSetDevice chose; a context that is current says more
  bool per_thread = false;   // within a _ptds or _ptsz export: a null stream is the thread's own
  CUcontext seen = nullptr;  // the context of the last launch, and its device
  int seen_device = 0;
  int depth = 0;  // launch configurations pushed: an argument of a launch may launch
  Configuration configurations[kConfigurations] = {};
};

// initial-exec: the library is preloaded, so its TLS is in the static block and an access is one instruction.
extern constinit thread_local Thread t_thread __attribute__((tls_model("initial-exec")));

extern bool g_trace;
void trace_call(const char* name);
inline void trace(const char* name) {
  if (__builtin_expect(g_trace, 0)) trace_call(name);
}

// -- entering ---------------------------------------------------------------------------------------------------------

cudaError_t initialise_driver();
cudaError_t make_context();
extern bool g_driver_ready;

// The driver is initialised. Every call says so again only until it is.
inline cudaError_t enter_driver() { return __builtin_expect(g_driver_ready, 1) ? cudaSuccess : initialise_driver(); }

// The thread has a context: the one that is current, else its device's primary context.
inline cudaError_t enter_context() {
  CUcontext context = nullptr;
  if (__builtin_expect(cuCtxGetCurrent(&context) == CUDA_SUCCESS && context != nullptr, 1)) return cudaSuccess;
  return make_context();
}

// -- results ----------------------------------------------------------------------------------------------------------

cudaError_t record_failure(cudaError_t error);

inline cudaError_t pass(cudaError_t error) { return error; }
inline cudaError_t record(cudaError_t error) {
  return __builtin_expect(error == cudaSuccess, 1) ? cudaSuccess : record_failure(error);
}

// The driver's result numbers are the runtime's (driver_types.h lists both under one value since CUDA 10.1).
inline cudaError_t result(CUresult value) { return static_cast<cudaError_t>(value); }

int refuse_export(unsigned number);
// Says once per name that it is refused and why; cudaErrorNotSupported.
cudaError_t refuse(const char* name, const char* reason);

// -- streams ----------------------------------------------------------------------------------------------------------

class PerThreadDefault {
 public:
  PerThreadDefault() : before_(t_thread.per_thread) { t_thread.per_thread = true; }
  ~PerThreadDefault() { t_thread.per_thread = before_; }
  PerThreadDefault(const PerThreadDefault&) = delete;
  PerThreadDefault& operator=(const PerThreadDefault&) = delete;

 private:
  bool before_;
};

inline CUstream stream_of(cudaStream_t stream) {
  return stream != nullptr || !t_thread.per_thread ? stream : CU_STREAM_PER_THREAD;
}

// -- devices (device.cc) ----------------------------------------------------------------------------------------------

// The device of the thread's current context, or the one that it chose.
int current_device();
// Its primary context, retained once per process.
cudaError_t primary_context(int device, CUcontext* out);
// The device of a context that is current, remembered per thread.
inline int device_of(CUcontext context) {
  Thread& t = t_thread;
  if (__builtin_expect(context != t.seen, 0)) {
    CUdevice device = 0;
    if (cuCtxGetDevice(&device) != CUDA_SUCCESS) return 0;
    t.seen = context;
    t.seen_device = device < kMaxDevices ? device : 0;
  }
  return t.seen_device;
}

}  // namespace devproxy::sa::cudart
