// SPDX-License-Identifier: Apache-2.0
// What the client halves share: vendor types at the edge, devproxy's own state below.
#pragma once

#include "devproxy/csrc/client/device_state.h"
#include "devproxy/csrc/client/log.h"
#include "sa_decl.gen.h"

namespace devproxy::sa {

inline CUresult result(int32_t value) { return static_cast<CUresult>(value); }
template <class Handle>
inline uint64_t bits(Handle h) {
  return reinterpret_cast<uint64_t>(h);
}
template <class Handle>
inline Handle handle(uint64_t value) {
  return reinterpret_cast<Handle>(value);
}

// Resolves the stream argument of an export, or returns the error from it.
#define DP_STREAM(hStream, stream, device)                                                                 \
  ::devproxy::client::StreamObj* stream = nullptr;                                                         \
  ::devproxy::client::DeviceState* device = nullptr;                                                       \
  if (const int32_t rc_ = ::devproxy::client::resolve_stream(bits(hStream), &stream, &device); rc_ != kOk) \
  return result(rc_)

// Resolves the current device, or returns the error.
#define DP_CURRENT(device)                           \
  ::devproxy::client::DeviceState* device = nullptr; \
  if (const int32_t rc_ = ::devproxy::client::current_device(&device); rc_ != kOk) return result(rc_)

}  // namespace devproxy::sa
