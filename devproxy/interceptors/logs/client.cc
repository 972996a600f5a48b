// SPDX-License-Identifier: Apache-2.0
// The driver's error log, for programs that listen to it (PyTorch 2.15 does from its import on): listeners are taken
// and the log stays empty. What devproxy has to say is on stderr.
#include <atomic>

#include "devproxy/csrc/client/stub.h"
#include "sa_decl.gen.h"

namespace devproxy::sa::logs {
namespace {

constexpr int kMaxListeners = 64;
// A listener's handle is its place here; never called, so only whether it is taken is kept.
std::atomic<bool> g_taken[kMaxListeners];

}  // namespace

CUresult cuLogsRegisterCallback(CUlogsCallback, void*, CUlogsCallbackHandle* callback_out) {
  for (auto& place : g_taken) {
    bool free = false;
    if (!place.compare_exchange_strong(free, true)) continue;
    // cuda.h: the handle is optional.
    if (callback_out != nullptr) *callback_out = reinterpret_cast<CUlogsCallbackHandle>(&place);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle callback) {
  const auto at = reinterpret_cast<uintptr_t>(callback) - reinterpret_cast<uintptr_t>(g_taken);
  if (at >= sizeof g_taken || at % sizeof g_taken[0] != 0) return CUDA_ERROR_INVALID_VALUE;
  return g_taken[at / sizeof g_taken[0]].exchange(false) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuLogsCurrent(CUlogIterator* iterator_out, unsigned int flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  *iterator_out = 0;
  return CUDA_SUCCESS;
}

CUresult cuLogsDumpToMemory(CUlogIterator*, char* buffer, size_t* size, unsigned int flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (*size > 0) buffer[0] = '\0';
  *size = 0;
  return CUDA_SUCCESS;
}

}  // namespace devproxy::sa::logs
