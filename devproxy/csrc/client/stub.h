// SPDX-License-Identifier: Apache-2.0
// What a generated export needs: the check before the call, the refusal, the per-thread default stream.
//
// The job's process is not ours: nothing here exits, throws, or runs at static destruction.
#pragma once

#include <cstdint>

#include "devproxy/csrc/client/sends.h"

namespace devproxy::client {

// A result number that turns into the vendor's enum of whichever export returns it; csrc knows no vendor header.
struct AnyResult {
  int32_t value;
  template <class E>
  operator E() const {  // NOLINT(google-explicit-constructor)
    return static_cast<E>(value);
  }
};

namespace detail {
// 0 before cuInit, 1 after, 2 in a child forked by an initialised parent. Read by every export.
extern int g_init_state;
[[nodiscard]] int32_t not_ready_error();
void trace_call(const char* name);
extern bool g_trace;
}  // namespace detail

class CallScope {
 public:
  explicit CallScope(const ApiInfo& api) : error_(0), sends_(api) {
    if (__builtin_expect(detail::g_init_state != 1, 0) && api.needs_init) error_ = detail::not_ready_error();
    if (__builtin_expect(detail::g_trace, 0)) detail::trace_call(api.name);
  }
  [[nodiscard]] bool ok() const { return error_ == 0; }
  [[nodiscard]] AnyResult error() const { return {error_}; }

 private:
  int32_t error_;
  [[no_unique_address]] Sends sends_;
};

// Says once per API on stderr that it is refused and why; CUDA_ERROR_NOT_SUPPORTED. DEVPROXY_STRICT=1 aborts (tests).
[[nodiscard]] AnyResult refuse(const ApiInfo& api, const char* reason);

// While one lives, the null stream of this thread means CU_STREAM_PER_THREAD (the _ptds and _ptsz exports).
class PerThreadDefault {
 public:
  PerThreadDefault();
  ~PerThreadDefault();
  PerThreadDefault(const PerThreadDefault&) = delete;
  PerThreadDefault& operator=(const PerThreadDefault&) = delete;

 private:
  bool before_;
};

}  // namespace devproxy::client
