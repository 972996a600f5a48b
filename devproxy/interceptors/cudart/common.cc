// SPDX-License-Identifier: Apache-2.0
// The state of libcudart: each thread's last error and device, the refusals.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "devproxy/csrc/base/refusal.h"
#include "devproxy/interceptors/cudart/stub.h"

namespace devproxy::sa::cudart {

constinit thread_local Thread t_thread;
bool g_trace = false;

namespace {

// Read once, before main: getenv is not safe beside a setenv of the job.
__attribute__((constructor)) void read_environment() {
  const char* text = getenv("DEVPROXY_TRACE");
  g_trace = text != nullptr && strcmp(text, "1") == 0;
}

}  // namespace

void trace_call(const char* name) { fprintf(stderr, "devproxy: call %s\n", name); }

// A context's fault stays: the program guide calls such errors sticky, and every later call returns them again.
bool is_sticky(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure: return true;
    default: return false;
  }
}

// CUDA C++ Programming Guide, "Error Checking": cudaErrorNotReady is not considered an error and is not reported by
// cudaPeekAtLastError() or cudaGetLastError().
cudaError_t record_failure(cudaError_t error) {
  if (error != cudaErrorNotReady) t_thread.last = error;
  return error;
}

cudaError_t refuse(const char* name, const char* reason) {
  // By a hash of the name: two names that share a place lose a line, no refusal.
  static unsigned char said[4096];
  unsigned hash = 2166136261u;
  for (const char* p = name; *p; ++p) hash = (hash ^ static_cast<unsigned char>(*p)) * 16777619u;
  dp_refuse(kSoname, name, reason, "cudaErrorNotSupported", &said[hash & 4095]);
  return cudaErrorNotSupported;
}

int refuse_export(unsigned number) { return record(refuse(kRefused[number].name, kRefused[number].reason)); }

}  // namespace devproxy::sa::cudart
