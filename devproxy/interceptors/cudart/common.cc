// The state of libcudart: each thread's last error and device, the refusals.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "devproxy/interceptors/cudart/stub.h"

namespace devproxy::sa::cudart {

constinit thread_local Thread t_thread;
bool g_trace = false;

namespace {

// Read once, before main: getenv is not safe beside a setenv of the job.
struct Environment {
  bool strict = false;
  bool quiet = false;  // DEVPROXY_LOG=error
  Environment() {
    const char* text = getenv("DEVPROXY_STRICT");
    strict = text != nullptr && strcmp(text, "1") == 0;
    text = getenv("DEVPROXY_LOG");
    quiet = text != nullptr && strncmp(text, "error", 5) == 0;
    text = getenv("DEVPROXY_TRACE");
    g_trace = text != nullptr && strcmp(text, "1") == 0;
  }
};
const Environment& environment() {
  static const Environment e;
  return e;
}
__attribute__((constructor)) void read_environment() { static_cast<void>(environment()); }

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
  // One bit per name: said once, whichever thread comes first. Two names that share a bit lose a line, no refusal.
  static std::atomic<uint8_t> said[4096];
  unsigned hash = 2166136261u;
  for (const char* p = name; *p; ++p) hash = (hash ^ static_cast<unsigned char>(*p)) * 16777619u;
  if (said[hash & 4095].exchange(1) == 0 && !environment().quiet)
    fprintf(stderr, "devproxy: %s: %s is refused: %s (cudaErrorNotSupported; see docs/support.md)\n", kSoname, name,
            reason);
  if (environment().strict) abort();
  return cudaErrorNotSupported;
}

int refuse_export(unsigned number) { return record(refuse(kRefused[number].name, kRefused[number].reason)); }

}  // namespace devproxy::sa::cudart
