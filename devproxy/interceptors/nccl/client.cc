// SPDX-License-Identifier: Apache-2.0
// libnccl.so.2: its version, its texts, and how its calls fail.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "devproxy/interceptors/nccl/comm.h"

namespace devproxy::sa::nccl {

namespace {

constexpr int kVersion = 22907;  // 2.29.7, whose semantics these are, but for what is refused

std::mutex g_last_mu;
char g_last[512];

bool says_warnings() {
  static const bool on = [] {
    const char* level = getenv("NCCL_DEBUG");
    return level && strcasecmp(level, "VERSION") != 0 && strcasecmp(level, "NONE") != 0;
  }();
  return on;
}

}  // namespace

// hal/cuda looks for this, so that it takes no other libnccl.so.2 than NVIDIA's.
extern "C" __attribute__((visibility("default"))) const char devproxy_nccl_shim[] = "devproxy";

ncclResult_t fail(ncclResult_t result, const char* format, ...) {
  char text[sizeof g_last];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  {
    const std::lock_guard lock(g_last_mu);
    memcpy(g_last, text, sizeof text);
  }
  if (says_warnings()) fprintf(stderr, "devproxy: libnccl.so.2: %s\n", text);
  return result;
}

ncclResult_t fail_core(int32_t rc, const char* doing) {
  return fail(kUnhandledCudaError, "%s failed with CUDA error %d", doing, rc);
}

const Core* core() {
  static const Core* const found = devproxy_core(kCoreVersion);
  if (!found) fail(kInternalError, "libcuda.so.1 of this process is not of the same devproxy as libnccl.so.2");
  return found;
}

ncclResult_t ncclGetVersion(int* version) {
  *version = kVersion;
  return kSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case kSuccess: return "no error";
    case kUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case kSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case kInternalError: return "internal error - please report this issue to the devproxy developers";
    case kInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case kInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case kRemoteError: return "remote process exited or there was a network error";
    case kInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t) {
  static thread_local char text[sizeof g_last];
  const std::lock_guard lock(g_last_mu);
  memcpy(text, g_last, sizeof text);
  return text;
}

}  // namespace devproxy::sa::nccl
